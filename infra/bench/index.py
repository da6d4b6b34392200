"""Processor time and memory of the router's core: match, fold, sweep and decision, on one core."""

import argparse
import gc
import os
import time
import tracemalloc
from collections.abc import Callable

from router.holders import keys_view
from router.index import PrefixIndex
from router.load import Load, RoutingTarget
from router.policy import decide
from router.routing import RoutingContext, RoutingRequest, Weights
from schemas.fleet import Registration
from schemas.kv import KvBatch, Removed, Stored


def microseconds(call: Callable[[], object], seconds: float = 0.2) -> float:
    """Mean processor time of one call, the best of three series."""
    call()
    start = time.process_time()
    call()
    rounds = max(1, int(seconds / 3 / max(time.process_time() - start, 1e-7)))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for _ in range(rounds):
            call()
        best = min(best, (time.process_time() - start) / rounds)
    return best * 1e6


def digests(count: int) -> bytes:
    return os.urandom(16 * count)


def filled(workers: int, prompt: bytes, depths: list[int], background: int) -> PrefixIndex:
    """An index where worker w holds the first depths[w] blocks of ``prompt``, besides ``background`` other blocks."""
    index = PrefixIndex(16_000_000)
    for w in range(workers):
        other = digests(background // workers)
        index.apply(KvBatch(f"w{w}", 1, 0, (Stored(prompt[: 16 * depths[w]]), Stored(other))))
    return index


def match_figures(background: int) -> None:
    print(f"match, µs ({background:,} other blocks)            128     1,024     4,096 blocks")
    for workers, what in ((8, "all hold all"), (8, "all hold half"), (8, "different depths"), (64, "different depths")):
        row = []
        for blocks in (128, 1024, 4096):
            prompt = digests(blocks)
            depths = {
                "all hold all": [blocks] * workers,
                "all hold half": [blocks // 2] * workers,
                "different depths": [blocks * (w + 1) // (workers + 1) for w in range(workers)],
            }[what]
            index = filled(workers, prompt, depths, background)
            row.append(microseconds(lambda index=index, prompt=prompt: index.match(keys_view(prompt))))  # type: ignore[misc]
        print(f"  {workers:3} workers, {what:28}" + "".join(f"{x:10.2f}" for x in row))


def fold_figures(total: int) -> None:
    for size in (1, 16, 128):
        index = PrefixIndex(16_000_000)
        names = [digests(size) for _ in range(total // size)]
        batches = [KvBatch("w", 1, seq, (Stored(name),)) for seq, name in enumerate(names)]
        start = time.process_time()
        for batch in batches:
            index.apply(batch)
        stored = time.process_time() - start
        gone = [KvBatch("w", 1, len(names) + seq, (Removed(name),)) for seq, name in enumerate(names)]
        start = time.process_time()
        for batch in gone:
            index.apply(batch)
        removed = time.process_time() - start
        print(
            f"fold, M blocks/s, {size:3} per event: "
            f"stored {total / stored / 1e6:.2f}, removed {total / removed / 1e6:.2f}"
        )


def memory_figures(blocks: int) -> None:
    for workers in (1, 8):
        index = PrefixIndex(16_000_000)
        name = digests(blocks)
        gc.collect()
        tracemalloc.start()
        for w in range(workers):
            index.apply(KvBatch(f"w{w}", 1, 0, (Stored(name),)))
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        print(f"memory, bytes per block held by {workers} workers ({blocks:,} blocks): {grown / blocks:.1f}")


def sweep_figures(blocks: int) -> None:
    index = PrefixIndex(16_000_000)
    for w in range(2):
        index.apply(KvBatch(f"w{w}", 1, 0, (Stored(digests(blocks // 2)),)))
    start = time.process_time()
    index.forget("w0")
    forget = time.process_time() - start
    slices, done = [], False
    while not done:
        start = time.process_time()
        done = index.sweep(4096)
        slices.append(time.process_time() - start)
    print(
        f"forget a worker ({blocks:,} blocks in the index): {forget * 1e6:.0f} µs, then {len(slices)} sweeps of 4,096: "
        f"first {slices[0] * 1e3:.1f} ms, the others at most {max(slices[1:]) * 1e3:.2f} ms"
    )


def decision_figures() -> None:
    request = RoutingRequest(model="m", prompt_tokens=4000, max_tokens=200, prompt_blocks=125)
    for workers in (2, 64):
        targets = [
            RoutingTarget(
                (f"w{w}", 0),
                Registration(f"w{w}", "m", "aggregated", "mock", 1, 32, 16384, 256, 131072),
                Load(requests=w, sequences=w, active_blocks=7 * w, prefill_tokens=100 * w),
            )
            for w in range(workers)
        ]
        overlaps = {target.id: w for w, target in enumerate(targets)}
        cost = microseconds(lambda m=targets, o=overlaps: decide(RoutingContext(request, m, o, "kv", Weights(), 1)))  # type: ignore[misc]
        print(f"decide, {workers} workers: {cost:.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    blocks = parser.parse_args().blocks
    match_figures(blocks)
    fold_figures(blocks)
    memory_figures(blocks)
    sweep_figures(blocks)
    decision_figures()


if __name__ == "__main__":
    main()
