"""CPU time and memory of the router's core on one CPU core: the prefix index, and routing decisions.

The CPU time of one routing decision (prefix match, scoring, job message) by the number of workers.
"""

import argparse
import gc
import os
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator

from penstock.infra.process.gc_policy import freeze_loaded
from penstock.router.placement.decision_inputs import Decisions, array_decisions
from penstock.router.placement.pending import PendingRequest, build_job, routing_request
from penstock.router.placement.routing import Weights
from penstock.router.state.attempts import Positions
from penstock.router.state.caches import SWEEP_BLOCKS
from penstock.router.state.holders import keys_view
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.prefix_index import PrefixIndex
from penstock.router.state.snapshots import encoding, read_head, restoring
from penstock.schemas import wire
from penstock.schemas.block_hashes import DEFAULT_BLOCK_SIZE, split
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import DecisionInputs, LoadHeader
from penstock.schemas.kv import KvBatch, Removed, Stored
from penstock.schemas.requests import GenerateRequest, Stop

WORKERS = (2, 8, 64, 512)
PROMPT_TOKENS = 2_000
ACTIVE = 15  # requests at each worker, with prompts of their own: of a thousand tokens at most, so that it has room
_BLOCKS = PROMPT_TOKENS // DEFAULT_BLOCK_SIZE
HELD: dict[str, Callable[[int, int], int]] = {
    "no worker has it": lambda worker, workers: 0,
    "all have all": lambda worker, workers: _BLOCKS,
    "all at different depths": lambda worker, workers: 1 + worker * (_BLOCKS - 1) // max(1, workers - 1),
}


class Fleet:
    """Workers with active requests and some blocks of a prompt.

    Args:
        held: how many leading blocks of the prompt each worker holds, by the worker's number.
    """

    def __init__(self, workers: int, held: Callable[[int, int], int]) -> None:
        draw = random.Random(workers)
        self.index, self.tracker = PrefixIndex(1 << 24), LoadTracker()
        digests = os.urandom(16 * _BLOCKS)
        for number in range(workers):
            name = f"worker-{number:04}-0123abcd"
            registration = Registration(name, "m", "aggregated", "mock", 1, DEFAULT_BLOCK_SIZE, 16384, 256, 131072)
            self.tracker.put_worker(registration)
            blocks = digests[: 16 * held(number, workers)]
            own = Stored(os.urandom(16 * 64))
            self.index.apply(KvBatch(name, 1, 0, (own, Stored(blocks)) if blocks else (own,)))
            for active in range(ACTIVE):
                load = LoadHeader(draw.randrange(100, 1000), 0, "gateway", 1 << 62, "standard", 1)
                keys = keys_view(os.urandom(16 * 20))
                self.tracker.admit(
                    f"{number}-{active}", 1, name, load, now_ns=1, role="aggregated", echoed=True, keys=keys
                )
        request = GenerateRequest(
            "01890000-0000-7000-8000-000000000000",
            "m",
            "gateway",
            os.urandom(4 * PROMPT_TOKENS),
            Stop(64),
            1,
            1 << 62,
            digests,
        )
        self._pending = PendingRequest(request, wire.encode(request), "reply", 1)
        self._decisions = Decisions(self.tracker, array_decisions(self.tracker), "kv", Weights())
        self._turn = 0

    def place(self) -> bytes:
        """Take one request from its arrival to the bytes of its job, without admitting it."""
        self._turn += 1
        pending, turn = self._pending, self._turn
        keys = keys_view(pending.request.digests)
        request = routing_request(pending, keys, avoid=frozenset(), revision=None)
        decision = self._decisions.decide(request, keys, self.index.depths(keys), now_ns=turn, seed=turn, number=turn)
        job = build_job(
            pending,
            decision,
            mode="kv",
            router="router-0",
            revision="",
            prompt_blocks=len(keys),
            positions=Positions(turn, turn, turn),
            now_ns=turn,
            inputs=DecisionInputs(turn, turn, 0, 0),
        )
        return wire.encode(job)


def decisions() -> Iterator[tuple[int, str, Callable[[], bytes]]]:
    """For each case: the number of workers, which of them hold the prompt, and the call to measure."""
    for workers in WORKERS:
        for what, held in HELD.items():
            yield workers, what, Fleet(workers, held).place


MAX_BLOCKS = 16_000_000


def microseconds(call: Callable[[], object], seconds: float = 0.2) -> float:
    """Mean CPU time of one call in µs, the best of three series."""
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
    """An index in which worker w holds the first depths[w] blocks of ``prompt``, beside ``background`` other blocks."""
    index = PrefixIndex(MAX_BLOCKS)
    for w in range(workers):
        other = digests(background // workers)
        index.apply(KvBatch(f"w{w}", 1, 0, (Stored(prompt[: 16 * depths[w]]), Stored(other))))
    return index


DEPTHS: dict[str, Callable[[int, int], list[int]]] = {
    "all hold all": lambda workers, blocks: [blocks] * workers,
    "all hold half": lambda workers, blocks: [blocks // 2] * workers,
    "different depths, deepest first": lambda workers, blocks: DEPTHS["different depths, deepest last"](
        workers, blocks
    )[::-1],
    "different depths, deepest last": lambda workers, blocks: [
        max(1, blocks * (worker + 1) // (workers + 1)) for worker in range(workers)
    ],
}


def match_figures(background: int) -> None:
    print(f"match, µs ({background:,} other blocks){'':20}128     1,024     4,096 blocks; as a dict")
    for workers in (8, 64, 512):
        for what, depths in DEPTHS.items():
            row = []
            for blocks in (128, 1024, 4096):
                prompt = digests(blocks)
                index = filled(workers, prompt, depths(workers, blocks), background)
                row.append(microseconds(lambda index=index, prompt=prompt: index.depths(keys_view(prompt))))  # type: ignore[misc]
            row.append(microseconds(lambda index=index, prompt=prompt: index.match(keys_view(prompt))))  # type: ignore[misc]
            print(f"  {workers:3} workers, {what:32}" + "".join(f"{x:10.2f}" for x in row))


def fold_figures(total: int) -> None:
    """Measure KV events: distinct prompts stored and removed, and 64 answers that grow by one block per event."""
    for size in (1, 16, 128):
        names = [digests(size) for _ in range(total // size)]
        batches = [KvBatch("w", 1, seq, (Stored(name),)) for seq, name in enumerate(names)]
        gone = [KvBatch("w", 1, len(names) + seq, (Removed(_backwards(name)),)) for seq, name in enumerate(names)]
        stored, removed = 0.0, 0.0
        for _ in range(3):
            index = PrefixIndex(MAX_BLOCKS)
            stored = max(stored, total / _seconds(index, batches))
            removed = max(removed, total / _seconds(index, gone))
        print(
            f"fold, M blocks/s, {size:3} per event: stored {stored / 1e6:.2f}, removed last first {removed / 1e6:.2f}"
        )
    chains = [digests(total // 64) for _ in range(64)]
    grow: list[KvBatch] = []
    for at in range(0, len(chains[0]), 16):
        for chain in chains:
            parent = chain[at - 16 : at] if at else None
            grow.append(KvBatch("w", 1, len(grow), (Stored(chain[at : at + 16], parent),)))
    rate = max(len(grow) / _seconds(PrefixIndex(MAX_BLOCKS), grow) for _ in range(3))
    print(f"fold, M blocks/s, 64 answers growing by 1 per event: stored {rate / 1e6:.2f}")


def _seconds(index: PrefixIndex, batches: list[KvBatch]) -> float:
    start = time.process_time()
    for batch in batches:
        index.apply(batch)
    return time.process_time() - start


def _backwards(name: bytes) -> bytes:
    return b"".join(split(name)[::-1])


def memory_figures(blocks: int) -> None:
    for workers, run in ((1, 128), (8, 128), (1, 16)):
        names = [digests(run) for _ in range(blocks // run)]
        gc.collect()
        tracemalloc.start()
        index = PrefixIndex(MAX_BLOCKS)
        for w in range(workers):
            for seq, name in enumerate(names):
                index.apply(KvBatch(f"w{w}", 1, seq, (Stored(name),)))
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        print(
            f"memory, bytes per block held by {workers:2} workers, prompts of {run:3} ({index.blocks:,} blocks): "
            f"{grown / index.blocks:.1f}"
        )


def fleet(blocks: int) -> PrefixIndex:
    """64 workers with prompts of 100 blocks, half of which is shared by eight of them."""
    index, prompts, seqs = PrefixIndex(MAX_BLOCKS), blocks // 450, [0] * 64
    for prompt in range(prompts):
        shared = digests(50)
        for worker in random.Random(prompt).sample(range(64), 8):
            index.apply(KvBatch(f"w{worker}", 1, seqs[worker], (Stored(shared + digests(50)),)))
            seqs[worker] += 1
    return index


def steps_ms(steps: Iterator[object]) -> tuple[list[object], list[float]]:
    """Run all steps, and return their results and how long each took, in ms."""
    results: list[object] = []
    times: list[float] = []
    while True:
        start = time.process_time()
        result = next(steps, steps)
        times.append((time.process_time() - start) * 1e3)
        if result is steps:
            return results, times
        results.append(result)


def snapshot_figures(blocks: int) -> None:
    """Measure writing and loading a snapshot in a router's steps, each one turn of its event loop; no broker."""
    index = fleet(blocks)
    nodes = len(index.holders.tree)
    parts, times = steps_ms(encoding(index, 1, 0))
    data = [bytes(part) for part in parts]  # type: ignore[call-overload]
    size = sum(map(len, data))
    print(
        f"snapshot of {index.blocks:,} blocks in {nodes:,} nodes: {size / 1e6:.0f} MB in {sum(times) / 1e3:.2f} s, "
        f"the first step {times[0]:.2f} ms, the longest other {max(times[1:]):.2f} ms"
    )
    tail = [KvBatch("tail", 1, seq, (Stored(digests(128)),)) for seq in range(1000)]
    start, restored = time.process_time(), PrefixIndex(MAX_BLOCKS)
    _, times = steps_ms(restoring(restored, read_head(data[0]), data[1:]))
    folded = _seconds(restored, tail)
    assert restored.blocks == index.blocks + 128_000
    print(
        f"restored in {time.process_time() - start:.2f} s with a tail of 128,000 blocks ({folded:.2f} s); longest step "
        f"{max(times):.2f} ms"
    )
    checksum = microseconds(index.checksum)
    print(f"checksum with 64 targets: {checksum:.0f} µs")


def sweep_figures(blocks: int) -> None:
    index = fleet(blocks)
    for worker in range(1, 64, 2):
        start = time.process_time()
        index.forget(f"w{worker}")
        forget = time.process_time() - start
    steps, done = [], False
    while not done:
        start = time.process_time()
        done = index.sweep(SWEEP_BLOCKS)
        steps.append(time.process_time() - start)
    print(
        f"sweep of every second of 64 workers ({blocks:,} blocks before, {index.blocks:,} after): forget "
        f"{forget * 1e6:.0f} µs, then {len(steps)} steps of {SWEEP_BLOCKS:,}, {sum(steps):.2f} s in all, the longest "
        f"{max(steps) * 1e3:.2f} ms"
    )


def soak_figures(total: int, cap: int) -> None:
    """Measure the index at its cap: blocks that never recur and are never removed, beside one growing prompt."""
    index, hot = PrefixIndex(cap), digests(100)
    index.apply(KvBatch("w", 1, 0, (Stored(hot),)))
    print(f"soak: {total:,} unique blocks, cap {cap:,}")
    longest, start, stored, seq = 0.0, time.process_time(), 0, 0
    for tenth in range(1, 11):
        while stored < total * tenth // 10:
            seq += 1
            event = Stored(digests(128)) if seq % 50 else Stored(digests(128), hot[-16:])
            batch = KvBatch("w", 1, seq, (event,))
            began = time.process_time()
            index.apply(batch)
            longest = max(longest, time.process_time() - began)
            stored += 128
        kept = index.match(keys_view(hot)).get(("w", 0), 0)
        print(
            f"  {stored:11,} stored, {index.blocks:,} kept, {len(index.holders.tree):,} nodes, resident "
            f"{_resident_mib():.0f} MiB, {stored / (time.process_time() - start) / 1e6:.2f} M blocks/s with making "
            f"them, longest event {longest * 1e3:.2f} ms, of the hot prompt {kept} of 100"
        )


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def decision_figures() -> None:
    print(f"decision with match, scoring and job, prompts of {PROMPT_TOKENS:,} tokens")
    for workers, what, place in decisions():
        print(f"  {workers:3} workers, {what:24} {microseconds(place):6.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    parser.add_argument("--soak-blocks", type=int, default=50_000_000, help="unique blocks stored in the soak")
    parser.add_argument("--only", default="", help="of match, fold, memory, snapshot, sweep, soak, decision")
    args = parser.parse_args()
    figures: dict[str, Callable[[], None]] = {
        "match": lambda: match_figures(min(args.blocks, 200_000)),
        "fold": lambda: fold_figures(args.blocks),
        "memory": lambda: memory_figures(args.blocks),
        "snapshot": lambda: snapshot_figures(args.blocks),
        "sweep": lambda: sweep_figures(args.blocks),
        "soak": lambda: soak_figures(args.soak_blocks, args.blocks),
        "decision": decision_figures,
    }
    freeze_loaded()  # as a router does
    for name in args.only.split(",") if args.only else figures:
        figures[name]()
        gc.collect()


if __name__ == "__main__":
    main()
