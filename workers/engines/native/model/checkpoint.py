"""Whether a checkpoint is whole: transformers fills what is missing with random numbers, and only logs it.

An index decides which file has a tensor. A tensor that is not there, or in another file too, is a sign of a download
that was cut off or of two versions in one directory: workers of one revision would answer differently.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from penstock.infra.model import mistral_format
from penstock.infra.model.weight_files import INDEX
from penstock.workers.engines.native.model.model import ModelError

SHOWN = 5  # names in an error
PORTION = 1 << 24  # elements of a tensor that are converted at once
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_files(folder: Path) -> None:
    """Compare a directory's index with what its files have. Whatever is malformed is left to the loader.

    Raises:
        ModelError: a tensor is not in the file that the index names, or is in another one, too.
    """
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return
    files = set(index.values()) | {"model.safetensors"}  # transformers prefers the latter, if it is there
    held = {name: found for name in sorted(files) if (found := _tensors(folder / name)) is not None}
    lost = sorted(name for name, file in index.items() if file not in held or name not in held[file])
    if lost:
        _refuse(folder, f"the index assigns {_named(lost)} to {index[lost[0]]}, which does not have them")
    twice = [(name, file) for file, names in held.items() for name in names if index.get(name, file) != file]
    if twice:
        names = sorted(name for name, _ in twice)
        _refuse(folder, f"{twice[0][1]} has {_named(names)} too, which the index assigns to {index[twice[0][0]]}")


def _tensors(file: Path) -> Collection[str] | None:
    """Names of a safetensors file's tensors; None: it is not there, or no such file."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            return _header.decode(stream.read(min(size, 1 << 28))).keys()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def consolidated(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a folder in Mistral's own format, under the names and in the order of transformers'.

    Args:
        config: of ``mistral_format.configuration``, of a folder without ``problem``.
    Returns: most of them are read from their files only when they are used.
    Raises:
        ModelError: a tensor is missing, unknown, of another size, or there twice.
    """
    wanted, found = mistral_format.tensors(config), dict[str, Tensor]()
    unknown = []
    for file in mistral_format.weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                described = wanted.get(name)
                if described is None:
                    unknown.append(name)
                    continue
                if described.name in found:
                    _refuse(folder, f"{file.name} has {name}, which another file has, too")
                tensor = opened.get_tensor(name)
                if tuple(tensor.shape) != described.shape:
                    sizes = f"{list(tensor.shape)}, and by {mistral_format.PARAMS} it has {list(described.shape)}"
                    _refuse(folder, f"{name} is of size {sizes}")
                found[described.name] = _halves(tensor, described.heads) if described.heads else tensor
    if unknown:
        _refuse(folder, f"by {mistral_format.PARAMS} the model has no {_named(sorted(unknown))}")
    if lost := sorted(name for name, each in wanted.items() if each.name not in found):
        _refuse(folder, f"it lacks {_named(lost)}; download it again")
    return found


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head: the even ones first, then the odd ones."""
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def check_sizes(model: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """
    Args:
        mismatched: tensors whose size (second) is not the one that config.json gives them (third).
    Raises:
        ModelError: there are such.
    """
    found = sorted(mismatched)
    if found:
        name, here, wanted = found[0]
        others = f"; the same holds of {_named([each[0] for each in found[1:]])}" if found[1:] else ""
        _refuse(model, f"{name} is of size {list(here)}, and by config.json it has {list(wanted)}{others}")


def check_names(model: str, loaded: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Compare the names of a checkpoint's tensors with those of its model, tied ones apart.

    Args:
        missing: of the model; the checkpoint does not have them.
        unexpected: of the checkpoint, and not of the model. Most are harmless, as those of an unused head.
    Raises:
        ModelError: a tensor is missing, or the checkpoint has more layers than the model.
    """
    lacking, extra = sorted(missing), sorted(unexpected)
    kind = type(loaded).__name__
    if lacking:
        prefix = next((name[: -len(lacking[0])] for name in extra if name.endswith("." + lacking[0])), "")
        hint = f"; its names begin with {prefix!r}: rename them without it" if prefix else "; download it again"
        _refuse(model, f"{kind} has {_named(lacking)}, which the checkpoint lacks{hint}")
    known, config = set(loaded.state_dict()), loaded.config.get_text_config()
    further = int(getattr(config, "num_nextn_predict_layers", 0) or 0)  # they predict more tokens at once, unused here
    layers = int(getattr(config, "num_hidden_layers", 0) or 0) + further
    beyond = [name for name in extra if _is_layer(name, layers, known)]
    if beyond:
        _refuse(
            model, f"config.json says {layers - further} layers, and the checkpoint has {_named(beyond)} beyond them"
        )


def _is_layer(name: str, layers: int, known: Collection[str]) -> bool:
    """Whether a tensor would belong to a further layer of the model's."""
    return any(
        int(match[0]) >= layers > 0 and name[: match.start()] + "0" + name[match.end() :] in known
        for match in _NUMBER.finditer(name)
    )


def check_values(model: str, loaded: Any) -> None:
    """
    Raises:
        ModelError: weights are not finite, or a matrix has nothing but zeros.
    """
    broken, empty = [], []
    for name, tensor in loaded.named_parameters():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        least, most = _range(tensor)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            broken.append(name)
        elif tensor.dim() > 1 and not name.endswith("bias") and not (least or most):
            empty.append(name)
    if broken:
        _refuse(model, f"there are NaN or infinite weights in {_named(broken)}")
    if empty:
        _refuse(model, f"all weights are zero in {_named(empty)}")


def _range(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value; NaN, if there is one."""
    portions = [torch.aminmax(portion) for portion in _portions(tensor)]
    return torch.stack([each.min for each in portions]).amin(), torch.stack([each.max for each in portions]).amax()


def _portions(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or copies of its parts where its data type has no arithmetic (fp8)."""
    if tensor.dtype.itemsize > 1:
        yield tensor
        return
    flat = tensor.flatten()
    for start in range(0, flat.numel(), PORTION):
        yield flat[start : start + PORTION].to(torch.bfloat16)


def _named(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{more})"


def _refuse(model: object, reason: str) -> NoReturn:
    raise ModelError(f"the checkpoint {str(model)!r} is not whole: {reason}")
