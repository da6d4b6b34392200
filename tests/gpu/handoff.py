"""Moves KV blocks between GPUs, and shows how fast: run by hand on a machine with one or two NVIDIA GPUs.

    pip install nixl-cu13==1.5.1        (or nixl-cu12, as torch's CUDA is)
    python -m tests.gpu.handoff --json handoff.json

A process owns pools on the first GPU, this one has pools of the same shapes on the second. Measured for every block
size: a bare NIXL transfer, ours, ours with the generations compared; and a plain copy by torch between the two GPUs.
Everything that arrives is compared with what was sent. The last figures are of an owner that is stopped, then killed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from penstock.measure.handoff import Bare, compare, orders, report
from penstock.schemas.transfer import Endpoint, Memory
from penstock.workers.kv_transfer.nixl import load
from penstock.workers.kv_transfer.transport_protocol import TransferError, Transport
from penstock.workers.kv_transfer.transport_thread import open_transport

KIB, MIB = 1 << 10, 1 << 20
START_S = 120.0
REPEATS = 20


class Shape(NamedTuple):
    name: str
    block_bytes: int
    blocks: int
    owner: str = "cuda"
    reader: str = "cuda"


# 8B: 32 layers, keys and values, 32 tokens, 8 heads of 128 bfloat16 = 4 MiB; 128 blocks are a prompt of 4,096 tokens.
SHAPES = (
    Shape("8B", 4 * MIB, 128),
    Shape("2 MiB", 2 * MIB, 256),
    Shape("512 KiB", 512 * KIB, 1024),
    Shape("128 KiB", 128 * KIB, 1024),
    Shape("16 KiB", 16 * KIB, 1024),
    Shape("GPU to CPU", 2 * MIB, 64, reader="cpu"),
    Shape("CPU to GPU", 2 * MIB, 64, owner="cpu"),
)


class Pools:
    """One pool of each shape. Block i of pool p, seeded with s, holds the byte (i * 37 + p * 11 + s) % 251."""

    def __init__(self, side: str, device: int, seed: int) -> None:
        self.tensors: list[torch.Tensor] = []
        self.memory: dict[str, Memory] = {}
        self._generations: list[Any] = []
        for number, shape in enumerate(SHAPES):
            kind = shape.owner if side == "owner" else shape.reader
            place = torch.device("cuda", device) if kind == "cuda" else torch.device("cpu")
            tensor = self.pattern(number, seed, place).expand(-1, shape.block_bytes).contiguous()
            generations = np.ones(shape.blocks, np.uint32)
            self.tensors.append(tensor)
            self._generations.append(generations)
            self.memory[shape.name] = Memory(
                tensor.data_ptr(),
                shape.block_bytes,
                shape.blocks,
                kind,
                device if kind == "cuda" else 0,
                generations.ctypes.data,
                shape.name,
            )
        torch.cuda.synchronize(device)

    def holds(self, number: int, seed: int) -> bool:
        tensor = self.tensors[number]
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return bool((tensor == self.pattern(number, seed, tensor.device)).all())

    @staticmethod
    def pattern(number: int, seed: int, place: torch.device) -> torch.Tensor:
        ids = torch.arange(SHAPES[number].blocks, device=place)
        return ((ids * 37 + number * 11 + seed) % 251).to(torch.uint8)[:, None]


def own(pipe: Connection, device: int) -> None:
    torch.cuda.set_device(device)
    pools = Pools("owner", device, seed=1)
    transport = open_transport("nixl", f"gpu-owner-{time.time_ns()}", pools.memory)
    pipe.send(transport.endpoint)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(pools.holds(*pipe.recv()))
    transport.close()


def torch_copy(source: int, target: int, rounds: int) -> float:
    """GB/s of a plain copy of the 8B prompt between two GPUs, in one process."""
    a = torch.ones(SHAPES[0].blocks, SHAPES[0].block_bytes, dtype=torch.uint8, device=f"cuda:{source}")
    b = torch.empty_like(a, device=f"cuda:{target}")
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        began = time.perf_counter()
        b.copy_(a, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        times.append(time.perf_counter() - began)
    return float(a.numel() / statistics.median(times[3:]) / 1e9)


def first_ms(transport: Transport, peer: Endpoint) -> dict[str, float]:
    """The first transfers of a connection, and the smallest."""
    found = {}
    for what, call in (
        ("connect", lambda: transport.connect(peer, timeout=60).result()),
        ("first read", lambda: transport.read(peer, "8B", [0], [0], timeout=60).result()),
        ("one block of 16 KiB", lambda: transport.read(peer, "16 KiB", [0], [0], timeout=60).result()),
        ("one block of 16 KiB again", lambda: transport.read(peer, "16 KiB", [0], [0], timeout=60).result()),
    ):
        began = time.perf_counter()
        call()
        found[what] = (time.perf_counter() - began) * 1e3
    return found


def faults(transport: Transport, peer: Endpoint, pid: int) -> dict[str, Any]:
    """What a reader sees of an owner that is stopped and then killed while it is read."""
    ids = list(range(SHAPES[0].blocks))
    os.kill(pid, signal.SIGSTOP)
    began = time.perf_counter()
    error = transport.read(peer, "8B", ids, ids, generations=[1] * len(ids), timeout=5).exception()
    found: dict[str, Any] = {"stopped": str(error or "done"), "stopped_ms": (time.perf_counter() - began) * 1e3}
    os.kill(pid, signal.SIGCONT)
    futures = [transport.read(peer, "8B", ids, ids, timeout=20) for _ in range(REPEATS)]
    futures[2].exception()
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    ends: list[str] = []
    for future in futures:
        error = future.exception()
        ends.append(error.cause if isinstance(error, TransferError) else "done")
        if isinstance(error, TransferError):
            error.settled.result(30)
    found["killed"] = {each: ends.count(each) for each in sorted(set(ends))}
    found["killed_ms"] = (time.perf_counter() - began) * 1e3
    after = transport.read(peer, "8B", ids, ids, timeout=5).exception()
    found["afterwards"] = str(after)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    last = torch.cuda.device_count() - 1
    parser.add_argument("--owner", type=int, default=0, help="GPU")
    parser.add_argument("--reader", type=int, default=min(1, last), help="GPU")
    parser.add_argument("--rounds", type=int, default=REPEATS)
    parser.add_argument("--json", default="")
    parser.add_argument("--no-faults", action="store_true")
    asked = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    owner = context.Process(target=own, args=(other, asked.owner), daemon=True)
    owner.start()
    other.close()
    torch.cuda.set_device(asked.reader)
    pools = Pools("reader", asked.reader, seed=2)
    transport = open_transport("nixl", f"gpu-reader-{time.time_ns()}", pools.memory)
    if not pipe.poll(START_S):
        raise SystemExit("the owner did not start")
    peer = pipe.recv()
    print(f"{torch.cuda.get_device_name(asked.owner)}, GPU {asked.owner} -> {asked.reader}, NIXL {peer.version}")
    first = first_ms(transport, peer)
    print(", ".join(f"{what} {ms:.2f} ms" for what, ms in first.items()))
    bare = Bare(load(), f"gpu-bare-{time.time_ns()}", pools.memory.values())
    bare.add(peer)

    figures = []
    for op in ("READ", "WRITE"):  # the reads come first: afterwards the reader holds what the owner had
        for number, shape in enumerate(SHAPES):
            for order, ids in orders(shape.blocks):
                figures.append(compare(op, transport, bare, peer, shape.name, ids, order, asked.rounds))
            if op == "READ" and not pools.holds(number, seed=1):
                raise SystemExit(f"READ of {shape.name}: the bytes are not the owner's")
            if op == "READ":
                pools.tensors[number].copy_(pools.pattern(number, 3, pools.tensors[number].device))
                torch.cuda.synchronize(asked.reader)
            else:
                pipe.send((number, 3))
                if not pipe.recv():
                    raise SystemExit(f"WRITE of {shape.name}: the owner does not hold the bytes")
    report(figures)
    whole: dict[str, Any] = {
        "device": torch.cuda.get_device_name(asked.owner),
        "nixl": peer.version,
        "torch": torch.__version__,
        "gpus": [asked.owner, asked.reader],
        "torch_copy_gb_per_s": torch_copy(asked.owner, asked.reader, asked.rounds),
        "first_ms": first,
        "figures": msgspec.to_builtins(figures),
    }
    print(f"torch, GPU to GPU, 512 MiB: {whole['torch_copy_gb_per_s']:.1f} GB/s")
    if not asked.no_faults:
        assert owner.pid is not None
        whole["faults"] = faults(transport, peer, owner.pid)
        print(json.dumps(whole["faults"], indent=2))
    print(transport.stats())
    if asked.json:
        Path(asked.json).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    transport.close()
    pipe.close()
    owner.join(10)
    print("all bytes were right")


if __name__ == "__main__":
    main()
