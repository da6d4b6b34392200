"""How a model directory makes one vector of a text, or one score of a pair: pooling, activation, limits. Reads no
weights.

The files of sentence-transformers decide where they are (``modules.json``, ``1_Pooling/config.json``,
``sentence_bert_config.json``, ``config_sentence_transformers.json``). Without them, an encoder takes the mean of its
tokens' vectors and a decoder the vector of the last token, and vectors are scaled to length 1.

A folder without them whose model is one for sequence classification with one label is a cross-encoder, which scores
pairs of texts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelError, read_json

MODULES = "modules.json"
OPTIONS = "config_sentence_transformers.json"
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # of torch.nn
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


class Dense(msgspec.Struct, frozen=True):
    """A layer after the pooling. ``path``: the folder with its weights."""

    path: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"  # one of ``ACTIVATIONS``


class EmbeddingModel(msgspec.Struct, frozen=True):
    """
    Attributes:
        pooling: one of ``POOLINGS``.
        normalize: vectors are scaled to length 1.
        max_tokens: of one input, special tokens included.
        lower_case: texts are lower-cased before they are tokenised.
        pad_token_id: fills shorter inputs of a batch; its vectors are never read.
        matryoshka: the shorter vectors it was trained for; empty: unknown.
        dense: layers between pooling and normalisation.
        prompts: what is put before a text, by name.
        default_prompt: the name of that of texts whose request names none; "": nothing is put before them.
        dimensions: values of a vector whose request names no number; 0: all.
        scores: it is a cross-encoder.
        activation: between its number and the score, one of ``ACTIVATIONS``.
        token_types: for models with token types, the text of the pair that each token belongs to.
    """

    pooling: str
    normalize: bool
    max_tokens: int
    vocab_size: int
    lower_case: bool = False
    pad_token_id: int = 0
    matryoshka: tuple[int, ...] = ()
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = {}
    default_prompt: str = ""
    dimensions: int = 0
    scores: bool = False
    activation: str = "Sigmoid"
    token_types: bool = True


def makes_vectors(path: Path) -> bool:
    """Whether a directory has an embedding model or a cross-encoder, and no generating model: sentence-transformers'
    files, an encoder, or a classifier with one label."""
    if (path / MODULES).is_file():
        return True
    try:
        return is_encoder(path) or scores_pairs(path)
    except ModelError:
        return False  # loading the model reports it


def is_encoder(path: Path) -> bool:
    """Whether a directory has an encoder, which can generate nothing."""
    return read_json(path / "config.json").get("model_type") in ENCODERS


def scores_pairs(path: Path) -> bool:
    """Whether a directory has a cross-encoder."""
    config = read_json(path / "config.json")
    kinds = config.get("architectures")
    classifies = isinstance(kinds, list) and any(str(each).endswith("ForSequenceClassification") for each in kinds)
    return classifies and _labels(config) == 1 and not (path / MODULES).is_file()


def _labels(config: Mapping[str, Any]) -> int:
    """The number of labels, as transformers finds it."""
    named, number = config.get("id2label"), config.get("num_labels", config.get("_num_labels"))
    return len(named) if isinstance(named, dict) else number if isinstance(number, int) else 2


def describe(path: Path) -> EmbeddingModel:
    """
    Raises:
        ModelError: a file is missing or malformed, or asks for what is not supported.
    """
    config = read_json(path / "config.json", needed=True)
    if isinstance(nested := config.get("text_config"), dict):  # a model of images and text
        config = {**nested, **config}
    causal = config.get("model_type") not in ENCODERS
    pooling, dense, normalize = "lasttoken" if causal else "mean", tuple[Dense, ...](), True
    options = read_json(path / OPTIONS)
    prompts = _prompts(path, options)
    if (path / MODULES).is_file():
        pooling, dense, normalize = _modules(path, pooling, prompted=any(prompts.values()))
    transformer, special = read_json(path / "sentence_bert_config.json"), read_json(path / "tokenizer_config.json")
    matryoshka = config.get("matryoshka_dimensions") or ()
    return EmbeddingModel(
        pooling,
        normalize,
        _max_tokens(config, transformer, special),
        vocab_size=int(config.get("vocab_size") or 1 << 31),
        lower_case=bool(transformer.get("do_lower_case")),
        pad_token_id=config.get("pad_token_id") or 0,
        matryoshka=tuple(int(each) for each in matryoshka) if isinstance(matryoshka, list) else (),
        dense=dense,
        prompts=prompts,
        default_prompt=str(options.get("default_prompt_name") or ""),
        dimensions=_dimensions(path, options.get("truncate_dim") or config.get("truncate_dim")),
        scores=scores_pairs(path),
        activation=_activation(path, config),
        token_types="token_type_ids" in (special.get("model_input_names") or ("token_type_ids",)),
    )


def _activation(path: Path, config: Mapping[str, Any]) -> str:
    """As sentence-transformers finds it, which applies a sigmoid where nothing is named."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    return _torch_activation(
        path / "config.json", named or config.get("sbert_ce_default_activation_function") or "torch.nn.Sigmoid"
    )


def _torch_activation(file: Path, name: Any) -> str:
    """
    Raises:
        ModelError: it is none of ``ACTIVATIONS``.
    """
    activation = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or activation not in ACTIVATIONS:
        raise ModelError(f"{file} has the activation {name}; torch's {', '.join(ACTIVATIONS)} are known")
    return activation


def revision(path: Path) -> str:
    """That of the directory, and of what sentence-transformers' files add: layers of their own, and prompts."""
    base = modeldir.revision(path)
    described = describe(path)
    if not described.dense and not any(described.prompts.values()):
        return base
    digest = blake3(base.encode())
    for file in (path / MODULES, path / OPTIONS, *(each for layer in described.dense for each in _files(layer.path))):
        data = file.read_bytes() if file.is_file() else b""
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest(length=16)


def _files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file())


def _prompts(path: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """As in sentence-transformers, where queries and documents without a prompt of their own have none."""
    given = options.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise ModelError(f"{path / OPTIONS}: prompts must be texts by name")
    prompts = {"query": "", "document": ""} | given
    default = options.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{path / OPTIONS}: default_prompt_name is {default!r}, and prompts has {', '.join(prompts)}")
    return prompts


def _dimensions(path: Path, value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path}: truncate_dim is {value!r}; it must be a number of values")
    return value


def _modules(path: Path, pooling: str, *, prompted: bool) -> tuple[str, tuple[Dense, ...], bool]:
    """The pooling, the layers after it, and whether vectors are normalised, of sentence-transformers' modules.

    Args:
        prompted: there are prompts that are not empty.
    """
    try:
        modules = msgspec.json.decode((path / MODULES).read_bytes(), type=list[dict[str, Any]])
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"{path / MODULES} cannot be read: {error}") from error
    dense, normalize = list[Dense](), False
    for module in modules:
        folder = path / str(module.get("path", ""))
        match str(module.get("type", "")).rpartition(".")[2]:
            case "Transformer" | "Dropout":
                pass
            case "Pooling":
                pooling = _pooling(folder / "config.json", prompted=prompted)
            case "Dense" if not normalize:
                dense.append(_dense(folder))
            case "Normalize":
                normalize = True
            case other:
                raise ModelError(
                    f"{path / MODULES} has a module {other!r}; Transformer, Pooling, Dense and Normalize are "
                    "supported, in this order"
                )
    return pooling, tuple(dense), normalize


def _dense(folder: Path) -> Dense:
    config = read_json(folder / "config.json", needed=True)
    named = config.get("activation_function") or "torch.nn.modules.activation.Tanh"
    activation = _torch_activation(folder / "config.json", named)
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(f"{folder / 'config.json'}: a layer with a residual, or of single tokens, is not supported")
    inputs, outputs = (config.get(key) for key in ("in_features", "out_features"))
    if not isinstance(inputs, int) or not isinstance(outputs, int) or min(inputs, outputs) < 1:
        raise ModelError(f"{folder / 'config.json'} must have in_features and out_features")
    return Dense(folder, inputs, outputs, config.get("bias") is not False, activation)


def _pooling(file: Path, *, prompted: bool) -> str:
    config = read_json(file, needed=True)
    if config.get("include_prompt") is False and prompted:
        raise ModelError(f"{file} leaves prompts out of the vector (include_prompt), which is not supported")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(f"{file} asks for pooling by {modes or 'nothing'}; one of {', '.join(POOLINGS)} is supported")
    return str(modes[0])


def _max_tokens(config: Mapping[str, Any], transformer: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    limits = [value for key in _LENGTH_KEYS if isinstance(value := config.get(key), int)][:1]
    if config.get("model_type") in _PADDED_POSITIONS:  # positions begin after the padding token's
        limits = [limit - 2 for limit in limits]
    named = (transformer.get("max_seq_length"), tokenizer.get("model_max_length"))
    limits += [int(value) for value in named if isinstance(value, int | float) and 0 < value < _NO_LIMIT]
    return min(limits, default=_FALLBACK_LEN)
