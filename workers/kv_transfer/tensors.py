"""Weights from a trainer's tensors: received into a folder, while the engine computes with those that it has.

The trainer (``client.weights``) offers a safetensors file that it does not have: its header, then the bytes of its
tensors, in a ``torch.distributed.TCPStore``'s keys and over a process group or NIXL. Keys of the store:

- ``header``: of the file, its length in front. ``bucket``: bytes of a broadcast. ``nixl``: where the tensors are.
- ``world``, ``joined/<rank>``: set by workers. ``go``: all are there.
- ``received/<rank>``: set by a worker that has all; what went wrong, "": nothing.
"""

import base64
import contextlib
import functools
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec
import numpy as np
import torch
from torch import Tensor, distributed

from penstock.schemas.fleet import TensorSource
from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.engines.native import host_copies
from penstock.workers.kv_transfer.agent import CopyOp, MemoryRanges, PeerLost, TransferRejected
from penstock.workers.kv_transfer.transport_protocol import TransportUnavailable

JOIN_S = 60.0  # for the trainer and all workers to be there
QUIET_S = 60.0  # for one bucket, or for NIXL to finish one part
WHOLE_S = 3600.0  # for all of them
STUCK_S = 180.0  # in one call of torch's, or for one part to be written
STOP_S = 1.0  # for what runs to see that it is to end
LOOK_S = 0.5  # between two looks whether the trainer still is there
POLL_S = 0.0005
JOIN_POLL_S = 0.02
PART_BYTES = 256 << 20  # that NIXL reads at once
MOST_BUCKET = 4 << 30
MOST_HEADER = 100 << 20  # bytes, as safetensors allows
FILE = "model.safetensors"
COPIED = ("config.json", "generation_config.json")  # of the model that the tensors are of


class TensorsLost(Exception):
    """They did not all arrive; the text says why. Nothing is kept."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Placed(msgspec.Struct, frozen=True):
    """How NIXL reaches the tensors. ``ranges``: address, bytes, device of each, in the order of their bytes."""

    agent: str
    metadata: str
    kind: str
    ranges: list[tuple[int, int, int]]


def receive(
    source: TensorSource, rank: int, folder: Path, like: Path, device: torch.device, stop: threading.Event
) -> None:
    """Receive tensors into a folder, as a checkpoint of the model whose folder is ``like``.

    Args:
        rank: of this worker among those that receive.
        device: that it computes on.
        stop: set from another thread to end it.
    Raises:
        TensorsLost
    """
    found, presence = Future[None](), _Presence(stop)

    def work() -> None:
        try:
            _receive_into(folder, source, rank, like, device, presence)
            found.set_result(None)
        except BaseException as error:  # raised below
            found.set_exception(error)

    # torch waits without a limit for a store that accepts a connection and is silent: this thread is left to it then.
    thread = threading.Thread(target=work, name="receive-tensors", daemon=True)
    thread.start()
    while not found.done():
        ends = stop.is_set()
        thread.join(STOP_S if ends else LOOK_S)
        if not found.done() and (ends or time.monotonic() - presence.moved_at > STUCK_S):
            shutil.rmtree(folder, ignore_errors=True)
            reason = "this worker stops" if ends else f"nothing has moved for {STUCK_S:g} s"
            raise TensorsLost(f"{_named(source)}: {reason}")
    found.result()


def _named(source: TensorSource) -> str:
    return f"tensors of the trainer at {source.address}:{source.port}"


def _receive_into(
    folder: Path, source: TensorSource, rank: int, like: Path, device: torch.device, presence: "_Presence"
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    store, library = None, cast(Any, distributed)
    try:
        folder.mkdir(parents=True)
        for name in COPIED:
            if (like / name).is_file():
                shutil.copyfile(like / name, folder / name)
        store = library.TCPStore(
            source.address, source.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S)
        )
        presence.store = store
        _receive(source, rank, store, folder / FILE, device, presence)
        store.set(f"received/{rank}", "")
    except (
        TensorsLost, TransportUnavailable, TransferRejected, PeerLost, OSError, RuntimeError, ValueError, OverflowError
    ) as error:  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the trainer has ended first
                store.set(f"received/{rank}", reason[:1000])
        raise TensorsLost(f"{_named(source)}: {reason}") from error


def _receive(
    source: TensorSource, rank: int, store: Any, file: Path, device: torch.device, presence: "_Presence"
) -> None:
    _check_backend(source.backend, device)
    header = bytes(store.get("header"))
    size = _size(header)
    if (room := shutil.disk_usage(file.parent).free) < len(header) + size:
        raise TensorsLost(f"{file.parent} has room for {room / 1e9:.1f} GB, and they are {size / 1e9:.1f} GB")
    store.set("world", str(len(source.ranks) + 1))
    store.set(f"joined/{rank}", "")
    presence.wait(lambda: store.check(["go"]), JOIN_S, "not all have joined", JOIN_POLL_S)
    with file.open("wb") as opened:
        opened.write(header)
        opened.flush()
        at, put = len(header), functools.partial(host_copies.write, opened.fileno())
        parts = (
            _read(store, size, presence, device)
            if source.backend == "nixl"
            else _heard(source, rank, store, size, presence, device)
        )
        with contextlib.closing(parts):
            for part in parts:
                put(at, part)
                at += len(part)
                presence.moved_at = time.monotonic()


def _check_backend(backend: str, device: torch.device) -> None:
    if backend == "nccl" and device.type != "cuda":
        raise TensorsLost('this worker computes on a CPU, which NCCL does not reach; send over "gloo"')


def _size(header: bytes) -> int:
    """Bytes of all tensors, by a header that is checked.

    Raises:
        TensorsLost: it is none, or leaves gaps.
    """
    try:
        found = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        tensors = [msgspec.json.decode(each, type=_Tensor) for each in found.values()]
    except msgspec.DecodeError as error:
        raise TensorsLost(f"its header is none of a safetensors file: {error}") from error
    if int.from_bytes(header[:8], "little") != len(header) - 8 or len(header) > MOST_HEADER:
        raise TensorsLost(f"its header has {len(header)} bytes, and says something else")
    end = 0
    for begin, next_end in sorted(each.data_offsets for each in tensors):
        if begin != end or next_end < begin:
            raise TensorsLost(f"its tensors leave a gap at byte {end}")
        end = next_end
    return end


class _Presence:
    """Waits, while the trainer is there. ``moved_at``: when a wait or a part was last seen to move, monotonic."""

    def __init__(self, stop: threading.Event) -> None:
        self.store: Any = None
        self.moved_at = time.monotonic()
        self._stop = stop
        self._until = time.monotonic() + WHOLE_S
        self._look_at = 0.0

    def wait(self, done: Callable[[], bool], seconds: float, late: str, poll_s: float = POLL_S) -> None:
        """
        Raises:
            TensorsLost: it took too long, the trainer has ended, or this is to end.
        """
        until = min(self._until, time.monotonic() + seconds)
        while not done():
            if self._stop.is_set():
                raise TensorsLost("this worker stops")
            self.moved_at = now = time.monotonic()
            if now > until:
                raise TensorsLost(f"{late} within {seconds:g} s")
            if now > self._look_at:
                self._look_at = now + LOOK_S
                try:
                    self.store.check(["header"])
                except RuntimeError as error:
                    raise TensorsLost("the trainer has ended") from error
            time.sleep(poll_s)


def _heard(
    source: TensorSource, rank: int, store: Any, size: int, presence: _Presence, device: torch.device
) -> Generator[Tensor]:
    """The trainer's broadcasts, each in a buffer that the next one reuses."""
    bucket = int(store.get("bucket"))
    if not 0 < bucket <= MOST_BUCKET:
        raise TensorsLost(f"buckets of {bucket} bytes; at most {MOST_BUCKET >> 20} MiB are taken")
    on = device if source.backend == "nccl" else torch.device("cpu")
    group = _group(source, store, rank)
    try:
        with torch.cuda.device(on) if on.type == "cuda" else contextlib.nullcontext():
            buffer = torch.empty(min(bucket, size), dtype=torch.uint8, device=on)
            for start in range(0, size, bucket):
                part = buffer[: min(bucket, size - start)]
                work = group.broadcast(part, 0)
                presence.wait(work.is_completed, QUIET_S, "a bucket of tensors did not arrive")
                work.wait()
                yield part
    finally:
        if source.backend == "nccl":
            group.abort()  # a GPU would wait for a trainer that has ended


def _group(source: TensorSource, store: Any, rank: int) -> Any:
    """A process group besides all others of this process. Callers bound their waits."""
    library: Any = distributed
    prefixed, size = library.PrefixStore("group", store), len(source.ranks) + 1
    if source.backend == "nccl":
        options = library.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WHOLE_S)  # when it has passed, NCCL's watchdog ends the process
        return library.ProcessGroupNCCL(prefixed, rank, size, options)
    with socket.socket(socket.AF_INET6 if ":" in source.address else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((source.address, source.port))  # sends nothing
        own = way.getsockname()[0]
    options = library.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=QUIET_S)
    options._devices = [library.ProcessGroupGloo.create_device(hostname=own)]
    return library.ProcessGroupGloo(prefixed, rank, size, options)


def _read(store: Any, size: int, presence: _Presence, device: torch.device) -> Generator[Tensor]:
    """The trainer's memory, part by part; of a GPU through a part of this one's, as between two processes' caches."""
    from penstock.workers.kv_transfer.nixl import NixlAgent, load, use_device

    placed = msgspec.json.decode(bytes(store.get("nixl")), type=_Placed)
    if sum(each[1] for each in placed.ranges) != size or any(each[1] < 1 for each in placed.ranges):
        raise TensorsLost("the places of its tensors are not as long as they are")
    on = device if placed.kind == "cuda" and device.type == "cuda" else torch.device("cpu")
    if on.type == "cuda":
        use_device({on.index or 0})  # of this thread, whose transfers would have no context
    buffer = torch.empty(min(PART_BYTES, size), dtype=torch.uint8, device=on)
    memory = Memory(buffer.data_ptr(), len(buffer), 1, on.type, on.index or 0)
    agent = NixlAgent(load(), f"weights-{uuid4().hex}", {"weights": memory})
    try:
        agent.add(Endpoint(placed.agent, "nixl", metadata=base64.b64decode(placed.metadata)))
        part, filled = list[tuple[int, int, int]](), 0
        rows = [
            (address + start, min(len(buffer), length - start), number)
            for address, length, number in placed.ranges
            for start in range(0, length, len(buffer))
        ]
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            part.append(row)
            filled += row[1]
            if after is not None and filled + after[1] <= len(buffer):
                continue
            _read_part(agent, placed, part, memory, presence)
            yield buffer[:filled]
            part, filled = [], 0
        agent.remove(placed.agent)
    finally:
        agent.close()


def _read_part(
    agent: Any, placed: _Placed, part: list[tuple[int, int, int]], memory: Memory, presence: _Presence
) -> None:
    """Ranges of the trainer's memory, one after the other."""
    at, local = memory.base, []
    for _, size, _ in part:
        local.append((at, size, memory.device))
        at += size
    ranges = (
        MemoryRanges(kind, np.array(rows, np.uint64)) for kind, rows in ((memory.kind, local), (placed.kind, part))
    )
    handle = agent.post("READ", placed.agent, CopyOp(*ranges))
    try:
        presence.wait(functools.partial(agent.done, handle), QUIET_S, "NIXL did not read a part")
    finally:
        agent.release(handle)
