"""How many tokens a model's files say that it takes. Pure.

Checkpoints extend their positions by RoPE scaling, and say so in different ways: in most, the length that config.json
names is the extended one, in others it is the one before. What vLLM, SGLang and transformers all accept is taken; what
one of them refuses is taken only if it is asked for.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_KEYS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "max_seq_length"),
    *("seq_length", "seq_len", "n_ctx"),
)
_NO_LIMIT = 1 << 31  # tokenizer_config.json writes "unlimited" as 1e30
_FALLBACK = 2048  # for models whose files name no limit
_PLAIN = ("default", "mrope", "proportional")  # positions as they are, unless there is a factor
_EXTENDED = ("longrope", "su", "llama3")  # the length is the extended one
ROPE_TYPES = frozenset([*_PLAIN, *_EXTENDED, "linear", "dynamic", "yarn"])  # that transformers knows
# Of families whose checkpoints leave it to transformers' configuration classes. A test compares them.
DEFAULTS: Mapping[str, int] = {
    "cohere": 8192, "cohere2": 8192, "deepseek_v3": 4096, "falcon": 2048, "gemma": 8192, "gemma2": 8192,
    "gemma3": 131_072, "gemma3_text": 131_072, "gemma3n": 32_768, "gemma3n_text": 32_768, "gemma4": 131_072,
    "gemma4_text": 131_072, "glm4": 131_072, "glm4_moe": 131_072, "gpt2": 1024, "gpt_oss": 131_072, "granite": 2048,
    "llama": 2048, "llama4": 131_072, "llama4_text": 131_072, "mistral": 131_072, "mixtral": 131_072, "olmo2": 2048,
    "olmo3": 2048, "opt": 2048, "phi3": 4096, "qwen2": 32_768, "qwen2_moe": 32_768, "qwen3": 32_768,
    "qwen3_moe": 32_768, "seed_oss": 524_288, "smollm3": 32_768, "stablelm": 4096, "starcoder2": 4096,
}  # fmt: skip


class Length(NamedTuple):
    """Prompt and output together, in tokens.

    Attributes:
        tokens: unless a user asks for more.
        most: that a user may ask for.
        source: what says so: a key and its file, and the RoPE scaling.
    """

    tokens: int
    most: int
    source: str

    def limit(self, wanted: int) -> int:
        """The limit for a user who asks for ``wanted`` tokens; 0: for none in particular."""
        return self.most if wanted > self.tokens else self.tokens


NONE = Length(0, 0, "")


def length(config: Mapping[str, Any], tokenizer: Mapping[str, Any] = {}, *, file: str = "config.json") -> Length:
    """
    Args:
        config: of config.json.
        tokenizer: of tokenizer_config.json.
        file: that ``config`` was read from.
    """
    named, source = _named(config, file)
    kind = str(_of_text(config, "model_type") or "")
    if not named and (named := DEFAULTS.get(kind, 0)):
        source = f"the default of {kind} models; {file} names none"
    if not named and _positive(tokenizer.get("model_max_length")) < _NO_LIMIT:
        named = _positive(tokenizer.get("model_max_length"))
        source = "model_max_length in tokenizer_config.json"
    tokens = most = named or _FALLBACK
    if not named:
        source = "no file names one, so this is what most models take"
    if "gemma3" in kind:  # named with the scaling
        return Length(tokens, most, source)
    for rope in ropes(config):
        scaled = _scaled(rope, named, config)
        if scaled is not None:
            tokens, most = scaled
            told = f", up to {most:,} with --max-model-len" if most > tokens else ""
            source += f"; RoPE scaling {rope_type(rope)}{told}"
            break
    return Length(tokens, most, source)


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of RoPE: one for all layers, or one for each type of them."""
    for key in ("rope_scaling", "rope_parameters"):
        found = _of_text(config, key)
        if isinstance(found, dict) and found:
            parts = [part for part in found.values() if isinstance(part, dict)]
            yield from parts if parts and not rope_type(found) else [found]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Its name; "" where there is none."""
    return str(rope.get("rope_type") or rope.get("type") or "")


def _scaled(rope: Mapping[str, Any], named: int, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The length unless more is asked for, and the most; None: without effect on it."""
    kind, factor = rope_type(rope), _number(rope.get("factor"))
    limit = named or _FALLBACK
    original = _positive(rope.get("original_max_position_embeddings"))
    if kind in ("longrope", "su"):  # behind the original length, short prompts come out worse
        original = original or _positive(_of_text(config, "original_max_position_embeddings"))
        return min(limit, original or limit), limit
    if kind in _EXTENDED or factor <= 1:
        return None
    reached = int((original or limit) * factor)
    if kind == "yarn" or original:  # checkpoints name the extended length, and cards the factor alone
        return named or reached, max(limit, reached)
    return reached, reached


def _named(config: Mapping[str, Any], file: str) -> tuple[int, str]:
    """The length before scaling, and its key."""
    if longest := _positive(_of_text(config, "model_max_length")):  # of Cohere's: above max_position_embeddings
        return longest, f"model_max_length in {file}"
    found = {key: value for key in _KEYS if (value := _positive(_of_text(config, key)))}
    if not found:
        return 0, ""
    key = min(found, key=found.__getitem__)
    return found[key], f"{key} in {file}"


def _of_text(config: Mapping[str, Any], key: str) -> Any:
    """A value of the language model's configuration, which multimodal models nest."""
    nested = config.get("text_config")
    value = nested.get(key) if isinstance(nested, dict) else None
    return config.get(key) if value is None else value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _positive(value: Any) -> int:
    """A length, which files write as 4096 and as 4096.0; 0: it is none."""
    number = _number(value)
    return int(number) if 1 <= number < float("inf") else 0
