"""``penstock bench handoff``: how much time our transport adds to a bare NIXL READ of the same descriptors.

Two processes with pools of equal layout. One reads blocks of the other in turns: with NIXL alone (make the transfer,
post it, poll it without a pause, release it), through our transport, and through our transport with the generations
checked, as a handoff does.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from schemas.transfer import Endpoint, Memory
from workers.kv_transfer.base import Transport, TransportUnavailable
from workers.kv_transfer.blocks import CopyOp, copy_ops
from workers.kv_transfer.nixl import KINDS
from workers.kv_transfer.nixl_library import Library, load
from workers.kv_transfer.opening import open_transport

POOL = "kv"
START_S = 60.0
WARM_ROUNDS = 3


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench handoff``."""

    block_bytes: Annotated[
        tuple[Annotated[int, Meta(ge=64)], ...],
        Meta(
            description="block sizes; 262144 is the demo model's: 8 layers, keys and values, 32 tokens, 2 x 64 float32"
        ),
    ] = (262_144, 2_097_152)
    blocks: Annotated[int, Meta(ge=1, description="blocks per transfer; 125 of 32 tokens are 4,000 tokens")] = 125
    rounds: Annotated[int, Meta(ge=1, description="transfers of each kind")] = 30
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class Figures(Struct, frozen=True):
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


def run(settings: Settings) -> int:
    """Measure all sizes and print a table; 1 without NIXL."""
    try:
        figures = [each for size in settings.block_bytes for each in measure(size, settings.blocks, settings.rounds)]
    except TransportUnavailable as error:
        print(f"penstock bench handoff: {error}", file=sys.stderr)
        return 1
    report(figures)
    if settings.json:
        whole = {"settings": settings, "figures": figures}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    return 0


def measure(block_bytes: int, blocks: int, rounds: int) -> list[Figures]:
    """Measure one block size, with adjacent and with scattered blocks, between this process and one that it starts.

    Raises:
        TransportUnavailable: NIXL does not work here.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    owner = context.Process(target=_own, args=(other, block_bytes, blocks), daemon=True)
    owner.start()
    other.close()
    pool = _Pool(block_bytes, blocks)
    try:
        transport = open_transport("nixl", f"bench-reader-{time.time_ns()}", {POOL: pool.memory})
        if not pipe.poll(START_S):
            raise TransportUnavailable("the other process did not start")
        peer = pipe.recv()
        bare = Bare(load(), f"bench-bare-{time.time_ns()}", [pool.memory])
        bare.add(peer)
        figures = [compare("READ", transport, bare, peer, POOL, ids, order, rounds) for order, ids in orders(blocks)]
        if not bool((pool.bytes == 1).all()):
            raise TransportUnavailable("the bytes that arrived are not those of the other process")
        transport.close()
    finally:
        pipe.close()  # which ends the other one
        owner.join(START_S)
    return figures


def orders(blocks: int) -> list[tuple[str, list[int]]]:
    scattered = np.random.default_rng(1).permutation(blocks).tolist()
    return [("run", list(range(blocks))), ("scattered", scattered)]


def compare(
    op: str,
    transport: Transport,
    bare: Bare,
    peer: Endpoint,
    pool: str,
    ids: Sequence[int],
    order: str,
    rounds: int,
) -> Figures:
    """Measure all three alternately, so that other load affects them alike. All generations must be 1."""
    here, there = transport.endpoint.pools[pool], peer.pools[pool]
    [move] = copy_ops(here, there, ids, ids, in_one_piece=True)
    ones = [1] * len(ids)

    def ours(generations: Sequence[int]) -> None:
        if op == "READ":
            transport.read(peer, pool, ids, ids, generations=generations).result()
        else:
            transport.write(peer, pool, ids, ids).result()

    kinds: tuple[Callable[[], None], ...] = (
        lambda: bare.move(op, peer, move),
        lambda: ours(()),
        lambda: ours(ones),
    )
    samples: list[list[float]] = [[] for _ in kinds]
    for turn in range(WARM_ROUNDS + rounds):
        for kind, times in zip(kinds, samples, strict=True):
            began = time.perf_counter()
            kind()
            if turn >= WARM_ROUNDS:
                times.append(time.perf_counter() - began)
    bare_s, ours_s, checked_s = (statistics.median(times) for times in samples)
    size = len(ids) * here.block_bytes / 1e6
    return Figures(
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


def report(figures: Sequence[Figures]) -> None:
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


def _own(pipe: Connection, block_bytes: int, blocks: int) -> None:
    """The process that owns the blocks, which hold ones; it ends with the pipe."""
    pool = _Pool(block_bytes, blocks, 1)
    transport = open_transport("nixl", f"bench-owner-{time.time_ns()}", {POOL: pool.memory})
    pipe.send(transport.endpoint)
    pipe.poll(None)
    transport.close()
