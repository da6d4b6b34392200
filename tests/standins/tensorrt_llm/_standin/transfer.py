"""How KV gets from one stand-in to another, in this process or the next: a file that exactly one reader takes.

The state that travels is bytes without meaning for anybody else, as that of the real cache transceiver.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensorrt_llm._standin.model import Kv, Model

MAGIC = b"\x93trtllm-standin\0"


class TransferError(Exception):
    """The text is what the engine says."""


class Offer(NamedTuple):
    """KV that waits to be fetched."""

    file: Path
    state: bytes

    @property
    def fetched(self) -> bool:
        return not self.file.exists()

    def withdraw(self) -> None:
        self.file.unlink(missing_ok=True)


def _facts(model: Model, backend: str, prompt: list[int], seed: str) -> dict[str, object]:
    digest = blake2b(json.dumps([prompt, seed]).encode(), digest_size=16).hexdigest()
    return {"layers": model.layers, "heads": model.heads, "dim": model.dim, "backend": backend, "prompt": digest}


def offer(model: Model, backend: str, prompt: list[int], seed: str, kv: Kv, request: int) -> Offer:
    folder = Path(os.environ.get("TENSORRT_LLM_STANDIN_KV", tempfile.gettempdir()))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"trtllm-standin-{os.getpid()}-{secrets.token_hex(8)}.kv"
    save_file({"kv": kv.contiguous()}, file)
    facts = _facts(model, backend, prompt, seed) | {"file": str(file), "request": request}
    return Offer(file, MAGIC + json.dumps(facts).encode())


def fetch(model: Model, backend: str, prompt: list[int], seed: str, state: object, request: object) -> Kv:
    """Take what was offered; a second time there is nothing.

    Raises:
        TransferError: not a state, of another model, back end or prompt, or no longer there.
    """
    if not isinstance(state, bytes) or type(request) is not int:
        raise TransferError("ContextPhaseParams(): incompatible constructor arguments")
    if not state.startswith(MAGIC):
        raise TransferError("cannot deserialize the context phase state")
    try:
        facts = json.loads(state[len(MAGIC) :])
        file = Path(facts.pop("file"))
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError("cannot deserialize the context phase state") from error
    if facts.pop("request", None) != request:
        raise TransferError("Error in kv cache transfer for generation requests: another context request id")
    mine = _facts(model, backend, prompt, seed)
    for name, value in mine.items():
        if facts.get(name) != value:
            raise TransferError(f"Error in kv cache transfer for generation requests: {name} differs")
    taken = file.with_suffix(".taken")
    try:
        file.rename(taken)
        kv: torch.Tensor = load_file(taken)["kv"]
    except (OSError, SafetensorError) as error:
        raise TransferError("Error in kv cache transfer for generation requests: Can not find sequence") from error
    taken.unlink()
    return kv
