"""What a model's files set: sampling options (generation_config.json), for requests that leave them out or for all of
them, and how many tokens the model takes. Pure.

Checkpoints extend their positions by RoPE scaling, and say so in different ways: in most, the length that config.json
names is the extended one, in others it is the one before. What vLLM, SGLang and transformers all accept is taken; what
one of them refuses is taken only if it is asked for.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.schemas.requests import Sampling

BARRED = -100.0  # a logit bias after which a token is drawn only where a grammar allows no other
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WHOLE = ("top_k", "min_new_tokens", "max_new_tokens")
# What changes texts and is not applied here, and the values with which it has no effect.
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "sequence_bias": ({}, []),
    "top_h": (1, 1.0),
    "typical_p": (1, 1.0),
    "watermarking_config": ({},),
}


class BadDefaults(ValueError):
    """A value has a type that its key cannot have; the text names both."""


class GenerationDefaults(NamedTuple):
    """
    Attributes:
        sampling: for requests that leave an option out.
        min_tokens: likewise.
        max_tokens: likewise; 0: as many as there is room for.
        strings: end every answer.
        barred: tokens that no answer has.
        ignored: keys and values of the file that are not applied.
    """

    sampling: Sampling = Sampling()
    min_tokens: int = 0
    max_tokens: int = 0
    strings: tuple[str, ...] = ()
    barred: tuple[int, ...] = ()
    ignored: tuple[tuple[str, Any], ...] = ()


NO_DEFAULTS = GenerationDefaults()


def defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """
    Args:
        generation: of generation_config.json.
    Raises:
        BadDefaults: see there.
    """
    values = {key: _number(key, value) for key in _SAMPLING if (value := generation.get(key)) is not None}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    ignored = [
        (key, value)
        for key, neutral in _IGNORED.items()
        if (value := generation.get(key)) is not None and value not in neutral
    ]
    barred = list(ids("suppress_tokens", generation.get("suppress_tokens")))
    longer = []
    for word in _lists("bad_words_ids", generation.get("bad_words_ids")):
        if len(word) == 1:
            barred += word
        elif word:
            longer.append(list(word))
    if longer:
        ignored.append(("bad_words_ids", longer))
    return GenerationDefaults(
        Sampling(**values),
        int(_number("min_new_tokens", generation.get("min_new_tokens") or 0)),
        int(_number("max_new_tokens", generation.get("max_new_tokens") or 0)),
        _strings(generation.get("stop_strings")),
        tuple(dict.fromkeys(barred)),
        tuple(ignored),
    )


def ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids, which files write as a list or as one; (): none is named.

    Raises:
        BadDefaults: it is not an id.
    """
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for each in listed:
        whole = isinstance(each, int) or (isinstance(each, float) and each.is_integer())
        if isinstance(each, bool) or not whole or each < 0:
            raise BadDefaults(f"{key} has {each!r}, which is not a token id")
    return tuple(int(each) for each in listed)


def _lists(key: str, value: Any) -> list[tuple[int, ...]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise BadDefaults(f"{key} is {value!r}; it must be a list of lists of token ids")
    return [ids(key, each) for each in value]


def _number(key: str, value: Any) -> Any:
    """A number; a whole one, where only such can be meant, also if it is written as 20.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadDefaults(f"{key} is {value!r}; it must be a number")
    if key not in _WHOLE:
        return float(value)
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise BadDefaults(f"{key} is {value!r}; it must be a whole number")
    return int(value)


def _strings(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise BadDefaults(f"stop_strings is {value!r}; it must be a text or a list of texts")
    return tuple(dict.fromkeys(each for each in listed if each))


_KEYS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "max_seq_length"),
    *("seq_length", "seq_len", "n_ctx"),
)
_NO_LIMIT = 1 << 31  # tokenizer_config.json writes "unlimited" as 1e30
_FALLBACK = 2048  # for models whose files name no limit
_PLAIN = ("default", "mrope", "proportional")  # positions as they are, unless there is a factor
_EXTENDED = ("longrope", "su", "llama3")  # the length is the extended one
ROPE_TYPES = frozenset([*_PLAIN, *_EXTENDED, "linear", "dynamic", "yarn"])  # that transformers supports
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


NO_LENGTH = Length(0, 0, "")


def context_length(
    config: Mapping[str, Any], tokenizer: Mapping[str, Any] = {}, *, file: str = "config.json"
) -> Length:
    """
    Args:
        config: of config.json.
        tokenizer: of tokenizer_config.json.
        file: that ``config`` was read from.
    """
    named, source = _named(config, file)
    kind = str(of_text(config, "model_type") or "")
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
            limit = f", up to {most:,} with --max-model-len" if most > tokens else ""
            source += f"; RoPE scaling {rope_type(rope)}{limit}"
            break
    return Length(tokens, most, source)


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of RoPE: one for all layers, or one for each type of them."""
    for key in ("rope_scaling", "rope_parameters"):
        found = of_text(config, key)
        if isinstance(found, dict) and found:
            parts = [part for part in found.values() if isinstance(part, dict)]
            yield from parts if parts and not rope_type(found) else [found]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Its name; "" where there is none."""
    return str(rope.get("rope_type") or rope.get("type") or "")


def _scaled(rope: Mapping[str, Any], named: int, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The length unless more is asked for, and the most; None: without effect on it."""
    kind, factor = rope_type(rope), _as_number(rope.get("factor"))
    limit = named or _FALLBACK
    original = _positive(rope.get("original_max_position_embeddings"))
    if kind in ("longrope", "su"):  # after the original length, short prompts come out worse
        original = original or _positive(of_text(config, "original_max_position_embeddings"))
        return min(limit, original or limit), limit
    if kind in _EXTENDED or factor <= 1:
        return None
    reached = int((original or limit) * factor)
    if kind == "yarn" or original:  # checkpoints name the extended length, and cards the factor alone
        return named or reached, max(limit, reached)
    return reached, reached


def _named(config: Mapping[str, Any], file: str) -> tuple[int, str]:
    """The length before scaling, and its key."""
    if longest := _positive(of_text(config, "model_max_length")):  # of Cohere's: above max_position_embeddings
        return longest, f"model_max_length in {file}"
    found = {key: value for key in _KEYS if (value := _positive(of_text(config, key)))}
    if not found:
        return 0, ""
    key = min(found, key=found.__getitem__)
    return found[key], f"{key} in {file}"


def of_text(config: Mapping[str, Any], key: str) -> Any:
    """A value of the language model's configuration, which multimodal models nest."""
    nested = config.get("text_config")
    value = nested.get(key) if isinstance(nested, dict) else None
    return config.get(key) if value is None else value


def _as_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _positive(value: Any) -> int:
    """A length, which files write as 4096 and as 4096.0; 0: it is none."""
    number = _as_number(value)
    return int(number) if 1 <= number < float("inf") else 0
