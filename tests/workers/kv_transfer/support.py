"""Pools to move blocks between, and a worker in a process of its own that can be stopped, killed and asked."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.transport_protocol import TransferError, Transport, TransportStats
from penstock.workers.kv_transfer.transport_thread import open_transport

BLOCK_BYTES = 4096
BLOCKS = 64
LAYOUT = "float32 (2, 8)"
WAIT_S = 20.0
CLONE_NEWNET, CLONE_NEWNS, MS_REC, MS_SLAVE = 0x40000000, 0x20000, 0x4000, 0x80000
WITHOUT_NIXL = not (find_spec("nixl_cu12") or find_spec("nixl_cu13"))

needs_nixl = pytest.mark.skipif(WITHOUT_NIXL, reason="NIXL is not installed (pip install nixl-cu12)")


class Pool:
    """Blocks in CPU memory, each filled with one byte value, and their generations."""

    def __init__(self, fill: int = 0, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.blocks = np.full((blocks, block_bytes), fill, np.uint8)
        self.generations = np.ones(blocks, np.uint32)
        self.memory = Memory(
            base=self.blocks.ctypes.data,
            block_bytes=block_bytes,
            blocks=blocks,
            generations=self.generations.ctypes.data,
            layout=LAYOUT,
        )

    def number(self) -> None:
        """Fill every block with its own pattern."""
        self.blocks[:] = np.arange(len(self.blocks), dtype=np.uint8)[:, None] + 1

    def values(self, ids: Any = slice(None)) -> list[list[int]]:
        """The different byte values in each of these blocks."""
        return [np.unique(block).tolist() for block in self.blocks[ids]]


def until(true: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    """Wait for a condition, not for a time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.002)


class Worker:
    """A transport with one pool "kv" in a process of its own, whose modules a fork server has loaded (NIXL not)."""

    def __init__(self, name: str, environ: Mapping[str, str], **pool: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, name, dict(environ), pool), daemon=True)
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> "Worker":
        self.endpoint: Endpoint = self._answer()
        return self

    def ask(self, method: str, *args: Any) -> Any:
        """Call one of ``_Served``'s methods there."""
        self.send(method, *args)
        return self._answer()

    def send(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def _answer(self) -> Any:
        assert self._pipe.poll(WAIT_S), "the worker process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.pid}/stat")
            until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "stopped")
        if number == signal.SIGKILL:
            self._process.join(WAIT_S)

    def end(self) -> None:
        if self.alive():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
                self._pipe.send(("close", ()))
            self._process.join(5)
        if self.alive():
            self._process.kill()
            self._process.join(5)
        self._process.close()
        self._pipe.close()


class _Served:
    def __init__(self, name: str, pool: Mapping[str, int]) -> None:
        self._pool = Pool(**pool)
        self._pool.number()
        self.transport: Transport = open_transport("nixl", name, {"kv": self._pool.memory})

    def new_owner(self, block: int) -> None:
        self._pool.generations[block] += 1
        self._pool.blocks[block] = 0xEE

    def fill(self, value: int) -> None:
        self._pool.blocks[:] = value

    def values(self, ids: list[int]) -> list[list[int]]:
        return self._pool.values(ids)

    def changed(self, value: int) -> int:
        """How many blocks hold anything but this value."""
        return int((self._pool.blocks != value).any(axis=1).sum())

    def read(self, peer: Endpoint, remote: list[int], local: list[int], timeout: float) -> int:
        return self.transport.read(peer, "kv", remote, local, timeout=timeout).result(WAIT_S).bytes

    def write(self, peer: Endpoint, local: list[int], remote: list[int], timeout: float) -> int:
        return self.transport.write(peer, "kv", local, remote, timeout=timeout).result(WAIT_S).bytes

    def fails(self, peer: Endpoint, ids: list[int], timeout: float) -> tuple[str, float]:
        """Write and fail: the cause, and how long after that the blocks were free."""
        error = self.transport.write(peer, "kv", ids, ids, timeout=timeout).exception(WAIT_S)
        assert isinstance(error, TransferError), error
        failed = time.monotonic()
        error.settled.result(WAIT_S)
        return error.cause, time.monotonic() - failed

    def stats(self) -> TransportStats:
        return self.transport.stats()

    def drain(self) -> None:
        self.transport.drained().result(WAIT_S)

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.transport.close()


def _enter(namespace: str) -> None:
    """CopyOp this process into a network namespace, as `ip netns exec` does: /sys must show its interfaces, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        steps = (
            libc.setns(file.fileno(), CLONE_NEWNET),
            libc.unshare(CLONE_NEWNS),
            libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None),
            libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
        )
    assert steps == (0, 0, 0, 0), f"{steps}: {os.strerror(ctypes.get_errno())}"


def _serve(pipe: Connection, name: str, environ: Mapping[str, str], pool: Mapping[str, int]) -> None:
    os.environ.update(environ)
    if namespace := environ.get("IN_NAMESPACE"):
        _enter(namespace)
    served = _Served(name, pool)
    pipe.send(served.transport.endpoint)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            method, args = "close", ()
        try:
            answer = getattr(served, method)(*args)
        except Exception as error:
            answer = AssertionError(f"{method}: {error!r}")
        if method == "close":
            return
        pipe.send(answer)


Start = Callable[..., Worker]


@contextlib.contextmanager
def workers(prefix: str) -> Iterator[Start]:
    """Start worker processes that end with the block: ``start("tcp", name)``."""
    started: list[Worker] = []

    def start(tls: str = "", name: str = "peer", environ: Mapping[str, str] | None = None, **pool: int) -> Worker:
        chosen = {**({"UCX_TLS": tls} if tls else {}), **(environ or {})}
        started.append(Worker(f"{prefix}-{name}", chosen, **pool))
        return started[-1].start()

    try:
        yield start
    finally:
        for worker in started:
            worker.end()
