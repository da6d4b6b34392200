"""What other clients notice while some delete stored responses as fast as they can.

Run by hand: ``python -m tests.chaos.deletions --seconds 5 --pairs 20``. Short stretches with and without deletions take
turns, since the machine may do something else, too.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.chaos.reattach import cpu_s
from tests.pipeline.support import Deployment

PATH = "/v1/responses"
PROMPT_WORDS = 2_000  # a block of the streams' files, which a deletion rewrites, holds a few hundred of these
STORING = 16
DELETING = 8


def body(seed: int, words: int, tokens: int) -> dict[str, Any]:
    text = " ".join(f"{seed}w{number * 31 % 4000}" for number in range(words))
    return {"model": "tiny", "input": text, "max_output_tokens": tokens}


class Measurement:
    """``rate``: requests of others a second."""

    def __init__(self, http: httpx.AsyncClient, rate: float, seconds: float) -> None:
        self._http, self._rate, self._seconds = http, rate, seconds
        self._stored: list[str] = []
        self.deleted = self.refused = 0

    async def store(self, count: int) -> None:
        """What will be deleted."""
        left = iter(range(count))

        async def store_on() -> None:
            for seed in left:
                answer = await self._http.post(PATH, json=body(seed, PROMPT_WORDS, 4))
                answer.raise_for_status()
                self._stored.append(answer.json()["id"])

        await asyncio.gather(*(store_on() for _ in range(STORING)))

    async def stretch(self, *, deletions: bool) -> list[float]:
        """Seconds that each request of the others took, from the moment when it was due."""
        tasks = [asyncio.create_task(self._delete_on()) for _ in range(DELETING if deletions else 0)]
        began, took = time.monotonic(), list[float]()

        async def ask(number: int) -> None:
            due = began + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            asked = {"model": "tiny", "prompt": f"{number} short", "max_tokens": 16}
            (await self._http.post("/v1/completions", json=asked)).raise_for_status()
            took.append(time.monotonic() - due)

        await asyncio.gather(*(ask(number) for number in range(int(self._rate * self._seconds))))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return took

    async def _delete_on(self) -> None:
        while self._stored:
            name = self._stored.pop()
            answer = await self._http.delete(f"{PATH}/{name}")
            if answer.status_code == 200:
                self.deleted += 1
            else:
                self.refused += 1


async def measure(deployment: Deployment, seconds: float, pairs: int, rate: float, stored: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60, limits=limits) as http:
        measurement = Measurement(http, rate, seconds)
        await measurement.store(stored)
        await measurement.stretch(deletions=False)  # warm
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        used: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for _ in range(pairs):
            for deletions in random.sample((False, True), 2):
                before = {process: cpu_s(process.pid) for process in deployment.state.processes}
                found[deletions].append(await measurement.stretch(deletions=deletions))
                for process, was in before.items():
                    used[deletions][process.role] += (cpu_s(process.pid) - was) * 1e3
    for deletions, stretches in found.items():
        p50, p99 = (statistics.median(_percentile(each, share) for each in stretches) for share in (0.5, 0.99))
        print(f"{'with' if deletions else 'without'} deletions: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")
    for share in (0.5, 0.99):
        pairs_of = zip(found[False], found[True], strict=True)
        more = [_percentile(beside, share) / _percentile(alone, share) - 1 for alone, beside in pairs_of]
        low, middle, high = statistics.quantiles(more, n=4)
        print(f"p{share * 100:.0f} of a pair: {middle:+.0%} with deletions (quartiles {low:+.0%} and {high:+.0%})")
    deleted = max(1, measurement.deleted)
    more_cpu = ", ".join(f"{role} {(used[True][role] - used[False][role]) / deleted:.0f}" for role in used[True])
    print(f"CPU-ms of a deletion: {more_cpu}")
    print(f"{measurement.deleted / (pairs * seconds):.1f} responses deleted a second, {measurement.refused} refused")


def _percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=20.0, help="requests of others a second")
    parser.add_argument("--stored", type=int, default=800, help="responses that can be deleted")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        flags = ("--mock-speedup", "1", "--workers", "2", "--gateways", "1", "--routers", "2", "--max-running", "64")
        deployment = Deployment(Path(home), *flags)
        try:
            uvloop.run(measure(deployment, asked.seconds, asked.pairs, asked.rate, asked.stored))
        finally:
            deployment.stop()


if __name__ == "__main__":
    main()
