"""Tensors that cross processes of one node; read once. The real one shares CUDA memory."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class SharedTensorContainer:
    def __init__(self, handle: dict[str, Any]) -> None:
        self._handle = handle

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> SharedTensorContainer:
        folder = Path(os.environ.get("TENSORRT_LLM_STANDIN_KV", tempfile.gettempdir()))
        file = folder / f"trtllm-standin-{os.getpid()}-{secrets.token_hex(8)}.embeds"
        save_file({"tensor": tensor.contiguous()}, file)
        return cls({"method_key": 1, "tensor_size": list(tensor.shape), "dtype": str(tensor.dtype), "file": str(file)})

    @classmethod
    def from_dict(cls, handle: dict[str, Any]) -> SharedTensorContainer:
        if not {"method_key", "tensor_size", "file"} <= set(handle):
            raise ValueError("not the handle of a shared tensor")
        return cls(handle)

    def dump_to_dict(self) -> dict[str, Any]:
        return dict(self._handle)

    def get_local_view(self) -> torch.Tensor:
        file = Path(self._handle["file"])
        try:
            taken = file.rename(file.with_suffix(".taken"))
        except OSError as error:
            raise RuntimeError("the shared tensor is gone: it has one consumer") from error
        tensor: torch.Tensor = load_file(taken)["tensor"]
        taken.unlink()
        return tensor
