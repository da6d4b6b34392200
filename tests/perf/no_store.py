"""What ``no_store`` costs: the same load with it and without it, in turns, on one deployment.

python -m tests.perf.no_store                                        # six pairs of 25 s: seven minutes
taskset -c 8-15 python -m tests.perf.no_store --cores 8,9            # the deployment has two cores of its own

The load is at ``LOAD`` of the highest rate that the deployment holds: chats of several lengths, half of them streamed,
at random times that are the same in both halves of a pair. Beside it are others' chats, which are ordinary in both. CPU
is that of all processes of the deployment. What the broker writes is counted by the kernel, if its store is on a disk.

Interrupted, or ended by SIGTERM, it compares the pairs that it has.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cli.figures import quantile
from penstock.launch.state import DeploymentState, read_state
from penstock.measure.load_generator import (
    WORDS,
    ClosedLoop,
    ConnectionPool,
    Exchange,
    HttpTarget,
    loop_factory,
    parse_target,
    send_in_time,
)
from tests.perf.cpu import cpu_of
from tests.perf.registrations import running

CPU = 0.05  # more of it that a request may cost
FIRST_MS = 1.0  # later that the first token may come, by the median
OTHERS = 0.1  # by which the p99 of others may be higher
LOAD = 0.8
LOADERS = 2  # processes
OTHERS_SHARE = 0.1  # of all requests
CONNECTIONS = 32  # of each process, for the highest rate
GRACE_S = 4.0  # so what is deleted belongs to the half of the pair in which it was asked
WARM_UP_S = GRACE_S + 3.0
BEGIN_S = 1.0  # for the processes to be told
DRAIN_S = 10.0
FLAGS = ("--engine=mock", "--mock-speedup=0", "--gateways=1", "--routers=1", "--workers=1")


class Chat(NamedTuple):
    words: int
    tokens: int
    stream: bool


MIX = tuple(Chat(words, tokens, stream) for words, tokens in ((20, 64), (200, 64), (200, 16), (600, 128))
            for stream in (True, False))  # fmt: skip


class Half(NamedTuple):
    """What was measured with one of the two.

    Attributes:
        cpu_us: per request, by process.
        written: bytes per request that the broker had the kernel write to a disk.
        passed: bytes per request of all its write calls, those to connections included.
    """

    requests: int
    failed: int
    cpu_us: Mapping[str, float]
    first_p50_ms: float
    others_p99_ms: float
    written: float
    passed: float

    @property
    def cpu(self) -> float:
        return sum(self.cpu_us.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {cpu:.0f}" for name, cpu in self.cpu_us.items())
        return (
            f"{self.requests} requests ({self.failed} failed), {self.cpu:.0f} us of CPU each ({parts}), TTFT p50 "
            f"{self.first_p50_ms:.2f} ms, others' p99 {self.others_p99_ms:.1f} ms, broker writes {self.written:.0f} "
            f"bytes a request to disk, {self.passed:.0f} in all"
        )


Pair = tuple[Half, Half]  # ordinary, with no_store


class Verdict(NamedTuple):
    text: str
    kept: bool


def compare(pairs: Sequence[Pair]) -> list[Verdict]:
    """The medians of all pairs against what ``no_store`` may cost."""

    def median(of: Callable[[Half, Half], float]) -> float:
        return statistics.median(of(*pair) for pair in pairs)

    cpu = median(lambda plain, private: private.cpu / plain.cpu - 1)
    first = median(lambda plain, private: private.first_p50_ms - plain.first_p50_ms)
    others = median(lambda plain, private: private.others_p99_ms / plain.others_p99_ms - 1)
    failed = sum(half.failed for pair in pairs for half in pair)
    verdicts = [
        Verdict(f"CPU per request {cpu:+.1%} (at most {CPU:+.0%})", cpu <= CPU),
        Verdict(f"TTFT p50 {first:+.2f} ms (at most {FIRST_MS:+.0f} ms)", first <= FIRST_MS),
        Verdict(f"others' p99 {others:+.1%} (at most {OTHERS:+.0%})", others <= OTHERS),
        Verdict(f"{failed} requests failed (none may)", not failed),
    ]
    if all(half.written for pair in pairs for half in pair):
        written = median(lambda plain, private: private.written / plain.written - 1)
        verdicts.append(Verdict(f"broker's bytes to disk per request {written:+.1%} (at most +0%)", written <= 0))
    else:  # the store is on no disk, or the kernel does not count
        passed = median(lambda plain, private: private.passed / plain.passed - 1)
        text = f"broker's bytes of all write calls per request {passed:+.1%} (at most +0%; none to disk was counted)"
        verdicts.append(Verdict(text, passed <= 0))
    return verdicts


# -- the load, in processes of its own ------------------------------------------------------------------------------


class Task(NamedTuple):
    """
    Attributes:
        rate: requests per second; 0: as fast as ``CONNECTIONS`` of them at once are answered.
        began: of ``time.perf_counter``, which all processes share.
    """

    url: str
    model: str
    no_store: bool
    rate: float
    seed: str
    began: float
    seconds: float


class Seen(NamedTuple):
    """Answers that came within the measured time, in seconds from when each was due."""

    total_s: list[float]
    first_s: list[float]  # of those that are streamed
    errors: Counter[str]


def requests(task: Task, target: HttpTarget) -> Iterator[tuple[Chat, bytes]]:
    """Without end; equal seeds give equal prompts."""
    rng = random.Random(task.seed)
    shared = " ".join(rng.choices(WORDS, k=max(chat.words for chat in MIX)))
    head = target.head("/v1/chat/completions")
    while True:
        chat = rng.choice(MIX)
        own = " ".join(rng.choices(WORDS, k=chat.words - chat.words // 2))
        prompt = f"{shared[: len(own)]} {own}"
        body: dict[str, Any] = {
            "model": task.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": chat.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": chat.stream,
        }
        text = json.dumps(body | ({"no_store": True} if task.no_store else {}))
        yield chat, f"{head}{len(text)}\r\n\r\n{text}".encode()


def load(task: Task) -> Seen:
    """What one process of the load runs."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_load(task))


async def _load(task: Task) -> Seen:
    target, seen = parse_target(task.url), Seen([], [], Counter())
    begin = task.began + WARM_UP_S
    end = begin + task.seconds

    def answered(exchange: Exchange, chat: Chat) -> None:
        asked = exchange.due or exchange.sent
        if exchange.error:
            seen.errors[exchange.error[:200]] += 1
        elif begin <= exchange.ended < end:
            seen.total_s.append(exchange.ended - asked)
            if chat.stream:
                seen.first_s.append(exchange.first - asked)

    exchanges = (Exchange(raw, partial(answered, chat=chat)) for chat, raw in requests(task, target))

    def due() -> Iterator[tuple[float, Exchange]]:
        rng, at = random.Random(f"due {task.seed}"), 0.0
        while (at := at + rng.expovariate(task.rate)) < WARM_UP_S + task.seconds:
            yield at, next(exchanges)

    async with ConnectionPool(target, timeout_s=60) as pool:
        await asyncio.sleep(task.began - time.perf_counter())
        if task.rate:
            await send_in_time(pool, due(), task.began)
        else:
            loop = ClosedLoop(pool, CONNECTIONS, lambda: next(exchanges) if time.perf_counter() < end else None)
            await loop.ended(end - time.perf_counter() + DRAIN_S)
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
    return seen


# -- the measurement ------------------------------------------------------------------------------------------------


class Measurement:
    def __init__(self, state: DeploymentState, pool: ProcessPoolExecutor) -> None:
        self._state, self._pool = state, pool
        self._pids = {process.name: process.pid for process in state.processes if process.pid}
        (self._broker,) = (each.pid for each in state.processes if each.role == "nats" and each.pid)

    def highest_rate(self, seconds: float) -> float:
        """Requests per second, of ordinary requests."""
        (seen, _) = self._run(seconds, [Task(*self._asked(False), 0.0, f"{n}", 0.0, seconds) for n in range(LOADERS)])
        return sum(len(each.total_s) for each in seen) / seconds

    def half(self, no_store: bool, rate: float, seed: int, seconds: float) -> Half:
        each = rate * (1 - OTHERS_SHARE) / LOADERS
        tasks = [Task(*self._asked(no_store), each, f"{seed}-{n}", 0.0, seconds) for n in range(LOADERS)]
        tasks.append(Task(*self._asked(False), rate * OTHERS_SHARE, f"{seed}-others", 0.0, seconds))
        seen, spent = self._run(seconds, tasks)
        *own, others = seen
        count = max(1, sum(len(one.total_s) for one in seen))
        errors = sum((one.errors for one in seen), Counter[str]())
        for error, times in errors.most_common(3):
            print(f"  {times} x {error}", flush=True)
        return Half(
            count,
            errors.total(),
            {name: cpu / count * 1e6 for name, cpu in spent.cpu_s.items()},
            quantile(sorted(one for each_ in own for one in each_.first_s), 0.5, 0.0) * 1e3,
            quantile(sorted(others.total_s), 0.99, 0.0) * 1e3,
            spent.written / count,
            spent.passed / count,
        )

    def _asked(self, no_store: bool) -> tuple[str, str, bool]:
        return self._state.http_url, self._state.model, no_store

    def _run(self, seconds: float, tasks: Sequence[Task]) -> tuple[list[Seen], "Spent"]:
        began = time.perf_counter() + BEGIN_S
        running_ = [self._pool.submit(load, task._replace(began=began)) for task in tasks]
        time.sleep(began + WARM_UP_S - time.perf_counter())
        before = self._spent()
        time.sleep(began + WARM_UP_S + seconds - time.perf_counter())
        after = self._spent()
        seen = [each.result(DRAIN_S * 2) for each in running_]
        return seen, Spent(
            {name: after.cpu_s[name] - cpu for name, cpu in before.cpu_s.items()},
            after.written - before.written,
            after.passed - before.passed,
        )

    def _spent(self) -> "Spent":
        cpu = cpu_of(self._pids.values())
        try:
            lines = Path(f"/proc/{self._broker}/io").read_text().splitlines()
        except OSError:
            lines = []
        counted = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
        by_name = {name: cpu[pid] for name, pid in self._pids.items()}
        return Spent(by_name, counted.get("write_bytes", 0), counted.get("wchar", 0))


class Spent(NamedTuple):
    """So far, or in a time: CPU seconds by process, and bytes that the broker wrote to disk, and in all."""

    cpu_s: Mapping[str, float]
    written: int
    passed: int


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    until, pairs = time.monotonic() + args.limit_s, list[Pair]()
    mine, cores = os.sched_getaffinity(0), {int(core) for core in args.cores.split(",") if core}
    if not cores <= mine:
        print(f"tests.perf.no_store: --cores {args.cores}: it may run on {sorted(mine)} only", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="no-store-", dir=args.folder or None) as folder:
        if cores:
            os.sched_setaffinity(0, cores)  # inherited by the deployment
        with running(Path(folder), *FLAGS, f"--no-store-grace-s={GRACE_S:g}"):
            os.sched_setaffinity(0, (mine - cores) or mine)
            state = read_state(Path(folder) / "data" / "state.json")
            with ProcessPoolExecutor(LOADERS + 1, get_context("spawn")) as pool:
                try:
                    _measure(Measurement(state, pool), args, until, pairs)
                except KeyboardInterrupt:
                    print("interrupted: this is what was measured until then", flush=True)
    if not pairs:
        print("no pair was measured")
        return 1
    print(f"\nmedians of {len(pairs)} pairs, with no_store against without:")
    verdicts = compare(pairs)
    for verdict in verdicts:
        print(f"{'kept' if verdict.kept else 'BROKEN':<8}{verdict.text}")
    return 0 if all(verdict.kept for verdict in verdicts) else 1


def _measure(measurement: Measurement, args: argparse.Namespace, until: float, pairs: list[Pair]) -> None:
    rate = args.rate
    if not rate:
        highest = measurement.highest_rate(args.duration_s / 2)
        rate = LOAD * highest
        print(f"highest rate {highest:.0f} requests/s; load {rate:.0f}", flush=True)
    for number in range(args.pairs):
        if time.monotonic() + 2 * (BEGIN_S + WARM_UP_S + args.duration_s + 1) > until:
            print(f"time was up after {number} of {args.pairs} pairs", flush=True)
            return
        halves = {}
        for no_store in (False, True) if number % 2 == 0 else (True, False):
            halves[no_store] = measurement.half(no_store, rate, number, args.duration_s)
            print(f"{number + 1} {'no_store' if no_store else 'ordinary'}: {halves[no_store]}", flush=True)
        pairs.append((halves[False], halves[True]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.no_store", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--duration-s", type=float, default=25.0, help="that is measured, of each half of a pair")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no pair begins that would end later")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: found out first")
    parser.add_argument("--cores", default="", help="of the deployment, as 8,9; the load gets the others")
    parser.add_argument("--folder", default="", help="where the store is: on a disk")
    return parser


if __name__ == "__main__":
    sys.exit(main())
