"""The ranks of an engine whose layers are shared by several GPUs: one process each, started and ended by the worker's.

The worker's process is rank 0: it plans, samples, and speaks to the broker. The others get each step through a socket,
packed: the tokens, and what is new in the block tables. They compute it with their part of the model and exchange
results (``model.parallel``), and know nothing of requests. On CUDA no rank waits for a step before it launches the
next: drawn tokens go from GPU to GPU. A rank ends when its socket closes, and on Linux with the
thread that started it, whatever it is doing. The end of any rank is the end of the engine.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from penstock.infra.process import budgets
from penstock.infra.process.child import die_with_parent
from penstock.infra.process.user_folder import OwnFolder
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.sequence import Executor, PendingStep, Sampled, ScheduledSequence, Sequence, Waypoint
from penstock.workers.engines.engine_protocol import EngineError, NodeLost
from penstock.workers.engines.native.cuda.packing import PackedStep
from penstock.workers.engines.native.model.attention import TokenSpan
from penstock.workers.engines.native.model.executor import paged_attention
from penstock.workers.engines.native.model.model import Model
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.parallel import RankGroup
from penstock.workers.engines.native.model.pool import KvPool
from penstock.workers.engines.native.model.pools import KvPools, shown

if TYPE_CHECKING:
    from penstock.workers.engines.native.cuda.executor import CudaExecutor

log = structlog.get_logger("engine")

PROCESS = "penstock.workers.run_rank"
LOAD_S = 3600.0  # weights of the largest models
SEND_S = 30  # for which a rank may leave a step unread
END_S = 3.0  # from the end of its socket to that of its process
CAUSE_S = 3.0  # in which the end of a process becomes known, after an exchange with it has failed
_PREFIX = 4  # bytes of a message's length


class RankOrder(msgspec.Struct, frozen=True):
    """What a rank is started with."""

    rank: int
    model: str
    options: NativeOptions
    store: str  # file through which the ranks find each other


class RankReport(msgspec.Struct, frozen=True):
    """What a rank says of itself: that it has its weights, or why it ends."""

    failure: str = ""


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A step, as packed 32-bit integers.

    Attributes:
        tokens: of all sequences, one after the other.
        wanted: rows whose logits are wanted.
        spans: for each sequence its table, first position and number of tokens.
        changes: of the tables: table, first entry, number of entries, and these; one after the other.
    """

    tokens: bytes
    wanted: bytes
    spans: bytes
    changes: bytes


class RankWeights(msgspec.Struct, frozen=True, array_like=True, tag="weights"):
    """Weights that change. ``folder``: to be read; "": put what was read in the place of the present ones."""

    folder: str


_decode_order = msgspec.msgpack.Decoder(RankOrder).decode
_decode_report = msgspec.msgpack.Decoder(RankReport).decode
_decode_work = msgspec.msgpack.Decoder(RankStep | PackedStep | RankWeights).decode


class RankLink:
    """Messages over one end of a socket pair. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(True)  # a timeout of Python's would be of both directions
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))

    def send(self, message: bytes) -> None:
        """
        Raises:
            OSError: the other end is closed, or has read nothing for too long.
        """
        self._end.sendall(len(message).to_bytes(_PREFIX, "big") + message)

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message; empty: the other end is closed.

        Args:
            seconds: None: until there is one.
        Raises:
            TimeoutError: none came in time.
        """
        if seconds is not None and not select.select([self._end], [], [], seconds)[0]:
            raise TimeoutError
        try:
            return self._read(int.from_bytes(self._read(_PREFIX), "big"))
        except ConnectionError:
            return b""

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._end.recv(size - len(data))
            if not part:
                return b""
            data += part
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # shut down, as a thread may still read from it
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class RankSockets(NamedTuple):
    """A rank's ends of socket pairs."""

    steps: socket.socket
    transfers: socket.socket  # how its blocks move to and from other workers, whatever step is computed


class RankProcess(Protocol):
    """As ``subprocess.Popen``."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_process(ends: RankSockets) -> RankProcess:
    """Start a rank with these sockets. Call it in a thread that lives as long."""
    descriptors = [end.fileno() for end in ends]
    environ = dict(os.environ)
    budgets.wait_passively(environ)
    return subprocess.Popen(
        [sys.executable, "-m", PROCESS, *map(str, descriptors)],
        pass_fds=descriptors,
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the worker, which ends its ranks
        preexec_fn=die_with_parent(),
    )


class _Rank(NamedTuple):
    number: int
    link: RankLink
    transfers: RankLink
    process: RankProcess


class EngineRanks:
    """The other ranks, as rank 0 sees them. Implements ``model.executor.StepSink``.

    Args:
        lost: called once when a rank has ended while the engine runs; from any thread.
        start: makes the process of a rank.
    Attributes:
        group: of rank 0.
    """

    def __init__(
        self,
        model: str,
        options: NativeOptions,
        lost: Callable[[EngineError], None] = lambda error: None,
        start: Callable[[RankSockets], RankProcess] = start_process,
    ) -> None:
        self.group = RankGroup(0, options.tensor_parallel_size, self._meet)
        self._lost = lost
        self._tables = TableSender(2 * options.max_running + 1)
        self._folder = OwnFolder("ranks")
        self._store = str(self._folder.path / "store")
        self._ranks: list[_Rank] = []
        self._running = self._closed = False
        self._cause: EngineError | None = None
        self._ended = threading.Event()  # there is a cause
        self._lock = threading.Lock()
        try:
            for number in range(1, self.group.size):
                self._start(RankOrder(number, model, options, self._store), start)
        except BaseException:
            self.close()
            raise

    def _start(self, order: RankOrder, start: Callable[[RankSockets], RankProcess]) -> None:
        steps, transfers = socket.socketpair(), socket.socketpair()
        with steps[1], transfers[1]:
            process = start(RankSockets(steps[1], transfers[1]))
        rank = _Rank(order.rank, RankLink(steps[0]), RankLink(transfers[0]), process)
        self._ranks.append(rank)
        threading.Thread(target=self._watch, args=(rank,), name=f"rank-{order.rank}", daemon=True).start()
        with contextlib.suppress(OSError):  # its end is seen when the ranks meet
            rank.link.send(msgspec.msgpack.encode(order))

    def _meet(self) -> Any:
        """Wait until all ranks have their weights; returns the store through which they connect.

        Raises:
            EngineError: one has failed, or did not load in time.
        """
        until = time.monotonic() + LOAD_S
        for rank in self._ranks:
            self._check(rank, until)
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.link.send(b"go")
        return FileStore(self._store, self.group.size)

    def _check(self, rank: _Rank, until: float) -> None:
        try:
            message = rank.link.receive(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise EngineError(f"{self._name(rank)} has not loaded its weights within {LOAD_S:g} s") from None
        report = _decode_report(message) if message else None
        if report is None or report.failure:
            raise self._failed(rank, report)

    def _failed(self, rank: _Rank, report: RankReport | None) -> EngineError:
        if report is not None:
            return EngineError(f"{self._name(rank)} did not start: {report.failure}")
        self._ended.wait(CAUSE_S)
        return self._cause or NodeLost(f"{self._name(rank)} has closed its connection")

    def _name(self, rank: _Rank) -> str:
        return f"rank {rank.number} of {self.group.size}"

    def _watch(self, rank: _Rank) -> None:
        """Wait for the end of a process, in a thread of its own."""
        status = rank.process.wait()
        with self._lock:
            if self._closed or self._cause is not None:
                return
            self._cause = self._cause_of(rank, status)
            running = self._running
        self._ended.set()
        if running:
            log.error("rank_lost", rank=rank.number, of=self.group.size, error=str(self._cause))
            self.group.broken = True
            self.group.close()
            self._lost(self._cause)

    def _cause_of(self, rank: _Rank, status: int) -> EngineError:
        name = self._name(rank)
        if status in (-signal.SIGKILL, -signal.SIGTERM):  # not by its own fault
            return NodeLost(f"{name} was ended by {signal.Signals(-status).name}")
        report = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if message := rank.link.receive(CAUSE_S):
                report = _decode_report(message)
        if report is not None and report.failure:
            return EngineError(f"{name} has failed: {report.failure}")
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return EngineError(f"{name} {how}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise what has happened to another rank in place of what follows from it here.

        Raises:
            EngineError: a rank has ended, or an exchange with it failed.
        """
        try:
            yield
        except (EngineError, RuntimeError, AttributeError) as error:
            if not self.group.broken:
                raise
            self._ended.wait(CAUSE_S)
            text = f"the ranks of this engine could not exchange results: {error}"
            raise self._cause or EngineError(text) from error
        peers = self.group.peers
        if self.group.broken or (peers is not None and peers.stopped):  # what the device has computed is void
            self._ended.wait(CAUSE_S)
            raise self._cause or EngineError("a rank of this engine has not answered the others")

    def run(self) -> None:
        """The engine is built: from now on the end of a rank is reported."""
        self._folder.close()
        with self._lock:
            self._running, cause = True, self._cause
        if cause is not None:
            raise cause

    def send(self, plan: list[ScheduledSequence], tokens: list[int], wanted: list[int]) -> None:
        spans, changes = self._tables.pack(plan)
        step = RankStep(*(array("i", each).tobytes() for each in (tokens, wanted, spans, changes)))
        self.send_packed(step)

    def send_packed(self, step: RankStep | PackedStep) -> None:
        """Have the others compute a step.

        Raises:
            EngineError: one of them is gone.
        """
        message = msgspec.msgpack.encode(step)
        for rank in self._ranks:
            try:
                rank.link.send(message)
            except OSError as error:
                self.group.broken = True
                raise EngineError(f"{self._name(rank)} takes no steps: {error}") from error

    def read_weights(self, folder: Path) -> str:
        """Have the others read their part of a folder; why one cannot, "": all have. Between two steps.

        Raises:
            EngineError: one of them is gone.
        """
        self._tell(RankWeights(str(folder)))
        return next((f"{self._name(rank)}: {each.failure}" for rank, each in self._heard() if each.failure), "")

    def put_weights(self) -> None:
        """Have them put it in the place of their present weights; ``await_weights`` waits for that."""
        self._tell(RankWeights(""))

    def await_weights(self) -> None:
        """
        Raises:
            EngineError: one of them could not.
        """
        for rank, report in self._heard():
            if report.failure:
                raise EngineError(f"{self._name(rank)}: {report.failure}")

    def _tell(self, order: RankWeights) -> None:
        message = msgspec.msgpack.encode(order)
        for rank in self._ranks:
            try:
                rank.link.send(message)
            except OSError as error:
                self.group.broken = True
                raise EngineError(f"{self._name(rank)} takes no weights: {error}") from error

    def _heard(self) -> list[tuple[_Rank, RankReport]]:
        """What all of them report, so that no report is left for later."""
        heard, until = [], time.monotonic() + LOAD_S
        for rank in self._ranks:
            try:
                message = rank.link.receive(max(0.0, until - time.monotonic()))
            except (TimeoutError, OSError):
                message = b""
            if not message:
                self.group.broken = True
                raise EngineError(f"{self._name(rank)} does not say whether it has its weights")
            heard.append((rank, _decode_report(message)))
        return heard

    @property
    def transfers(self) -> tuple[RankLink, ...]:
        return tuple(rank.transfers for rank in self._ranks)

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._folder.close()
        for rank in self._ranks:
            rank.link.close()
            rank.transfers.close()
        self.group.close()
        until = time.monotonic() + END_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()


class LeadingExecutor:
    """The executor of rank 0. Owns it, and the other ranks."""

    def __init__(self, executor: Executor, ranks: EngineRanks) -> None:
        self._executor, self._ranks = executor, ranks

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        with self._ranks.explained():
            return self._executor.execute(plan, scoring)

    @property
    def pool(self) -> KvPool | None:
        """Rank 0's part of all blocks; None once it is closed."""
        return self._executor.pool  # type: ignore[attr-defined, no-any-return]

    @property
    def transfers(self) -> tuple[RankLink, ...]:
        """Of each other rank: how its blocks are moved."""
        return self._ranks.transfers

    def memory(self) -> dict[str, Memory]:
        """Rank 0's part of the blocks."""
        return self._executor.memory()

    def close(self) -> None:
        self._ranks.close()
        self._executor.close()


class LeadingOverlapExecutor:
    """``LeadingExecutor`` of an executor that takes the next plan while it computes one; implements the same."""

    def __init__(self, executor: "CudaExecutor", ranks: EngineRanks) -> None:
        self._executor, self._ranks = executor, ranks

    def first_rows(self) -> list[int]:
        """As ``CudaExecutor`` has them."""
        return self._executor.first_rows()

    def launch(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> PendingStep:
        with self._ranks.explained():
            return _ExplainedStep(self._executor.launch(plan, scoring), self._ranks)

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        return self.launch(plan, scoring).result()

    @property
    def transfers(self) -> tuple[RankLink, ...]:
        return self._ranks.transfers

    def memory(self) -> dict[str, Memory]:
        return self._executor.memory()

    def close(self) -> None:
        self._ranks.close()
        self._executor.close()


class _ExplainedStep(NamedTuple):
    step: PendingStep
    ranks: EngineRanks

    @property
    def waypoints(self) -> Seq[Waypoint]:
        """None: an event of this rank says nothing of the memory of the others."""
        return ()

    def result(self) -> list[Sampled]:
        with self.ranks.explained():
            return self.step.result()


class TableSender:
    """The block tables that the other ranks have of the sequences of this one.

    Args:
        count: of sequences that can have one at once.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._sent: dict[Sequence, _SentTable] = {}

    def pack(self, plan: list[ScheduledSequence]) -> tuple[list[int], list[int]]:
        """``spans`` and ``changes`` of ``RankStep``. Rows of sliding-window layers follow in tables of their own."""
        spans: list[int] = []
        changes: list[int] = []
        for scheduled in plan:
            table = self._of(scheduled.sequence)
            table.pack(scheduled.sequence, changes)
            spans += (table.number, scheduled.start, scheduled.count)
        return spans, changes

    def _of(self, sequence: Sequence) -> "_SentTable":
        table = self._sent.get(sequence)
        if table is None:
            if not self._free:
                for idle in [held for held in self._sent if not held.blocks]:  # ended, or preempted
                    self._free.append(self._sent.pop(idle).number)
            table = self._sent[sequence] = _SentTable(self._free.pop())
        return table


class _SentTable:
    """A sequence's lists as they were sent. A preempted sequence has new ones when it is admitted again."""

    __slots__ = ("_counts", "_lists", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._lists: list[list[int] | None] = [None, None]
        self._counts = [0, 0]

    def pack(self, sequence: Sequence, changes: list[int]) -> None:
        for which, entries in enumerate((sequence.blocks, sequence.rows)):
            if self._lists[which] is not entries:
                self._lists[which], self._counts[which] = entries, 0
            sent = self._counts[which]
            if sent < len(entries):
                changes += (2 * self.number + which, sent, len(entries) - sent, *entries[sent:])
                self._counts[which] = len(entries)


class RankComputer(Protocol):
    """Computes the steps of rank 0 with this rank's part of a model."""

    def compute(self, step: Any) -> None:
        """
        Args:
            step: a ``RankStep`` or a ``PackedStep``, as the executor of rank 0 sends.
        Raises:
            EngineError: the device is lost.
        """

    def memory(self) -> dict[str, Memory]:
        """As of ``Executor``."""


class RankFollower:
    """Does what rank 0 tells this rank.

    Args:
        read: its part of a folder's weights; None: they do not fit.
        put: puts what was read in the place of the present ones.
    """

    def __init__(
        self,
        computer: RankComputer,
        read: Callable[[Path], Mapping[str, Tensor] | None],
        put: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self.compute, self.memory = computer.compute, computer.memory
        self._read_part, self._put = read, put
        self._values: Mapping[str, Tensor] | None = None

    def change(self, order: RankWeights) -> RankReport:
        """Read weights, or put those that were read in their place."""
        if order.folder:
            try:
                self._values = self._read_part(Path(order.folder))
            except (EngineError, OSError, SafetensorError) as error:
                return RankReport(str(error)[:2000])
            return RankReport("" if self._values is not None else f"{order.folder} does not fit into this rank's part")
        assert self._values is not None
        values, self._values = self._values, None
        self._put(values)
        return RankReport()


class TorchComputer:
    """Implements ``RankComputer`` in plain torch."""

    def __init__(self, model: Model, pools: KvPools) -> None:
        self._model, self._pools = model, pools
        self._tables: dict[int, list[int]] = {}

    def compute(self, step: RankStep) -> None:
        tokens, wanted, spans, changes = (array("i", each).tolist() for each in _parts(step))
        self._update(changes)
        full: list[TokenSpan] = []
        sliding: list[TokenSpan] = []
        positions: list[int] = []
        for at in range(0, len(spans), 3):
            table, start, count = spans[at : at + 3]
            for which, found in enumerate((full, sliding)):
                found.append(TokenSpan(len(positions), start, count, self._tables.get(2 * table + which, [])))
            positions += range(start, start + count)
        device = self._model.device
        inputs, places, rows = (torch.tensor(each, device=device) for each in (tokens, positions, wanted))
        with torch.inference_mode():
            paged = paged_attention(self._pools.kv, full, self._pools.sliding, sliding)
            self._model.logits(inputs, places, rows, paged)

    def memory(self) -> dict[str, Memory]:
        return shown(self._pools.kv, self._pools.sliding)

    def _update(self, changes: list[int]) -> None:
        at = 0
        while at < len(changes):
            table, first, count = changes[at : at + 3]
            entries = self._tables.setdefault(table, [])
            entries[first:] = changes[at + 3 : at + 3 + count]
            at += 3 + count


def _parts(step: RankStep) -> tuple[bytes, bytes, bytes, bytes]:
    return step.tokens, step.wanted, step.spans, step.changes


def serve(
    link: RankLink,
    build: Callable[[str, NativeOptions, RankGroup], RankFollower],
    built: Callable[[dict[str, Memory]], None] = lambda pools: None,
) -> int:
    """Be a rank until its socket closes; returns the exit status.

    Args:
        built: called with the rank's pools that other workers may read, before its first step.
    """
    message = link.receive(LOAD_S)
    if not message:
        return 0
    order = _decode_order(message)

    def meet() -> Any:
        link.send(msgspec.msgpack.encode(RankReport()))
        if not link.receive(LOAD_S):
            raise _LeaderEnded
        return FileStore(order.store, order.options.tensor_parallel_size)

    try:
        group = RankGroup(order.rank, order.options.tensor_parallel_size, meet)
        follower = build(order.model, order.options, group)
        built(follower.memory())
        while message := link.receive():
            work = _decode_work(message)
            if isinstance(work, RankWeights):
                link.send(msgspec.msgpack.encode(follower.change(work)))
            else:
                follower.compute(work)
    except _LeaderEnded:
        return 0
    except Exception as error:
        text = str(error) if isinstance(error, EngineError) else repr(error)
        with contextlib.suppress(OSError):  # rank 0 has ended first
            link.send(msgspec.msgpack.encode(RankReport(text[:2000])))
        return 1
    return 0


class _LeaderEnded(Exception):
    """Rank 0 has ended before the ranks met."""
