"""``penstock bench handoff``: how much time our transport adds to a bare NIXL transfer of the same descriptors.

Two processes with pools of equal layout. One moves blocks in turns: with NIXL alone (make the transfer, post it, poll
it without a pause, release it), through our transport, and through our transport with the generations checked, as a
handoff does. Beside each other, the processes are on one machine; with ``--listen`` on one host and ``--peer`` on
another, between these two. There they read over RDMA, and write over TCP, as handoffs do (``kv_transfer.path``).
"""

import contextlib
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Meta, Struct

from penstock.cli.terminal import fail
from penstock.schemas.transfer import Endpoint, Memory
from penstock.schemas.wire import decoder, encode
from penstock.workers.kv_transfer.agent import CopyOp, copy_ops
from penstock.workers.kv_transfer.nixl import KINDS, Library, load
from penstock.workers.kv_transfer.transport_protocol import Transport, TransportUnavailable, path_between
from penstock.workers.kv_transfer.transport_thread import open_transport

POOL = "kv"
START_S = 60.0
WARM_ROUNDS = 3
MOVED, THEIRS = 2, 1  # bytes of the blocks here, and of those of the other process
MAX_POOL_BYTES = 8 << 30
MAX_MESSAGE_BYTES = 1 << 20
IDLE_S = 600.0  # without a word from the other host
RDMA_DEVICES = Path("/sys/class/infiniband")


class HandoffBenchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench handoff``."""

    block_bytes: Annotated[
        tuple[Annotated[int, Meta(ge=64)], ...],
        Meta(
            description="block sizes; 262144 is the demo model's: 8 layers, keys and values, 32 tokens, 2 x 64 float32"
        ),
    ] = (262_144, 2_097_152)
    blocks: Annotated[int, Meta(ge=1, description="blocks per transfer; 125 of 32 tokens are 4,000 tokens")] = 125
    rounds: Annotated[int, Meta(ge=1, description="transfers of each kind")] = 30
    listen: Annotated[
        str, Meta(description="HOST:PORT on which this host waits for another host's `--peer`, until Ctrl-C")
    ] = ""
    peer: Annotated[str, Meta(description="HOST:PORT of a host that waits: measure between it and this one")] = ""
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class HandoffBenchFigures(Struct, frozen=True):
    """Medians of one setting. MB are 10^6 bytes. Ratios are our throughput divided by bare NIXL's."""

    op: str
    block_bytes: int
    blocks: int
    order: str  # of the ids: "run" (neighbours, one descriptor) or "scattered" (one each)
    bare_ms: float
    ours_ms: float
    checked_ms: float  # with the generations compared
    bare_mb_per_s: float
    ours_mb_per_s: float
    checked_mb_per_s: float
    ratio: float
    checked_ratio: float
    best_ratio: float  # of the shortest times, checked to bare: what it is when nothing else wants the cores


class Bare:
    """Transfers with bare NIXL, polled without a pause."""

    def __init__(self, library: Library, name: str, pools: Iterable[Memory]) -> None:
        self._agent = library.api.nixl_agent(name, library.api.nixl_agent_config(enable_prog_thread=False))
        for pool in pools:
            size = pool.blocks * pool.block_bytes
            self._agent.register_memory([(pool.base, size, pool.device, "")], mem_type=KINDS[pool.kind])

    def add(self, peer: Endpoint) -> None:
        self._agent.add_remote_agent(peer.metadata)

    def move(self, op: str, peer: Endpoint, move: CopyOp) -> None:
        local = self._agent.get_xfer_descs(move.local.rows, KINDS[move.local.kind])
        remote = self._agent.get_xfer_descs(move.remote.rows, KINDS[move.remote.kind])
        handle = self._agent.initialize_xfer(op, local, remote, peer.agent)
        state = self._agent.transfer(handle)
        while state != "DONE":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)


class Ask(Struct, frozen=True):
    """From ``--peer``: a pool wanted; then, if it was written to, a check of what it holds."""

    block_bytes: int
    blocks: int
    wrote: bool = False


class PoolReply(Struct, frozen=True, omit_defaults=True):
    """From ``--listen``: the pool, or what is wrong."""

    endpoint: Endpoint | None = None
    problem: str = ""


def run(settings: HandoffBenchSettings) -> int:
    """Measure all sizes and print a table; 1 without NIXL, or if the other host does not answer."""
    try:
        if settings.listen:
            serve(settings.listen)
        before = rdma_bytes()
        figures = [
            each
            for size in settings.block_bytes
            for each in measure(size, settings.blocks, settings.rounds, peer=settings.peer)
        ]
        after = rdma_bytes()
    except (TransportUnavailable, OSError, ValueError) as error:
        return fail("bench handoff", error)
    report(figures)
    if settings.peer:
        print(rdma_line(before, after, sum(moved_bytes(each, settings.rounds) for each in figures)))
    if settings.json:
        whole = {"settings": settings, "figures": figures}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    return 0


def measure(block_bytes: int, blocks: int, rounds: int, *, peer: str = "") -> list[HandoffBenchFigures]:
    """Measure one block size, with adjacent and with scattered blocks.

    Args:
        peer: address of the host that owns the other blocks; "": a process that is started here.

    Raises:
        TransportUnavailable: NIXL does not work here.
        OSError: the other host cannot be reached.
        ValueError: the address is none, or the other host refuses.
    """
    pool = _Pool(block_bytes, blocks, MOVED)
    transport = open_transport("nixl", f"bench-mover-{time.time_ns()}", {POOL: pool.memory})
    try:
        with across(peer, block_bytes, blocks) if peer else _beside(block_bytes, blocks) as (theirs, check):
            op = "WRITE" if peer and path_between(transport.endpoint, theirs) == "write" else "READ"
            bare = Bare(load(), f"bench-bare-{time.time_ns()}", [pool.memory])
            bare.add(theirs)
            figures = [compare(op, transport, bare, theirs, POOL, ids, order, rounds) for order, ids in orders(blocks)]
            if op == "WRITE":
                check()
            elif not pool.holds(THEIRS):
                raise TransportUnavailable("the bytes that arrived are not those of the other process")
    finally:
        transport.close()
    return figures


@contextlib.contextmanager
def _beside(block_bytes: int, blocks: int) -> Iterator[tuple[Endpoint, Callable[[], None]]]:
    """Blocks of another process of this machine."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    owner = context.Process(target=_own, args=(other, block_bytes, blocks), daemon=True)
    owner.start()
    other.close()
    try:
        if not pipe.poll(START_S):
            raise TransportUnavailable("the other process did not start")
        yield pipe.recv(), lambda: None
    finally:
        pipe.close()  # which ends the other one
        owner.join(START_S)


@contextlib.contextmanager
def across(address: str, block_bytes: int, blocks: int) -> Iterator[tuple[Endpoint, Callable[[], None]]]:
    """Blocks of another host, and a check of what was written there.

    Raises:
        TransportUnavailable: the host cannot be reached.
        ValueError: the address is none, or the host refuses.
    """
    try:
        connection = socket.create_connection(host_and_port(address), START_S)
    except OSError as error:
        raise TransportUnavailable(f"--peer {address} cannot be reached: {error.strerror or error}") from None
    with connection:

        def ask(question: Ask) -> Endpoint | None:
            _send(connection, question)
            answer = _receive(connection, _ANSWER)
            if answer is None or answer.problem:
                raise ValueError(f"{address}: {answer.problem if answer else 'it closed the connection'}")
            endpoint: Endpoint | None = answer.endpoint
            return endpoint

        endpoint = ask(Ask(block_bytes, blocks))
        if endpoint is None:
            raise ValueError(f"{address}: it offers no blocks")

        def check() -> None:
            ask(Ask(block_bytes, blocks, wrote=True))

        yield endpoint, check


def serve(address: str) -> NoReturn:
    """Own blocks for other hosts, for one after the other, until Ctrl-C.

    Raises:
        TransportUnavailable: NIXL does not work here.
        OSError: the address cannot be used.
        ValueError: it is none.
    """
    load()  # without NIXL it fails now
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        where = f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        print(f"waiting on {where}; on the other host: penstock bench handoff --peer {where}", flush=True)
        while True:
            connection, peer = listener.accept()
            with connection:
                connection.settimeout(IDLE_S)
                try:
                    _serve_one(connection)
                except (OSError, msgspec.MsgspecError, ValueError) as error:  # the next one may do better
                    print(f"{peer[0]}: {error}", file=sys.stderr, flush=True)
                else:
                    print(f"{peer[0]}: done", flush=True)


def _serve_one(connection: socket.socket) -> None:
    asked = _receive(connection, _ASK)
    if asked is None:
        return
    if asked.block_bytes < 64 or asked.blocks < 1 or asked.block_bytes * asked.blocks > MAX_POOL_BYTES:
        problem = (
            f"{asked.blocks} blocks of {asked.block_bytes} bytes: at least 1 of 64, at most {MAX_POOL_BYTES >> 30} GiB"
        )
        _send(connection, PoolReply(problem=problem))
        raise ValueError(problem)
    pool = _Pool(asked.block_bytes, asked.blocks, THEIRS)
    transport = open_transport("nixl", f"bench-owner-{time.time_ns()}", {POOL: pool.memory})
    try:
        _send(connection, PoolReply(endpoint=transport.endpoint))
        if (end := _receive(connection, _ASK)) is not None and end.wrote:
            right = pool.holds(MOVED)
            _send(connection, PoolReply(problem="" if right else "the bytes that arrived are not those that were sent"))
    finally:
        transport.close()


def _send(connection: socket.socket, message: Ask | PoolReply) -> None:
    data = encode(message)
    connection.sendall(len(data).to_bytes(4, "big") + data)


_ASK, _ANSWER = decoder(Ask), decoder(PoolReply)


def _receive(connection: socket.socket, decode: Callable[[bytes], Any]) -> Any:
    """One message; None: the other side has left."""
    size = int.from_bytes(_exactly(connection, 4), "big")
    if size == 0:
        return None
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES}")
    return decode(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    """As many bytes; none if the other side left before the first."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            if data:
                raise ValueError("the connection ended within a message")
            return b""
        data += part
    return data


def host_and_port(address: str) -> tuple[str, int]:
    """
    Raises:
        ValueError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r}: expected HOST:PORT, as in 10.0.0.1:5600")
    return host.strip("[]"), int(port)


def rdma_bytes(devices: Path = RDMA_DEVICES) -> int | None:
    """What all ports of this host's RDMA devices have received and sent; None: there are none, or none that counts.

    Source: ``port_rcv_data`` and ``port_xmit_data`` count words of four bytes (InfiniBand specification, PortCounters).
    """
    counts = []
    for path in (*devices.glob("*/ports/*/counters/port_rcv_data"), *devices.glob("*/ports/*/counters/port_xmit_data")):
        with contextlib.suppress(OSError, ValueError):  # some virtual functions have no counters
            counts.append(4 * int(path.read_text(encoding="ascii")))
    return sum(counts) if counts else None


def rdma_line(before: int | None, after: int | None, moved: int) -> str:
    """Whether the bytes passed through RDMA ports of this host."""
    if before is None or after is None:
        return "RDMA: this host has no ports that count; the bytes went over TCP, or an unknown path"
    return f"RDMA: {(after - before) / 1e9:,.2f} GB through this host's ports, of {moved / 1e9:,.2f} GB of blocks"


def moved_bytes(figures: HandoffBenchFigures, rounds: int) -> int:
    """Bytes of the blocks that one row moved, warm rounds included, in its three ways."""
    return 3 * (WARM_ROUNDS + rounds) * figures.blocks * figures.block_bytes


def orders(blocks: int) -> list[tuple[str, list[int]]]:
    scattered = np.random.default_rng(1).permutation(blocks).tolist()
    return [("run", list(range(blocks))), ("scattered", scattered)]


def compare(
    op: str, transport: Transport, bare: Bare, peer: Endpoint, pool: str, ids: Sequence[int], order: str, rounds: int
) -> HandoffBenchFigures:
    """Measure all three alternately, so that other load affects them alike. All generations must be 1."""
    here, there = transport.endpoint.pools[pool], peer.pools[pool]
    [move] = copy_ops(here, there, ids, ids, in_one_piece=True)
    ones = [1] * len(ids)

    def ours(generations: Sequence[int]) -> None:
        if op == "READ":
            transport.read(peer, pool, ids, ids, generations=generations).result()
        else:
            transport.write(peer, pool, ids, ids).result()

    kinds: tuple[Callable[[], None], ...] = (lambda: bare.move(op, peer, move), lambda: ours(()), lambda: ours(ones))
    samples: list[list[float]] = [[] for _ in kinds]
    for turn in range(WARM_ROUNDS + rounds):
        for kind, times in zip(kinds, samples, strict=True):
            began = time.perf_counter()
            kind()
            if turn >= WARM_ROUNDS:
                times.append(time.perf_counter() - began)
    bare_s, ours_s, checked_s = (statistics.median(times) for times in samples)
    size = len(ids) * here.block_bytes / 1e6
    return HandoffBenchFigures(
        op=op,
        block_bytes=here.block_bytes,
        blocks=len(ids),
        order=order,
        bare_ms=bare_s * 1e3,
        ours_ms=ours_s * 1e3,
        checked_ms=checked_s * 1e3,
        bare_mb_per_s=size / bare_s,
        ours_mb_per_s=size / ours_s,
        checked_mb_per_s=size / checked_s,
        ratio=bare_s / ours_s,
        checked_ratio=bare_s / checked_s,
        best_ratio=min(samples[0]) / min(samples[2]),
    )


def report(figures: Sequence[HandoffBenchFigures]) -> None:
    print(
        "op     block, KiB  blocks  ids        bare NIXL, MB/s    ours, MB/s  (ratio)   checked, MB/s  (ratio)"
        "  best ratio"
    )
    for each in figures:
        print(
            f"{each.op:5} {each.block_bytes / 1024:11,.0f} {each.blocks:7} {each.order:10}"
            f"{each.bare_mb_per_s:16,.0f} {each.ours_mb_per_s:13,.0f}   {each.ratio:5.2f} "
            f"{each.checked_mb_per_s:16,.0f}   {each.checked_ratio:5.2f} {each.best_ratio:11.2f}"
        )


class _Pool:
    def __init__(self, block_bytes: int, blocks: int, value: int = 0) -> None:
        self.bytes: Any = np.full(block_bytes * blocks, value, np.uint8)  # written, so that its pages are there
        self.generations = np.ones(blocks, np.uint32)
        self.memory = Memory(
            self.bytes.ctypes.data, block_bytes, blocks, generations=self.generations.ctypes.data, layout="bench"
        )

    def holds(self, value: int) -> bool:
        """Whether all its bytes have this value."""
        return bool((self.bytes == value).all())


def _own(pipe: Connection, block_bytes: int, blocks: int) -> None:
    """The process that owns the blocks, which hold ones; it ends with the pipe."""
    pool = _Pool(block_bytes, blocks, THEIRS)
    transport = open_transport("nixl", f"bench-owner-{time.time_ns()}", {POOL: pool.memory})
    pipe.send(transport.endpoint)
    pipe.poll(None)
    transport.close()
