"""KV on its way from a prefill to a decode engine: rooms as files, which engines of all processes see.

A room is named by the prefill engine's port. ``want`` says that the decode engine has reserved blocks for it, ``kv``
has the prompt's KV and the first token, ``failed`` that one side has given up.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from penstock.infra.process.user_folder import OwnFolder


@functools.cache
def _own() -> OwnFolder:
    return OwnFolder("sglang-standin")


def folder() -> Path:
    return Path(os.environ.get("SGLANG_STANDIN_KV") or _own().path)


class Bootstrap:
    """One engine's side of it.

    Args:
        port: where a prefill engine's bootstrap server listens.
    """

    def __init__(self, mode: str, port: int) -> None:
        self.mode = mode
        self._server = folder() / f"{port}.server"
        if mode == "prefill":
            if _alive(self._server):
                raise OSError(f"[Errno 98] bootstrap port {port} is already in use")
            self._server.write_text(str(os.getpid()))

    def close(self) -> None:
        if self.mode == "prefill":
            self._server.unlink(missing_ok=True)


class Room:
    """One request's room."""

    def __init__(self, port: int, number: int) -> None:
        base = f"{port}-{number}"
        self._server = folder() / f"{port}.server"
        self._want, self._kv, self._failed = (folder() / f"{base}.{end}" for end in ("want", "kv", "failed"))

    @property
    def failed(self) -> bool:
        return self._failed.exists()

    @property
    def unreachable(self) -> bool:
        """Whether the prefill engine is gone."""
        return not _alive(self._server)

    def fail(self) -> None:
        self._failed.touch()
        self._want.unlink(missing_ok=True)

    # the decode engine

    def want(self) -> None:
        self._want.touch()

    def fetch(self) -> tuple[Any, dict[str, Any]] | None:
        """The KV and what comes with it; None: not yet."""
        if not self._kv.exists():
            return None
        kv = load_file(self._kv)["kv"]
        meta: dict[str, Any] = json.loads(self._kv.with_suffix(".json").read_text())
        self._kv.unlink()
        self._want.unlink(missing_ok=True)
        return kv, meta

    # the prefill engine

    @property
    def wanted(self) -> bool:
        return self._want.exists()

    def send(self, kv: Any, meta: dict[str, Any]) -> None:
        self._kv.with_suffix(".json").write_text(json.dumps(meta))
        part = self._kv.with_suffix(".part")
        save_file({"kv": kv.contiguous()}, part)
        part.rename(self._kv)

    @property
    def taken(self) -> bool:
        return not self._kv.exists()


def _alive(server: Path) -> bool:
    try:
        os.kill(int(server.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
