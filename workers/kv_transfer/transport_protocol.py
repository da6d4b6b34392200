"""Moving blocks between the pools of two workers: interface, errors, statistics.

Knows no NATS and no engine. A transport owns one thread and one agent; every call returns a
``concurrent.futures.Future`` at once. Three facts shape the interface:

- a posted transfer cannot be cancelled. After a timeout its blocks stay in quarantine until the transfer has ended or
  its agent is gone; ``TransferError.settled`` says when they may be used again;
- a reader cannot know what a block holds. A read names the generations it expects, and they are compared with the
  owner's *after* the bytes have arrived;
- a stopped peer never causes an error by itself, so every transfer has a deadline.

Which side moves the bytes: the one that needs them (read) or the one that has them (write).

A read is one-sided where the memory of the other process can be copied directly (same host and PID namespace) and over
RDMA. Over TCP it is emulated with messages: slower than a write, and a reader that crashes in the middle can take the
owner with it. There the owner pushes.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from penstock.schemas.transfer import Endpoint

Cause: TypeAlias = Literal["peer_lost", "timeout", "stale", "refused", "unavailable"]
CAUSES: tuple[Cause, ...] = ("peer_lost", "timeout", "stale", "refused", "unavailable")
TIMEOUT_S = 5.0
QUARANTINE_S = 10.0
RANK = ":rank"  # in names of agents: after that of their engine, before the number of the rank
DRAIN_S = 4.0  # a closed connection's kernel keeps sending for UCX_TCP_USER_TIMEOUT (3 s) at most


def completed_future() -> "Future[None]":
    """A future that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class TransferError(Exception):
    """The bytes did not arrive, or must not be used.

    ``cause`` is one of: "peer_lost" (the peer ended or cannot be reached; another may serve), "timeout", "stale" (the
    blocks have another owner by now), "refused" (these blocks can never move: wrong layout, ids, version, metadata),
    "unavailable" (this transport is closed or broken).

    ``settled`` is done when the *local* blocks of the transfer may be used again. It does not cover
    the peer's blocks after a failed write: what has left this process is still written there (``drained``).
    """

    def __init__(self, cause: Cause, message: str, settled: "Future[None] | None" = None) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.message = message
        self.settled = completed_future() if settled is None else settled

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"


class TransportUnavailable(Exception):
    """No transport can be opened here; the message says what to install or what failed."""


class TransferResult(NamedTuple):
    bytes: int
    seconds: float  # from the call to the last byte, the generation check included


def when_done(futures: "Sequence[Future[Any]]", then: Callable[[], None]) -> None:
    """Call a function when all have ended, well or not; in the thread of the last."""
    left, lock = [len(futures)], threading.Lock()

    def one(_: "Future[Any]") -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            then()

    if not futures:
        then()
    for future in futures:
        future.add_done_callback(one)


def failed(futures: "Sequence[Future[Any]]", result: "Future[Any]") -> bool:
    """Whether one has failed; then the result does, and is settled when all are."""
    errors = [error for each in futures if isinstance(error := each.exception(), TransferError)]
    if not errors:
        return False
    settled: Future[None] = Future()
    when_done([error.settled for error in errors], lambda: settled.set_result(None))
    result.set_exception(TransferError(errors[0].cause, errors[0].message, settled))
    return True


def joined(transfers: "Sequence[Future[TransferResult]]") -> "Future[TransferResult]":
    """The result of transfers that were begun at once: all their bytes, and the time of the longest."""
    result: Future[TransferResult] = Future()
    result.set_running_or_notify_cancel()

    def ended() -> None:
        if not failed(transfers, result):
            each = [transfer.result() for transfer in transfers]
            seconds = max((one.seconds for one in each), default=0.0)
            result.set_result(TransferResult(sum(one.bytes for one in each), seconds))

    when_done(transfers, ended)
    return result


class TransportStats(NamedTuple):
    live: int  # transfers in flight or waiting
    quarantined_transfers: int
    quarantined_blocks: int
    peers: int  # loaded into the agent
    transfers: int  # completed
    bytes_read: int
    bytes_written: int
    seconds: float  # of completed transfers, summed
    failures: dict[str, int]  # by cause
    renewals: int  # of the agent
    registered_bytes: int = 0  # of pools, which peers can reach
    buffer_bytes: int = 0  # registered beside them, for own reads


class Transport(Protocol):
    """Thread-safe; futures complete in the transport's own thread, so their callbacks must be short."""

    @property
    def endpoint(self) -> Endpoint:
        """What peers need to reach this worker. Changes when the agent is renewed."""

    def read(
        self,
        peer: Endpoint,
        pool: str,
        remote: Sequence[int],
        local: Sequence[int],
        *,
        generations: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> "Future[TransferResult]":
        """Copy the peer's blocks ``remote`` into the blocks ``local`` of the pool of that name.

        With ``layers``, only these are copied, from the first to before the second. Ranks that share blocks refuse.

        With ``generations``, one per block: fails with "stale" unless they are still the owner's when all bytes have
        arrived; without ``local``, only this is checked. The future cannot be cancelled and fails with
        ``TransferError`` only.
        """

    def write(
        self, peer: Endpoint, pool: str, local: Sequence[int], remote: Sequence[int], *, timeout: float = TIMEOUT_S
    ) -> "Future[TransferResult]":
        """Copy the blocks ``local`` into the peer's blocks ``remote``, which it offered for this."""

    def connect(self, peer: Endpoint, *, reads: bool = True, timeout: float = TIMEOUT_S) -> "Future[None]":
        """Open the connection ahead of the first transfer; done when bytes have passed. Idempotent.

        Args:
            reads: also have the memory that reads from this peer need; otherwise, the first of them has to get it.
        """

    def drained(self) -> "Future[None]":
        """Done when nothing more can come from writers that have ended by now; only then are offered blocks free.

        What a writer has sent before it ended may still lie in the kernels of both hosts, for a few seconds. A writer
        that reports the end of its write, good or by ``settled`` without a renewal, leaves nothing behind.
        """

    def renew(self) -> None:
        """Replace the agent: only that ends a write whose writer is stopped. Peers lose the old one."""

    def forget(self, agent: str) -> None:
        """Fail the transfers of an agent that has ended at once. Posted ones stay in quarantine until they end."""

    def stats(self) -> TransportStats: ...

    def close(self) -> None:
        """Fail the transfers in flight and end the thread; waits a bounded time."""


SHARED = {"all", "cma", "sm", "shm", "shared_memory"}  # values of UCX_TLS that leave copying between processes on
RDMA = {"all", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_v"}


def path_between(a: Endpoint, b: Endpoint) -> Literal["read", "write"]:
    """The direction to use between two workers; symmetric."""
    if a.host and a.host == b.host:
        return "read"
    return "read" if a.rdma and b.rdma else "write"


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Boot id, PID namespace and user; "" where this process cannot copy from another one's memory at all."""
    if not allowed(environ, SHARED) or not copies_between_processes():
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.geteuid()}"


def has_rdma(environ: Mapping[str, str] = os.environ, devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether a port of an RDMA device is active and UCX may use it."""
    states = (path.read_text(encoding="ascii", errors="replace") for path in devices.glob("*/ports/*/state"))
    return allowed(environ, RDMA) and any("ACTIVE" in state for state in states)


def allowed(environ: Mapping[str, str], names: set[str]) -> bool:
    """Whether ``UCX_TLS`` leaves one of these transports on (``^`` turns those named off)."""
    value = environ.get("UCX_TLS", "") or "all"
    named = {name.split(":")[0].strip() for name in value.lstrip("^").split(",")}
    return not named & (names - {"all"}) if value.startswith("^") else bool(named & names)


def copies_between_processes() -> bool:
    """Try the system call on ourselves: a sandbox may forbid it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)

    def vector(buffer: "ctypes.Array[ctypes.c_char]") -> "ctypes.Array[ctypes.c_void_p]":
        return (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 1)  # struct iovec: address, length

    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return bool(call(os.getpid(), vector(target), 1, vector(source), 1, 0) == 1) and target.raw == b"x"
