"""What tuning constants buy: the same work with each of them and without it, in one process.

python -m tests.perf.tuning             # half a minute
python -m tests.perf.tuning turns garbage

Each figure is the least of several rounds, which other programs on the machine disturb least. An ordinary request (200
words, 64 tokens, mock engine) takes about 1,000 µs of CPU in all processes together. A constant that saves less than 20
of them, or less than a fiftieth of the waits that it is there for, is not worth its code. What only shows in a whole
deployment is measured with ``penstock bench http``, with two deployments in turns.
"""

import argparse
import asyncio
import base64
import gc
import hashlib
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import uvloop
from blake3 import blake3
from rich.table import Table
from tokenizers import Tokenizer

from penstock.cli.terminal import stdout
from penstock.gateway.media import loader
from penstock.infra.bus import object_store
from penstock.infra.model.modeldir import DEMO
from penstock.infra.process import gc_policy, turns
from penstock.infra.text.encoder import TextEncoder
from penstock.measure.load_generator import WORDS
from penstock.router.state import radix_tree
from penstock.workers.engine_loop import loop as engine_loop
from penstock.workers.engine_loop.loop import EngineLoop, EngineThread
from penstock.workers.engine_loop.step_output import Flush, SequenceState
from penstock.workers.engines.engine_protocol import Engine, Output, StepResult
from penstock.workers.runners import embedding_runner


class Figure(NamedTuple):
    """Times in seconds, or shares: with the constant, and without."""

    what: str
    with_it: float
    without: float
    unit: str = "µs"


def least(work: Callable[[], Any], rounds: int) -> float:
    """Seconds of CPU that the quickest of several rounds took."""
    took = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(10):
            work()
        took.append((time.thread_time() - began) / 10)
    return min(took)


def words(rounds: int) -> list[Figure]:
    """``encoder.CACHED_BYTES``, ``encoder.PIECE``: ids of words, and of beginnings, that were seen before."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    encoder, draw = TextEncoder(tokenizer), random.Random(1)

    def prompt(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    text, history, long = prompt(200), prompt(600), prompt(7_000)
    assert list(encoder.encode(text, special=False)) == tokenizer.encode(text, add_special_tokens=False).ids

    def seconds(work: Callable[[str], Any], beginning: str, words: int) -> float:
        texts = [f"{beginning} {prompt(words)}" for _ in range(11 * rounds)]
        return least(lambda: work(texts.pop()), rounds)

    def known(text: str) -> Any:
        return encoder.encode(text, special=False)

    def tokenized(text: str) -> Any:
        return tokenizer.encode_batch_fast([text])

    return [
        Figure("200 new words", seconds(known, "", 200), seconds(tokenized, "", 200)),
        Figure("600 words that came before, 50 new", seconds(known, history, 50), seconds(tokenized, history, 50)),
        Figure("7,000 new words", seconds(known, "", 7_000), seconds(tokenized, "", 7_000)),
        Figure("7,000 words that came before, 50 new", seconds(known, long, 50), seconds(tokenized, long, 50)),
    ]


def threads(rounds: int) -> list[Figure]:
    """``loader.LARGE_INLINE``, ``loader.LARGE``, ``object_store.LARGE``: what a thread does holds up no stream."""

    async def apart() -> float:
        took = []
        for _ in range(10 * rounds):
            began = time.process_time()
            await asyncio.to_thread(int)
            took.append(time.process_time() - began)
        return min(took)

    thread = asyncio.run(apart())
    text, medium, file = (
        base64.b64encode(os.urandom(loader.LARGE_INLINE * 3 // 4)),
        os.urandom(loader.LARGE),
        os.urandom(object_store.LARGE),
    )
    return [
        Figure("base64 of LARGE_INLINE", thread, least(lambda: base64.b64decode(text), rounds)),
        Figure("digest of a medium of loader.LARGE", thread, least(lambda: blake3(medium).digest(), rounds)),
        Figure("SHA-256 of object_store.LARGE", thread, least(lambda: hashlib.sha256(file).digest(), rounds)),
    ]


def burst(rounds: int) -> list[Figure]:
    """``turns.TURN_S``, ``turns.AT_ONCE``: the longest that another task waits while requests arrive together."""

    async def waited(count: int, part_s: float, budget: turns.TurnBudget | None) -> float:
        longest = 0.0

        async def part() -> None:
            if budget is not None:
                await budget.enter()
            until = time.thread_time() + part_s
            while time.thread_time() < until:
                pass

        async def watch() -> None:
            nonlocal longest
            while True:
                began = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(part() for _ in range(count)))
        watching.cancel()
        return longest

    def shortest(count: int, part_s: float, make: Callable[[], turns.TurnBudget | None]) -> float:
        return min(asyncio.run(waited(count, part_s, make())) for _ in range(max(1, rounds // 10)))

    long, short = (300, 0.0003), (2_000, 0.00001)
    return [
        Figure("300 parts of 0.3 ms: TURN_S", shortest(*long, turns.TurnBudget), shortest(*long, lambda: None)),
        Figure(
            "2,000 parts of 0.01 ms: AT_ONCE",
            shortest(*short, turns.TurnBudget),
            shortest(*short, lambda: turns.TurnBudget(at_once=1 << 30)),
        ),
    ]


class _Item:
    def __init__(self) -> None:
        self.refers = [self]  # a cycle


def garbage(rounds: int) -> list[Figure]:
    """``gc_policy.SERVING_OBJECTS`` and its like: time spent in collections, and the longest of them."""

    def run(thresholds: tuple[int, int, int]) -> tuple[float, float]:
        took: list[float] = []

        def note(phase: str, info: dict[str, int]) -> None:
            took.append(time.thread_time() * (1 if phase == "stop" else -1))

        before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*thresholds)
        gc.callbacks.append(note)
        try:
            streams: list[list[Any]] = [[] for _ in range(2_500)]  # open ones, with what they wait with
            for number in range(400_000):
                if number % 200 == 0:
                    _Item()
                stream = streams[number % 2_500]
                stream.append([number])
                del stream[:-20]
        finally:
            gc.callbacks.remove(note)
            gc.set_threshold(*before)
            gc.unfreeze()
        pauses = [end + begin for begin, end in zip(took[::2], took[1::2], strict=False)]
        return sum(pauses), max(pauses, default=0.0)

    serving = (gc_policy.SERVING_OBJECTS, gc_policy.SERVING_YOUNG, gc_policy.SERVING_MIDDLE)
    ours = [run(serving) for _ in range(max(1, rounds // 20))]
    theirs = [run((700, 10, 10)) for _ in ours]
    return [
        Figure("400,000 objects: all collections", min(ours)[0], min(theirs)[0]),
        Figure("400,000 objects: the longest", min(one for _, one in ours), min(one for _, one in theirs)),
    ]


def shards(rounds: int) -> list[Figure]:
    """``radix_tree._SLOTS``: the longest that one more block of an index takes."""
    draw, count = random.Random(2), 20_000 * rounds

    def longest(many: list[dict[int, int]]) -> float:
        last, worst = len(many) - 1, 0.0
        for _ in range(count):
            key = draw.getrandbits(60)
            began = time.thread_time()
            many[key & last][key] = 1
            worst = max(worst, time.thread_time() - began)
        return worst

    return [Figure(f"{count:,} blocks", longest([{} for _ in range(radix_tree.SLOT + 1)]), longest([{}]))]


def padding(rounds: int) -> list[Figure]:
    """``embedding_runner.NEAR_SHARE``: share of what batches compute that is padding."""

    def padded(near: float) -> float:
        before, embedding_runner.NEAR_SHARE = embedding_runner.NEAR_SHARE, near
        try:
            draw, real, computed = random.Random(3), 0, 0
            queue = embedding_runner.InputQueue[int](16_384)
            for request in range(4 * rounds):
                queue.add(request, [[0] * min(2_000, 5 + int(draw.expovariate(1 / 150))) for _ in range(8)])
            while batch := queue.take():
                lengths = [len(each.tokens) for each in batch]
                real, computed = real + sum(lengths), computed + max(lengths) * len(lengths)
        finally:
            embedding_runner.NEAR_SHARE = before
        return 1 - real / computed

    return [Figure("texts of 5 to 2,000 tokens", padded(embedding_runner.NEAR_SHARE), padded(1.0), "%")]


class _Launching:
    """An engine whose steps take a device 12 ms, and to launch the interpreter for 4."""

    kv_transfer, blocked = None, False

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.ended: dict[str, float] = {}  # when each step's result was there, by request
        self._device = self._running = 0.0  # when it is free; when the step in flight ends

    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> StepResult:
        began = time.perf_counter()
        while time.perf_counter() < began + 0.004:
            sum(range(50))
        launched, running = time.perf_counter(), self._running
        self._running = self._device = max(self._device, launched) + 0.012
        if not running:
            return StepResult([], [], [], [], 1)
        time.sleep(max(0.0, running - launched))
        self.left -= 1
        choice = SequenceState(None, str(self.left), 1, 0, "g", array("I"), False)
        self.ended[choice.request_id] = time.perf_counter()
        return StepResult([Output(choice, 5)], [], [], [], 1, ahead_s=max(0.0, running - launched))

    def close(self) -> None: ...


_TIMES = """
import sys, time
while data := sys.stdin.buffer.read1():
    now = time.perf_counter()
    for request in data.split():
        print(now, request.decode())
"""  # when the output of each step arrives at another process


def writes(rounds: int) -> list[Figure]:
    """``loop.WRITE_S``: from a step's result to another process, while the next step is launched."""

    async def run(engine: _Launching) -> float:
        events, queue = asyncio.get_running_loop(), asyncio.Queue[Flush]()
        loop = EngineLoop()
        thread = EngineThread(lambda: cast("Engine", engine), loop, lambda error: None)
        arrived = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", _TIMES, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert arrived.stdin is not None
        thread.start()
        loop.begin_session(lambda flush: cast("None", events.call_soon_threadsafe(queue.put_nowait, flush)))
        while engine.left or not queue.empty():
            for item in (await queue.get()).items["g"]:
                arrived.stdin.write(item.request.encode() + b" ")
            events.call_soon(loop.flush_consumed)
        loop.stop()
        await asyncio.to_thread(thread.join, 5)
        lines = (await arrived.communicate(b""))[0].decode().splitlines()
        took = sorted(float(at) - engine.ended[request] for at, request in map(str.split, lines))
        return took[len(took) // 4]

    real, interval = engine_loop.WRITE_S, sys.getswitchinterval()
    sys.setswitchinterval(0.0001)  # as in ``run_worker``
    times = []
    try:
        for engine_loop.WRITE_S in (real, 0.0):
            times.append(uvloop.run(run(_Launching(max(10, rounds)))))
    finally:
        engine_loop.WRITE_S = real
        sys.setswitchinterval(interval)
    return [Figure("WRITE_S: a flush of a step of 12 ms, first quartile", times[0], times[1])]


MEASURES: dict[str, Callable[[int], list[Figure]]] = {
    each.__name__: each for each in (words, threads, burst, garbage, shards, padding, writes)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measures", nargs="*", metavar="measure", help=f"{', '.join(MEASURES)}; all, if none is named")
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    if unknown := set(asked.measures) - MEASURES.keys():
        parser.error(f"no measure {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    table = Table("constant", "with it", "without", "")
    for name in asked.measures or MEASURES:
        for figure in MEASURES[name](asked.rounds):
            scale = 100 if figure.unit == "%" else 1e6
            table.add_row(figure.what, f"{scale * figure.with_it:,.1f}", f"{scale * figure.without:,.1f}", figure.unit)
    stdout().print(table)


if __name__ == "__main__":
    main()
