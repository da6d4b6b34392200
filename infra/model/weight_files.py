"""Which files have a model's weights, and under which names.

A directory's index (model.safetensors.index.json) may name files of another directory, as that of the bundled vision
model does: its text part is the bundled text model, which is installed once. There the same weights have other names;
``key_mapping`` in the index' metadata translates them. It is ours: other readers of the format do not know it.

Mistral's own format has ``params.json`` and ``consolidated*.safetensors`` in place of ``config.json`` and its weights;
a folder without ``config.json`` is of this format. Its dense text models become the ``mistral`` of transformers. Only
``params.json`` is read here: who loads the weights renames and reorders them as ``tensors`` says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.infra.model import defaults

INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_READ = (".json", ".jinja", ".model", ".safetensors", ".bin", ".gguf", ".pt")
_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


class _Metadata(msgspec.Struct, frozen=True):
    key_mapping: dict[str, str] = {}


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}
    metadata: _Metadata = _Metadata()


def weight_files(path: Path) -> list[Path]:
    """All files with weights: those of the directory, and those of others that its index names."""
    files = {file for pattern in _PATTERNS for file in path.glob(pattern)}
    return sorted(files | {path / name for name in elsewhere(path)})


def elsewhere(path: Path) -> set[str]:
    """The files outside of the directory that its index names, relative to it."""
    return {name for name in _index(path).weight_map.values() if "/" in name and (path / name).is_file()}


def key_mapping(path: Path) -> Mapping[str, str]:
    """Patterns of names in the weights' files -> names in the model; empty: they are the same."""
    return _index(path).metadata.key_mapping


def broken_link(path: Path) -> str:
    """Explain which file of the directory is a link to nothing; "": none.

    So are files of the Hugging Face cache whose download did not end, or of which only ``snapshots/`` was mounted. An
    optional one would count as absent: another template, or other end tokens.
    """
    for file in sorted(path.glob("*")):
        if file.suffix in _READ and file.is_symlink() and not file.exists():
            return (
                f"{file} is a link to {file.readlink()}, which is missing: download the model again, and mount its "
                "whole folder of the Hugging Face cache, as the links in snapshots/ lead to blobs/"
            )
    return ""


def is_pointer(file: Path) -> bool:
    """Whether a file is what Git stores in place of a large one."""
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def _index(path: Path) -> _Index:
    """The index; an empty one where there is none. The engine that loads the weights reports a malformed one."""
    try:
        return msgspec.json.decode((path / INDEX).read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return _Index()


MISTRAL_PARAMS = "params.json"
WEIGHTS = "consolidated*.safetensors"
_LENGTH = 128_000  # that vLLM takes where params.json names none
_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
}
_YARN: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_UNUSED = ("max_batch_size",)  # of the program that wrote it


class BadParams(ValueError):
    """A params.json cannot be used; the text says why."""


class _Yarn(msgspec.Struct, forbid_unknown_fields=True):
    factor: float
    original_max_position_embeddings: int
    beta: float | None = None
    alpha: float | None = None
    apply_scale: bool = True


class _Params(msgspec.Struct):
    dim: int
    n_layers: int
    head_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    vocab_size: int
    rope_theta: float
    tied_embeddings: bool | None = None
    sliding_window: int | None = None
    max_position_embeddings: int | None = None
    max_seq_len: int | None = None
    yarn: _Yarn | None = None


class Tensor(NamedTuple):
    """One of the weights' files.

    Attributes:
        name: in the model.
        shape: in the file and in the model.
        heads: whose rows are reordered, see ``tensors``; 0: none.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def is_mistral_format(path: Path) -> bool:
    """Whether a folder is in this format alone."""
    return (path / MISTRAL_PARAMS).is_file() and not (path / "config.json").is_file()


def mistral_weight_files(path: Path) -> list[Path]:
    return sorted(path.glob(WEIGHTS))


def read(path: Path) -> dict[str, Any]:
    """
    Raises:
        BadParams: it cannot be read.
    """
    try:
        return msgspec.json.decode((path / MISTRAL_PARAMS).read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise BadParams(f"{path / MISTRAL_PARAMS} cannot be read: {error}") from error


def mistral_configuration(params: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would have, of any params.json: also of models that only other engines compute."""
    config: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {theirs: params[ours] for ours, theirs in _NAMES.items() if params.get(ours) is not None}
    config["tie_word_embeddings"] = bool(params.get("tied_embeddings"))
    config["max_position_embeddings"] = _named_length(params) or _LENGTH
    config.setdefault("sliding_window", None)  # transformers' own default is a window
    yarn = params.get("yarn")
    if isinstance(yarn, dict) and yarn:
        rope = {"rope_type": "yarn", "rope_theta": config.pop("rope_theta", None)}
        rope |= {theirs: yarn[ours] for ours, theirs in _YARN.items() if yarn.get(ours) is not None}
        if not yarn.get("apply_scale", True):
            rope["attention_factor"] = 1.0
        config["rope_parameters"] = rope
    return config


def mistral_length(params: Mapping[str, Any]) -> defaults.Length:
    found = defaults.context_length(mistral_configuration(params), file=MISTRAL_PARAMS)
    if _named_length(params):
        return found
    return found._replace(source=f"the default of Mistral's own format; {MISTRAL_PARAMS} names none")


def mistral_problem(path: Path) -> str:
    """Why the native engine cannot load a folder of this format, in one line; "": it can, as far as it tells."""
    file = path / MISTRAL_PARAMS
    try:
        params = read(path)
        unknown = [key for key, value in params.items() if not _known(key, value)]
        if unknown:
            return (
                f"{file} has {', '.join(map(repr, sorted(unknown)))}, which --engine native does not know of Mistral's "
                "own format; use --engine vllm (config_format, load_format and tokenizer_mode: mistral), or the folder "
                "that has a config.json"
            )
        checked = msgspec.convert({key: value for key, value in params.items() if value is not None}, _Params)
    except BadParams as error:
        return str(error)
    except msgspec.ValidationError as error:
        return f"{file} cannot be used by --engine native: {error}"
    sizes = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size")
    if small := [name for name in sizes if getattr(checked, name) < 1]:
        return f"{file} has {small[0]} {getattr(checked, small[0])}; it must be at least 1"
    if checked.n_heads % checked.n_kv_heads or checked.head_dim % 2:
        return (
            f"{file} has n_heads {checked.n_heads}, n_kv_heads {checked.n_kv_heads}, head_dim {checked.head_dim}; "
            "the first must be a multiple of the second, and the third even"
        )
    if not mistral_weight_files(path):
        return f"{path} has no {WEIGHTS}, which belong to its {MISTRAL_PARAMS}; download the whole folder"
    return ""


def tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model by their names in the files.

    Mistral rotates adjacent rows of a head's queries and keys together, (0, 1), (2, 3), …; transformers row i with row
    i + head_dim / 2. So rows of a tensor with ``heads`` move within each head: the even ones come first, then the odd.

    Args:
        config: of ``mistral_configuration``, of a folder without ``mistral_problem``.
    """
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = {
        "tok_embeddings.weight": Tensor("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "norm.weight": Tensor("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        found["output.weight"] = Tensor("lm_head.weight", (config["vocab_size"], hidden))
    layer = {
        "attention.wq": Tensor("self_attn.q_proj", (heads * size, hidden), heads),
        "attention.wk": Tensor("self_attn.k_proj", (kv_heads * size, hidden), kv_heads),
        "attention.wv": Tensor("self_attn.v_proj", (kv_heads * size, hidden)),
        "attention.wo": Tensor("self_attn.o_proj", (hidden, heads * size)),
        "feed_forward.w1": Tensor("mlp.gate_proj", (inner, hidden)),
        "feed_forward.w2": Tensor("mlp.down_proj", (hidden, inner)),
        "feed_forward.w3": Tensor("mlp.up_proj", (inner, hidden)),
        "attention_norm": Tensor("input_layernorm", (hidden,)),
        "ffn_norm": Tensor("post_attention_layernorm", (hidden,)),
    }
    for at in range(config["num_hidden_layers"]):
        for name, each in layer.items():
            found[f"layers.{at}.{name}.weight"] = each._replace(name=f"model.layers.{at}.{each.name}.weight")
    return found


def _known(key: str, value: Any) -> bool:
    """Whether a field is understood, or says nothing: null, false, or an empty list or object."""
    if key in _Params.__struct_fields__ or key in _UNUSED or value is None or value is False or value in ({}, []):
        return True
    return (key, value) in (("model_type", "transformer"), ("activation", "silu"))


def _named_length(params: Mapping[str, Any]) -> int:
    named = [params.get(key) for key in ("max_position_embeddings", "max_seq_len")]
    return min((each for each in named if isinstance(each, int) and each > 0), default=0)
