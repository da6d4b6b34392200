"""How a model directory makes one vector of a text: pooling, normalisation, limits. Reads no weights.

The files of sentence-transformers decide where they are (``modules.json``, ``1_Pooling/config.json``,
``sentence_bert_config.json``). Without them, an encoder takes the mean of its tokens' vectors and a decoder the vector
of the last token, and vectors are scaled to length 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from infra.model.modeldir import ModelError

MODULES = "modules.json"
# Model types of transformers whose tokens see each other in both directions, and that generate nothing.
ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
        *("esm", "eurobert", "funnel", "ibert", "layoutlm", "megatron-bert", "mobilebert", "modernbert", "mpnet"),
        *("nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roformer", "squeezebert"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
_PADDED_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl", "xmod"})
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_NO_LIMIT = 1 << 31  # tokenizer_config.json writes "unlimited" as 1e30
_FALLBACK_LEN = 512
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class EmbeddingModel(msgspec.Struct, frozen=True):
    """
    Attributes:
        pooling: one of ``POOLINGS``.
        normalize: vectors are scaled to length 1.
        max_tokens: of one input, special tokens included.
        lower_case: texts are lower-cased before they are tokenised.
        pad_token_id: fills shorter inputs of a batch; its vectors are never read.
        matryoshka: the shorter vectors it was trained for; empty: unknown.
    """

    pooling: str
    normalize: bool
    max_tokens: int
    vocab_size: int
    lower_case: bool = False
    pad_token_id: int = 0
    matryoshka: tuple[int, ...] = ()


def makes_vectors(path: Path) -> bool:
    """Whether a directory has an embedding model and no generating one: sentence-transformers' files, or an encoder."""
    if (path / MODULES).is_file():
        return True
    try:
        return is_encoder(path)
    except ModelError:
        return False  # whoever loads the model reports it


def is_encoder(path: Path) -> bool:
    """Whether a directory has an encoder, which can generate nothing."""
    return _read(path / "config.json").get("model_type") in ENCODERS


def describe(path: Path) -> EmbeddingModel:
    """
    Raises:
        ModelError: a file is missing or malformed, or asks for what is not supported.
    """
    config = _read(path / "config.json", needed=True)
    if isinstance(nested := config.get("text_config"), dict):  # a model of images and text
        config = {**nested, **config}
    causal = config.get("model_type") not in ENCODERS
    pooling, normalize = "lasttoken" if causal else "mean", True
    if (path / MODULES).is_file():
        pooling, normalize = _modules(path, pooling)
    transformer = _read(path / "sentence_bert_config.json")
    matryoshka = config.get("matryoshka_dimensions") or ()
    return EmbeddingModel(
        pooling,
        normalize,
        _max_tokens(config, transformer, _read(path / "tokenizer_config.json")),
        vocab_size=int(config.get("vocab_size") or 1 << 31),
        lower_case=bool(transformer.get("do_lower_case")),
        pad_token_id=config.get("pad_token_id") or 0,
        matryoshka=tuple(int(each) for each in matryoshka) if isinstance(matryoshka, list) else (),
    )


def _modules(path: Path, pooling: str) -> tuple[str, bool]:
    """The pooling, and whether vectors are normalised, of sentence-transformers' list of modules.

    Raises:
        ModelError: there is a module that is not known.
    """
    try:
        modules = msgspec.json.decode((path / MODULES).read_bytes(), type=list[dict[str, Any]])
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"{path / MODULES} cannot be read: {error}") from error
    normalize = False
    for module in modules:
        match str(module.get("type", "")).rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(path / str(module.get("path", "")) / "config.json")
            case "Normalize":
                normalize = True
            case other:
                raise ModelError(
                    f"{path / MODULES} has a module {other!r}; Transformer, Pooling and Normalize are supported"
                )
    return pooling, normalize


def _pooling(file: Path) -> str:
    config = _read(file, needed=True)
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(f"{file} asks for pooling by {modes or 'nothing'}; one of {', '.join(POOLINGS)} is supported")
    return str(modes[0])


def _max_tokens(config: Mapping[str, Any], transformer: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    limits = [value for key in _LENGTH_KEYS if isinstance(value := config.get(key), int)][:1]
    if config.get("model_type") in _PADDED_POSITIONS:  # positions begin behind the padding token's
        limits = [limit - 2 for limit in limits]
    named = (transformer.get("max_seq_length"), tokenizer.get("model_max_length"))
    limits += [int(value) for value in named if isinstance(value, int | float) and 0 < value < _NO_LIMIT]
    return min(limits, default=_FALLBACK_LEN)


def _read(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not file.is_file():
        if needed:
            raise ModelError(f"{file} is missing; is {file.parent} a model directory?")
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
