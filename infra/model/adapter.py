"""A folder with a LoRA adapter as PEFT writes it: which layers it changes, and whether they can be computed.

Reads only the configuration and the header of the weights; engines read the matrices.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 1 << 20, 1 << 26
DIGEST_BYTES = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
MOST_ALPHA = 1e9  # of an adapter that was trained, far above any
SHOWN = 3  # names in an error
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# Fields that change nothing of what is computed, or that the tensors themselves tell.
_HARMLESS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # of training; others change the model's own weights


class AdapterError(ValueError):
    """The adapter cannot be served; the text says why, and what to change."""


class Matrices(NamedTuple):
    """The two matrices of one module: its outputs get ``scale * (x @ down.T) @ up.T``.

    Attributes:
        down, up: names in the file; of shape (rank, inputs) and (outputs, rank).
    """

    down: str
    up: str
    inputs: int
    outputs: int


class AdapterFolder(NamedTuple):
    """
    Attributes:
        digest: of all that decides what is computed, in hexadecimal.
        modules: what it changes, by path in the model, as in "model.layers.0.self_attn.q_proj".
    """

    path: Path
    digest: str
    rank: int
    scale: float
    modules: Mapping[str, Matrices]


def check_name(name: str, taken: Iterable[str] = ()) -> None:
    """
    Args:
        taken: names of models.
    Raises:
        AdapterError: an adapter cannot have this name.
    """
    if not NAME.fullmatch(name):
        raise AdapterError(
            f"{name[:128]!r} cannot name an adapter: use up to 128 letters, digits and . _ : / -, a letter or digit "
            "first"
        )
    if name in taken:
        raise AdapterError(f"{name!r} is the name of a model; give the adapter another one")


def read_adapter(path: Path, max_rank: int) -> AdapterFolder:
    """Read a folder's configuration and the header of its weights.

    Raises:
        AdapterError: it is no adapter, or one that cannot be computed here.
    """
    try:
        raw = _limited(path / CONFIG, MAX_CONFIG_BYTES)
        config = msgspec.json.decode(raw, type=dict[str, Any])
    except FileNotFoundError:
        raise AdapterError(f"{path} has no {CONFIG}; name the folder that PEFT's save_pretrained wrote") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path / CONFIG} cannot be read: {error}") from error
    rank, scale = _checked(config, path, max_rank)
    modules = _modules(path, rank)
    digest = blake3(msgspec.json.encode([rank, scale]))
    try:
        digest.update_mmap(path / WEIGHTS)
    except OSError as error:
        raise AdapterError(f"{path / WEIGHTS} cannot be read: {error}") from error
    return AdapterFolder(path, digest.hexdigest(length=DIGEST_BYTES), rank, scale, modules)


def _limited(file: Path, most: int) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise AdapterError(f"{file} has more than {most} bytes")
    return data


def _checked(config: Mapping[str, Any], path: Path, max_rank: int) -> tuple[int, float]:
    """Rank and scale."""

    def refuse(what: str, instead: str = "merge it into the model (PEFT's merge_and_unload)") -> AdapterError:
        return AdapterError(f"{path / CONFIG}: {what} is not supported; {instead}")

    if config.get("peft_type") != "LORA":
        raise refuse(f"peft_type {config.get('peft_type')!r}", "only LORA is")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise refuse(f"task_type {config['task_type']!r}", "only CAUSAL_LM is")
    if config.get("use_dora"):
        raise refuse("DoRA (use_dora)")
    if config.get("modules_to_save"):
        raise refuse(f"modules_to_save {config['modules_to_save']!r}")
    if config.get("bias", "none") != "none":
        raise refuse(f"bias {config['bias']!r}", 'train with bias="none"')
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise refuse("a rank or alpha of its own for some modules (rank_pattern, alpha_pattern)")
    if config.get("init_lora_weights") not in _STARTS:
        raise refuse(f"init_lora_weights {config['init_lora_weights']!r}, which changes the model's own weights,")
    unknown = sorted(name for name, value in config.items() if value and name not in _HARMLESS)
    if unknown:
        raise refuse(f"{unknown[0]} ({config[unknown[0]]!r})"[:200])
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not abs(alpha) <= MOST_ALPHA:
        raise AdapterError(
            f"{path / CONFIG}: r is {rank!r} and lora_alpha {alpha!r}; both must be numbers, r above 0 and lora_alpha "
            f"at most {MOST_ALPHA:g}"
        )
    if rank > max_rank:
        raise AdapterError(
            f"the adapter in {path} has rank {rank}, above --max-lora-rank {max_rank}; raise that, at the cost of "
            "memory for each of the --max-loras slots"
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _modules(path: Path, rank: int) -> dict[str, Matrices]:
    file = path / WEIGHTS
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise AdapterError(f"{file} is not a safetensors file, or is damaged; copy it again")
            described = msgspec.json.decode(opened.read(size), type=dict[str, dict[str, Any]])
        described.pop("__metadata__", None)
        shapes = {name: msgspec.convert(tensor.get("shape"), list[int]) for name, tensor in described.items()}
    except FileNotFoundError:
        raise AdapterError(f"{path} has no {WEIGHTS}; save it with save_pretrained(safe_serialization=True)") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    found: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, shape in shapes.items():
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise AdapterError(f"{file} has {name!r}, which is not a matrix of a LoRA adapter for linear layers")
        found.setdefault(match[1], {})[match[2]] = (name, shape)
    if not found:
        raise AdapterError(f"{file} has no matrices")
    modules = {}
    for module, pair in sorted(found.items()):
        (down, down_shape), (up, up_shape) = pair.get("A", ("", [])), pair.get("B", ("", []))
        if len(down_shape) != 2 or len(up_shape) != 2 or down_shape[0] != rank or up_shape[1] != rank:
            raise AdapterError(
                f"{file}: the matrices of {module} have shapes {down_shape} and {up_shape}, which do not fit r = {rank}"
            )
        modules[module] = Matrices(down, up, down_shape[1], up_shape[0])
    return modules
