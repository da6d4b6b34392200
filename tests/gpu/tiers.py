"""What host memory and a disk behind the KV cache bring: first tokens of prompts that are there, and conversations.

python -m tests.gpu.tiers [--shape 8b] [--folder DIR]     (some three minutes on one GPU)
python -m tests.gpu.tiers --shape gpt-oss [--no-hybrid]   (sliding windows: in a pool of their own, or in one pool)
python -m tests.gpu.tiers --demo                          (the demo model on a CPU: whether it runs)

Prints the median time to a first token of a prompt that is computed, or comes from each tier, whose cached tokens are
checked, and what a worker would register. Then, of conversations that take turns on a pool that holds a third of them,
the mean, and the share of prompt tokens that was cached; "a disk" is behind as much host memory as the pool has.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

from penstock.infra.model import modeldir
from penstock.schemas.block_hashes import root
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.blocks import HostCache
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import HostPool, assemble, build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.runners.token_runner import tier_costs
from tests.gpu import beside
from tests.gpu.beside import SHAPES

ROOT = root("weights")
BLOCK = 32


def asked(key: object, prompt: list[int], answer: int) -> SequenceRequest:
    return SequenceRequest(key, array("I", prompt), Sampling(temperature=0.0), Stop(answer, ignore_eos=True), root=ROOT)


def first_token(engine: ScheduledEngine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and cached tokens."""
    began, first, cached = time.perf_counter(), 0.0, 0
    engine.submit(asked(0, prompt, 1))
    while not first or engine.scheduler.by_key:
        result = engine.step()
        cached += sum(count for _, count in result.started)
        if result.outputs and not first:
            first = time.perf_counter() - began
    return first, cached


def settle(engine: ScheduledEngine) -> None:
    """Wait until all that may be written is in files."""
    while any(host.disk is not None and (host.unwritten or host.busy) for host in engine.scheduler.kv_cache.hosts):
        engine.step()
        time.sleep(0.001)


def empty(engine: ScheduledEngine) -> None:
    """Let everything leave the device, to host memory if there is any."""
    first_token(engine, [7] * (BLOCK + 1))
    while engine.scheduler.blocks.evict():
        pass
    first_token(engine, [8] * (BLOCK + 1))


def of_tiers(engine: ScheduledEngine, tokens: int, vocab: int, repeats: int) -> None:
    draw = random.Random(1)
    times: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        prompt = [draw.randrange(10, vocab) for _ in range(tokens)]
        for what in ("computed", "device", "host memory", "disk"):
            if what == "host memory":
                empty(engine)
            elif what == "disk":
                empty(engine)
                settle(engine)
                for host in engine.scheduler.kv_cache.hosts:
                    host.forget(files=False)
            seconds, cached = first_token(engine, prompt)
            wanted = 0 if what == "computed" else (tokens - 1) // BLOCK * BLOCK
            stats = engine.stats()
            if what == "disk" and not cached and stats.disk_read_s > stats.compute_s:
                what = "disk, not read: computing is faster"
            else:
                assert cached == wanted, f"{what}: {cached} of {wanted} tokens were cached"
            if number:  # the first round compiles
                times.setdefault(what, []).append(seconds)
    print(f"| a prompt of {tokens} tokens | median | least | most |\n|---|---|---|---|")
    for what, found in times.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"| {what} | {1e3 * middle:.1f} ms | {1e3 * low:.1f} ms | {1e3 * high:.1f} ms |")
    stats = engine.stats()
    costs = tier_costs((), stats.load_s, stats.disk_read_s, stats.compute_s)
    print(
        f"a block of {BLOCK} tokens: computed {1e6 * stats.compute_s:.0f} µs, from host memory "
        f"{1e6 * stats.load_s:.0f}, read from a file {1e6 * stats.disk_read_s:.0f}: cost {costs}"
    )


def conversations(engine: ScheduledEngine, count: int, turns: int, tokens: int, answer: int, vocab: int) -> list[float]:
    """Times to first tokens of all turns but the first; four at a time, each conversation in its turn."""
    draw, waiting = random.Random(2), deque[tuple[int, int, list[int]]]()
    for number in range(count):
        waiting.append((number, 0, [draw.randrange(10, vocab) for _ in range(2 * tokens)]))
    running: dict[object, tuple[int, int, list[int], float, list[int]]] = {}
    found, cached, prompts = list[float](), 0, 0
    while waiting or running:
        while waiting and len(running) < 4:
            number, turn, prompt = waiting.popleft()
            engine.submit(asked((number, turn), prompt, answer))
            running[number, turn] = number, turn, prompt, time.perf_counter(), []
        result = engine.step()
        for key, hit in result.started:
            cached += hit if running[key][1] else 0
        for output in result.outputs:
            number, turn, prompt, began, got = running[output.key]
            if not got and turn:
                found.append(time.perf_counter() - began)
                prompts += len(prompt)
            got.append(output.token)
            if len(got) == answer:
                del running[output.key]
                if turn + 1 < turns:
                    more = [draw.randrange(10, vocab) for _ in range(tokens)]
                    waiting.append((number, turn + 1, [*prompt, *got, *more]))
    print(f"{statistics.mean(found) * 1e3:8.1f} ms mean, {statistics.median(found) * 1e3:8.1f} median, ", end="")
    print(f"{sorted(found)[int(0.95 * len(found))] * 1e3:8.1f} p95; {cached / prompts:.2f} cached")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--demo", action="store_true", help="the demo model on a CPU")
    parser.add_argument("--folder", type=Path, help="where files are written; default: a temporary folder")
    parser.add_argument("--hybrid", action=argparse.BooleanOptionalAction, default=True, help="as --hybrid-kv-cache")
    parser.add_argument("--host-gib", type=float, default=32.0, help="of host memory")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=given.folder))
    tokens, count, turns, more, answer = (512, 6, 3, 64, 8) if given.demo else (4096, 36, 4, 1024, 32)
    vocab = 1000 if given.demo else SHAPES[given.shape][0]
    sizes = {"block_size": BLOCK, "max_model_len": 2 * tokens, "kv_disk": str(folder), "max_running": 16}
    sizes |= {"hybrid_kv_cache": given.hybrid}
    held = count * (2 + turns) * more // BLOCK // 3
    sizes |= {
        "kv_blocks": max(held, 3 * tokens // 2 // BLOCK),
        "kv_offloading_size": 0.5 if given.demo else given.host_gib,
    }
    engine = made(given, NativeOptions(**sizes, device="cpu" if given.demo else "auto"))  # type: ignore[arg-type]
    locked = [copier._locked for copier in (engine._copier, engine._row_copier) if isinstance(copier, HostPool)]
    print(f"host memory: {sum(map(bool, locked))} of {len(locked)} pools have just their own bytes locked")
    try:
        blocks = engine.scheduler.blocks
        of_tiers(engine, tokens, vocab, 1 if given.demo else 5)
        pools: list[Any] = [blocks]
        if (windows := engine.scheduler.kv_cache.windows) is not None:
            pools.append(windows)
        hosts, copiers = [pool.host for pool in pools], (engine._copier, engine._row_copier)
        in_memory = [HostCache(host.slots) for host in hosts]
        on_disk = [HostCache(pool.total_blocks, disk=host.disk) for pool, host in zip(pools, hosts, strict=True)]
        for what, tiers in (("device only", []), ("host memory", in_memory), ("a disk", on_disk)):
            settle(engine)
            for pool in pools:
                pool.host = None
            while blocks.evict():
                pass
            engine._copier, engine._row_copier = copiers if tiers else (None, None)
            for pool, tier in zip(pools, tiers, strict=False):
                pool.host = tier
            print(f"{count} conversations of {turns} turns, {what:12}", end=" ")
            conversations(engine, count, turns, more, answer, vocab)
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


def made(given: argparse.Namespace, options: NativeOptions) -> ScheduledEngine:
    from penstock.workers.engines.native.model.loading import describe

    if given.demo:
        return build(str(modeldir.DEMO), options)
    assert options.max_model_len is not None
    beside.longest = options.max_model_len
    return assemble(describe(beside.random_model(given.shape)), options)


if __name__ == "__main__":
    main()
