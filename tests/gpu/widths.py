"""Moves KV blocks between engines of two widths, and shows how fast: run by hand on NVIDIA GPUs.

    python -m tests.gpu.widths --widths 2:1,1:2 [--shape 8b] [--block-size 32] [--seconds 55]
    python -m tests.gpu.widths --shape tiny --device cpu            (without GPUs)

Each rank is a process with a pool and a transport, without an engine. Blocks of a prompt of 4,000 tokens are read in a
row and scattered: their heads, and beside it as many bytes of whole blocks, one range each, between the same GPUs.
Everything that arrives is compared with what was sent. There are at most ``--seconds`` for each pair of widths.
"""

import argparse
import faulthandler
import multiprocessing
import random
import threading
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.schemas.transfer import Memory
from penstock.workers.kv_transfer.ranks import RankTransports, RemoteTransport, serve_transport
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.gpu.beside import SHAPES

ROUNDS = 12  # of a transfer, the first two uncounted
START_S = 50.0
FACTORS = (7, 3, 5, 11, 1)  # of layer, part, token, head and element in a value


class Case(NamedTuple):
    shape: str
    widths: tuple[int, int]  # of the owner and the reader
    block_size: int
    tokens: int
    device: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.shape}, width {self.widths[0]} to {self.widths[1]}, blocks of {self.block_size} tokens"


class Line:
    """``Channel`` over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: bytes) -> None:
        self._pipe.send_bytes(message)

    def receive(self) -> bytes:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            return b""


class RankPool:
    """A rank's blocks. ``bare``: as many, as long as the owner's, that are read as they are."""

    def __init__(self, case: Case, owns: bool, rank: int) -> None:
        _, hidden, _, layers, query_heads, heads = SHAPES[case.shape]
        self.device, number = torch.device("cpu"), 0
        if case.device == "cuda":  # GPUs of their own if there are enough
            number = (rank if owns else case.widths[0] + rank) % torch.cuda.device_count()
            self.device = torch.device("cuda", number)
            torch.cuda.set_device(self.device)
        width = case.widths[0] if owns else case.widths[1]
        each, owned = max(1, heads // width), max(1, heads // case.widths[0])
        self.count = case.tokens // case.block_size
        self.first, blocks = rank * heads // width, 3 * self.count
        inner = (layers, 2, case.block_size, each, hidden // query_heads)
        self.data = torch.zeros((blocks, *inner), dtype=torch.int16, device=self.device)
        self.bare_bytes = self.data[0].nbytes // each * owned
        self.bare = torch.zeros((blocks, self.bare_bytes), dtype=torch.uint8, device=self.device)
        self.generations = array("I", [1] * blocks)
        if owns:
            for block in range(blocks):
                self.data[block] = self.values(block)
        self.settle()
        place: dict[str, Any] = {"blocks": blocks, "kind": case.device, "device": number}
        split: dict[str, Any] = {"first_head": self.first, "all_heads": heads} if width > 1 else {}
        self.memory = {
            "kv": Memory(
                self.data.data_ptr(),
                self.data[0].nbytes,
                generations=self.generations.buffer_info()[0] if not rank else 0,
                layout=f"bfloat16({','.join(map(str, inner))})",
                **place,
                **split,
            ),
            "bare": Memory(self.bare.data_ptr(), self.bare_bytes, layout="bare", **place),
        }

    def values(self, block: int) -> torch.Tensor:
        """What a block of the owner's has of this rank's heads."""
        sizes = self.data.shape[1:]
        found = torch.full((1,) * len(sizes), 37 * block + 1, device=self.device)
        for axis, (size, factor) in enumerate(zip(sizes, FACTORS, strict=True)):
            start = self.first if axis == 3 else 0
            steps = torch.arange(start, start + size, device=self.device) * factor
            found = found + steps.view(-1, *(1,) * (len(sizes) - axis - 1))
        return (found % 30011).to(torch.int16)

    def holds(self, local: list[int], remote: list[int]) -> bool:
        """Whether the owner's blocks have arrived; forgets them."""
        equal = all(
            torch.equal(self.data[mine], self.values(theirs)) for mine, theirs in zip(local, remote, strict=True)
        )
        self.data.zero_()
        self.settle()
        return equal

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rank:
    """A rank in a process of its own."""

    def __init__(self, case: Case, owns: bool, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        (transfers, theirs), (self.orders, orders) = context.Pipe(), context.Pipe()
        context.Process(target=serve, args=(case, owns, rank, theirs, orders), daemon=True).start()
        for each in (theirs, orders):
            each.close()
        self._line, self._name = Line(transfers), f"{'owner' if owns else 'reader'}{rank}-{time.time_ns()}"

    def transport(self) -> RemoteTransport:
        if not self.orders.poll(START_S):
            raise SystemExit(f"{self._name} did not start")
        self.orders.recv()
        return RemoteTransport(self._line, self._name, lambda endpoint: None, 5.0)


def serve(case: Case, owns: bool, rank: int, transfers: Connection, orders: Connection) -> None:
    pool = RankPool(case, owns, rank)
    orders.send("ready")
    threading.Thread(target=serve_transport, args=(Line(transfers), pool.memory, open_transport), daemon=True).start()
    try:
        while True:
            orders.send(pool.holds(*orders.recv()))
    except EOFError:
        return


def measure(case: Case) -> None:
    faulthandler.dump_traceback_later(case.seconds - 5, exit=True)
    began = time.perf_counter()
    owners = [Rank(case, True, rank) for rank in range(case.widths[0])]
    others = [Rank(case, False, rank) for rank in range(1, case.widths[1])]
    pool = RankPool(case, False, 0)
    own = open_transport("nixl", f"reader0-{time.time_ns()}", pool.memory)
    reader = RankTransports(own, [each.transport() for each in others])
    endpoints = [each.transport().endpoint for each in owners]
    owner = msgspec.structs.replace(endpoints[0], ranks=tuple(endpoints[1:]))
    ready = time.perf_counter() - began
    reader.connect(owner, timeout=20).result(25)
    print(f"{case}, {pool.bare_bytes >> 10} KiB at each owner: ready after {ready:.1f} s, connected after "
          f"{time.perf_counter() - began - ready:.2f} s, {reader.stats().buffer_bytes >> 20} MiB of buffers",
          flush=True)  # fmt: skip
    pairs, count = reader._pairs(owner, "kv"), pool.count
    wanted = count * sum(each.endpoint.pools["kv"].block_bytes for each in (own, *reader._others))
    some = max(1, wanted // (len(pairs) * pool.bare_bytes))  # whole blocks of each pair: as many bytes
    draw = random.Random(1)
    for order in ("in a row", "scattered"):
        local, remote = (
            list(range(at, at + count)) if order == "in a row" else draw.sample(range(3 * count), count)
            for at in (0, count)
        )

        def whole(local: list[int] = local[:some], remote: list[int] = remote[:some]) -> int:
            reads = [mine.read(each, "bare", remote, local, timeout=10) for mine, each in pairs]
            return sum(each.result(12).bytes for each in reads)

        def heads(local: list[int] = local, remote: list[int] = remote) -> int:
            return reader.read(owner, "kv", remote, local, generations=[1] * count, timeout=10).result(12).bytes

        bare = rate(f"  {order}, whole blocks", whole)
        ours = rate(f"  {order}, heads", heads)
        for each in others:
            each.orders.send((local, remote))
        equal = [pool.holds(local, remote), *(each.orders.recv() for each in others)]
        print(f"  {order}: {ours / bare:.2f} of whole blocks, {ours / case.widths[1]:.1f} GB/s for each reader, values "
              f"{'equal' if all(equal) else 'DIFFER   WRONG'}", flush=True)  # fmt: skip
    print(f"  {reader.stats()}", flush=True)
    reader.close()


def rate(label: str, move: Callable[[], int]) -> float:
    """Gigabytes per second, by the median time."""
    times, count = [], 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        count = move()
        times.append(time.perf_counter() - began)
    first, times = times[0], sorted(times[2:])
    middle = times[len(times) // 2]
    print(f"{label}: {count / 1e6:,.1f} MB in {middle * 1e3:.2f} ms ({times[0] * 1e3:.2f} to {times[-1] * 1e3:.2f}, "
          f"first {first * 1e3:.1f}): {count / middle / 1e9:.1f} GB/s", flush=True)  # fmt: skip
    return count / middle / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="2:1,1:2", metavar="FROM:TO,...")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="with keys and values, not latents")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=55.0, help="for each pair of widths")
    asked = parser.parse_args()
    for widths in asked.widths.split(","):
        first, second = map(int, widths.split(":"))
        case = Case(asked.shape, (first, second), asked.block_size, asked.tokens, asked.device, asked.seconds)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(case,))
        process.start()
        process.join(asked.seconds)
        if process.exitcode != 0:
            print(f"{case}: {'too long' if process.exitcode is None else f'ended with {process.exitcode}'}", flush=True)
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
