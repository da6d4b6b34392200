"""Whether an engine can load a model directory, from its configuration and the heads of its files.

An engine would fail seconds or minutes later, with a traceback. ``problem`` says why in one line, before any start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.infra.model.defaults import ROPE_TYPES, rope_type, ropes
from penstock.infra.model.weight_files import (
    broken_link,
    elsewhere,
    is_mistral_format,
    is_pointer,
    mistral_problem,
    weight_files,
)

_HEADER = 1 << 28  # longest header that is read
_READERS = "--engine vllm or sglang"
# Quantization method -> engines that compute with it, according to their documentation.
_ENGINES: Mapping[str, str] = {
    "awq": _READERS,
    "bitsandbytes": _READERS,
    "compressed-tensors": _READERS,
    "gptq": _READERS,
    "modelopt": "--engine trtllm, vllm or sglang",
    "mxfp4": "--engine trtllm, vllm or sglang",
    "quark": _READERS,
    "torchao": _READERS,
}
_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")

_tensors = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


class Quantization(NamedTuple):
    """How weights are stored.

    Attributes:
        method: name in ``config.json``: "gptq", "awq", …
        form: number format, if the file names it: "4 bits", "NVFP4".
        source: the file that says so.
    """

    method: str
    form: str
    source: str

    @property
    def engines(self) -> str:
        """Flags that choose an engine which computes with these weights; "": none is known."""
        return _ENGINES.get(self.method, "")

    def __str__(self) -> str:
        return f"{self.method} ({self.form})" if self.form else self.method


def problem(path: Path, engine: str) -> str:
    """Explain in one line why this engine cannot load the directory, and what to do; "": it can.

    Args:
        engine: "native", "vllm", "sglang" or "trtllm".
    """
    config = _read(path / "config.json")
    if reason := broken_link(path):
        return reason
    files = weight_files(path)
    if not files and not elsewhere(path):
        return f"{path} has no weights (*.safetensors); download the whole folder"
    for file in files:
        if reason := _cut_off(file):
            return reason
    return _native(path, config, files) if engine == "native" else ""


def quantization(path: Path) -> Quantization | None:
    """How a directory's weights are quantized; None: they are not, or its files do not say so."""
    config = _read(path / "config.json")
    nested = config.get("text_config")
    found = config.get("quantization_config") or (nested.get("quantization_config") if isinstance(nested, dict) else {})
    if isinstance(found, dict) and found:
        method = str(found.get("quant_method") or "").lower() or "an unnamed method"
        form = str(found.get("quant_algo") or found.get("format") or "")
        bits = found.get("bits") or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else 0)
        return Quantization(method, form or (f"{bits} bits" if bits else ""), "config.json")
    found = _read(path / "hf_quant_config.json").get("quantization")
    if isinstance(found, dict) and found.get("quant_algo"):
        return Quantization("modelopt", str(found["quant_algo"]), "hf_quant_config.json")
    return None


def _native(path: Path, config: Mapping[str, Any], files: list[Path]) -> str:
    if is_mistral_format(path):
        return mistral_problem(path)
    if all(file.suffix == ".gguf" for file in files):
        return f"{path} has GGUF weights only, which --engine native does not read; use the folder with *.safetensors"
    stored = quantization(path)
    if stored is not None and not _computed(stored, config):
        others = f"use {stored.engines}, or " if stored.engines else "use "
        return (
            f"{path} has weights quantized by {stored} ({stored.source}), with which --engine native does not compute; "
            f"{others}the folder of the unquantized model"
        )
    for rope in ropes(config):
        kind = rope_type(rope) or "default"
        if kind not in ROPE_TYPES:
            return (
                f"{path}: RoPE scaling of type {kind!r} is unknown to --engine native, which has "
                f"{', '.join(sorted(ROPE_TYPES))}; use an engine that brings the model's own code"
            )
    for key in ("dtype", "torch_dtype"):
        named = config.get(key)
        if isinstance(named, str) and named not in _DTYPES:
            return f'{path / "config.json"} has {key} "{named}"; one of {", ".join(_DTYPES)} is read: correct the file'
    return ""


def _computed(stored: Quantization, config: Mapping[str, Any]) -> bool:
    """Whether the native engine computes with such weights, either directly or widened by transformers."""
    return stored.method == "fp8" or (stored.method == "mxfp4" and config.get("model_type") == "gpt_oss")


def _cut_off(file: Path) -> str:
    """Explain why a file is not what its name promises; "": it is, or its format does not show it."""
    try:
        size = file.stat().st_size
        if is_pointer(file):
            return f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder"
        if file.suffix != ".safetensors":
            return f"{file} is empty; download it again" if not size else ""
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER):
                return f"{file} is cut off or no safetensors file ({size:,} bytes); download it again"
            ends = [
                msgspec.json.decode(each, type=_Tensor).data_offsets[1]
                for name, each in _tensors.decode(opened.read(length)).items()
                if name != "__metadata__"
            ]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{file} cannot be read: {error}"
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        return f"{file} is cut off: it has {size:,} of {whole:,} bytes; download it again"
    return ""


def _read(file: Path) -> dict[str, Any]:
    """A configuration. Empty if there is none, or it cannot be read: loading the model reports that."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return {}
