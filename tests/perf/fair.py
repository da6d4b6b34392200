"""What a tenant that keeps 400 requests open costs another: its TTFT beside that, and beside as many of 20 tenants.

python -m tests.perf.fair              # two pairs of 20 s on four mock workers with a GPU's step times: two minutes

Both loads have the same requests at the same number at a time; prompts share nothing. The other tenant asks one at a
time. Its median TTFT beside the one tenant may be ``BAR`` higher than beside the many.
"""

import argparse
import asyncio
import contextlib
import io
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from penstock.cli.commands import main as penstock
from penstock.cli.figures import quantile
from tests.pipeline.support import MODEL, MODEL_NAME, Deployment

BAR = 0.2
OPEN = 400
MANY = 20
PROMPT, OUTPUT = 6000, 8  # tokens: the workers are the bottleneck, not the cores
WARM_UP_S = 5.0
FLAGS = ("--workers=4", "--mock-speedup=1", f"--model={MODEL}", "--require-keys")


def body(rng: random.Random, *, stream: bool) -> bytes:
    prompt = [rng.randrange(10, 200) for _ in range(PROMPT)]
    return json.dumps({"model": MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True,
                       "stream": stream}).encode()  # fmt: skip


async def keep_open(http: httpx.AsyncClient, key: str, rng: random.Random, counts: list[int]) -> None:
    """One of the requests that are open all the time."""
    while True:
        answer = await http.post(
            "/v1/completions", content=body(rng, stream=False), headers={"authorization": f"Bearer {key}"}
        )
        counts[answer.status_code != 200] += 1


async def first_tokens(http: httpx.AsyncClient, key: str, rng: random.Random, seconds: float) -> list[float]:
    """TTFT of one request after another, in ms."""
    found, until = list[float](), time.monotonic() + seconds
    headers = {"authorization": f"Bearer {key}"}
    while time.monotonic() < until:
        began, first = time.monotonic(), 0.0
        async with http.stream("POST", "/v1/completions", content=body(rng, stream=True), headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not first and line.startswith("data: {"):
                    first = time.monotonic()
        found.append(1000 * (first - began))
    return found


async def beside(url: str, keys: list[str], other: str, seed: int, seconds: float) -> list[float]:
    """The other tenant's TTFT while ``OPEN`` requests of these keys are open."""
    limits, counts = httpx.Limits(max_connections=OPEN + 8), [0, 0]
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as http:
        load = [
            asyncio.create_task(keep_open(http, keys[n % len(keys)], random.Random(f"{seed} {n}"), counts))
            for n in range(OPEN)
        ]
        try:
            await asyncio.sleep(WARM_UP_S)
            before = counts[0]
            found = await first_tokens(http, other, random.Random(seed), seconds)
            print(f"  {len(keys):>2} tenants: {(counts[0] - before) / seconds:.1f} requests/s, {counts[1]} failed; the "
                  f"other's TTFT p50 {statistics.median(found):.0f} ms, p90 {quantile(sorted(found), 0.9, 0.0):.0f} ms "
                  f"({len(found)} requests)", flush=True)  # fmt: skip
            return found
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)


def key_of(data_dir: Path, tenant: str) -> str:
    """A key of a new tenant."""
    assert penstock(["tenants", "add", tenant, "--data-dir", str(data_dir)]) == 0
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert penstock(["keys", "create", "--quiet", "--tenant", tenant, "--data-dir", str(data_dir)]) == 0
    return said.getvalue().strip()


def rise(beside_many: list[float], beside_one: list[float]) -> float:
    """By how much the median is higher beside one tenant; 0.1 is 10 %."""
    return statistics.median(beside_one) / statistics.median(beside_many) - 1


def run(pairs: int, seconds: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), *FLAGS)
        try:
            data_dir, url = deployment.data_dir, deployment.urls[0]
            with contextlib.redirect_stdout(sys.stderr):
                many = [key_of(data_dir, f"many-{number}") for number in range(MANY)]
                one, other = key_of(data_dir, "one"), key_of(data_dir, "other")
            found: dict[int, list[float]] = {1: [], MANY: []}
            for pair in range(pairs):
                for keys in (many, [one]) if pair % 2 else ([one], many):
                    found[len(keys)] += asyncio.run(beside(url, keys, other, pair, seconds))
        finally:
            deployment.stop()
    more = rise(found[MANY], found[1])
    print(f"TTFT p50 beside one tenant: {more:+.0%} (bar: {BAR:+.0%})")
    return int(more > BAR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each half of a pair, after its warm-up")
    args = parser.parse_args()
    return run(args.pairs, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
