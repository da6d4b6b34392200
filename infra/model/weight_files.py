"""Which files have a model's weights, and under which names.

A directory's index (model.safetensors.index.json) may name files of another directory, as that of the bundled vision
model does: its text part is the bundled text model, which is installed once. There the same weights have other names;
``key_mapping`` in the index' metadata translates them. It is ours: other readers of the format do not know it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
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
