"""Prefill and decode workers on one host beside as many aggregated ones, and workers that move between the roles.

python -m tests.gpu.fleet --folder /dev/shm/models/random-8b [--prefill 2] [--decode 6] [--streams 64] [--rate 16]

The folder is written by `python -m tests.gpu.pipeline --write`; each worker has a GPU of its own. Both deployments, one
after the other, serve connections whose answers run, beside long prompts that arrive at a rate. In the last part two
decode workers become prefill workers under that load, and decode workers again: by the connector of `penstock plan`, or
with ``--profile`` (a folder of `penstock profile endpoint`) by the planner itself, while the rate of prompts trebles
and falls again. Every request must end well.

python -m tests.gpu.fleet rank --width 4: of two workers over so many GPUs each, a rank is killed in mid-answer.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from penstock.infra.bus.connection import connect
from penstock.infra.bus.worker_leases import registrations
from penstock.launch.state import DeploymentState, read_state
from penstock.planner.connectors import LocalWorkers
from penstock.schemas.plans import Role
from tests.gpu import disaggregated
from tests.gpu.arrivals import arrive
from tests.gpu.disaggregated import load, logs, mixed, moved, row, steady, stop, up
from tests.gpu.pipeline import penstock, words_for
from tests.perf.cpu import children

MOVED = 2
BACK_S = 90.0  # for workers to come and go


def by_role(state: DeploymentState) -> Counter[str]:
    return Counter(
        each.name.rpartition("-")[0] for each in state.processes if each.role == "worker" and not each.drained
    )


async def registered(path: Path, counts: dict[Role, int]) -> None:
    bus = await connect(read_state(path).nats_url, role="client", name="fleet")
    try:
        until = time.monotonic() + BACK_S
        while True:
            there = Counter(each.role for each in await registrations(bus) if not each.leaves)
            if all(there[role] == count for role, count in counts.items()):
                return
            if time.monotonic() > until:
                raise SystemExit(f"not within {BACK_S:g} s: {counts}, but {dict(there)}")
            await asyncio.sleep(0.1)
    finally:
        await bus.close()


async def by_connector(asked: argparse.Namespace, path: Path, began: float) -> None:
    """Two decode workers become prefill workers, and decode workers again."""
    state = read_state(path)
    bus = await connect(state.nats_url, role="planner", name="fleet")
    connector = LocalWorkers(bus, path.parent, state.model)
    try:
        for more in (MOVED, 0):
            await asyncio.sleep(asked.seconds / 4)
            counts: dict[Role, int] = {"prefill": asked.prefill + more, "decode": asked.decode - more}
            since = time.perf_counter()
            await connector.apply(counts)
            applied = time.perf_counter()
            await registered(path, counts)
            now = time.perf_counter()
            print(f"{since - began:.1f} s: {counts['prefill']} prefill and {counts['decode']} decode workers asked "
                  f"for; the others had ended after {applied - since:.1f} s, all served after {now - since:.1f} s",
                  flush=True)  # fmt: skip
    finally:
        await bus.close()


async def arrivals(asked: argparse.Namespace, state: DeploymentState, seconds: float, times: float, seed: int) -> None:
    found = await arrive(state.http_url, state.model, asked.rate * times, seconds, asked.prompt - 96, seed)
    print(f"{asked.rate * times:g} prompts/s for {seconds:.0f} s: {found['requests_per_s']:.1f} ended, TTFT p50 "
          f"{found['ttft_p50_ms']:.0f} ms, p99 {found['ttft_p99_ms']:.0f} ms, {found['failed']} failed",
          flush=True)  # fmt: skip


def planner(asked: argparse.Namespace, data: Path, out: Path) -> subprocess.Popen[bytes]:
    command = penstock("plan", "--data-dir", data / "penstock", "--connector", "local", "--profile", asked.profile,
                       "--interval-s", 5, "--start-s", 10, "--down-after-s", 10, "--down-cooldown-s", 5,
                       "--gpu-budget", asked.prefill + asked.decode, "--json")  # fmt: skip
    with out.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


async def by_planner(asked: argparse.Namespace, state: DeploymentState, data: Path) -> None:
    """The same by `penstock plan`, as the rate of long prompts changes."""
    out = data / "plan.log"
    planning = planner(asked, data, out)
    try:
        for number, times in enumerate((1, 3, 1)):
            await arrivals(asked, state, asked.seconds / 3, times, 900 + number)
            print(f"now {dict(by_role(read_state(data / 'penstock' / 'state.json')))}", flush=True)
    finally:
        stop(planning)
    decisions = [json.loads(line)["decision"] for line in out.read_text().splitlines() if line.startswith('{"planner"')]
    print(f"{len(decisions)} decisions, {sum(bool(each.get('changes')) for each in decisions)} with changes")


async def moving(asked: argparse.Namespace, state: DeploymentState, data: Path) -> None:
    if asked.profile:
        await by_planner(asked, state, data)
        return
    await asyncio.gather(
        arrivals(asked, state, asked.seconds, 1, 901),
        by_connector(asked, data / "penstock" / "state.json", time.perf_counter()),
    )


def moves(asked: argparse.Namespace) -> None:
    """Long prompts and answers while workers change roles."""
    data, began_ns = Path(tempfile.mkdtemp(prefix="fleet-")), time.time_ns()
    process, state = up(asked, "fleet", data)
    try:
        words = words_for(asked.folder, asked.short)
        answers, out = load(state, data, asked.streams, words, asked.answer, asked.seconds, 7)
        asyncio.run(moving(asked, state, data))
        answers.wait(timeout=asked.seconds + BACK_S)
        (found,) = json.loads(out.read_text())["stages"]
        steady(found, asked.streams, asked.answer)
        print(f"answers meanwhile: {found['steady_tokens_per_s']:,.0f} tokens/s, ITL p99 {found['itl_p99_ms']:.1f} ms, "
              f"{found['failed']} failed; transfers {moved(state, began_ns)}", flush=True)  # fmt: skip
    finally:
        stop(process)
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


async def answer(state: DeploymentState, number: int, tokens: int, began: asyncio.Event) -> tuple[int, float]:
    """How many tokens came, and the longest pause between two parts in seconds."""
    body = {"model": state.model, "prompt": [16 + (number * 97 + n * 31) % 3900 for n in range(200)], "stream": True,
            "max_tokens": tokens, "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    count, longest, last = 0, 0.0, time.perf_counter()
    async with (
        httpx.AsyncClient(base_url=state.http_url, timeout=BACK_S, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                began.set()
                count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", count)
    return count, longest


async def killed_rank(asked: argparse.Namespace, state: DeploymentState) -> None:
    began = asyncio.Event()
    running = [asyncio.create_task(answer(state, n, asked.answer, began)) for n in range(asked.streams)]
    await asyncio.wait_for(began.wait(), BACK_S)
    await asyncio.sleep(0.2)
    worker = next(each.pid for each in state.processes if each.name == "worker-0")
    assert worker is not None
    ranks = children(worker)
    os.kill(ranks[-1], signal.SIGKILL)
    since = time.perf_counter()
    found = await asyncio.gather(*running, return_exceptions=True)
    whole = [each for each in found if isinstance(each, tuple) and each[0] == asked.answer]
    longest = max((each[1] for each in whole), default=0.0)
    print(f"a rank of {len(ranks) + 1} was killed: {len(whole)} of {len(found)} answers whole, all after "
          f"{time.perf_counter() - since:.1f} s, longest pause {longest:.2f} s"
          + "".join(f"; {each!r}"[:200] for each in found if each not in whole), flush=True)  # fmt: skip


def rank(asked: argparse.Namespace) -> None:
    data = Path(tempfile.mkdtemp(prefix="fleet-"))
    process, state = up(asked, "wide", data)
    try:
        asyncio.run(killed_rank(asked, state))
        since = time.perf_counter()
        asyncio.run(registered(data / "penstock" / "state.json", {"aggregated": 2}))
        print(f"both workers serve again {time.perf_counter() - since:.1f} s later", flush=True)
    finally:
        stop(process)
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


def beside(asked: argparse.Namespace, layout: str) -> None:
    data, began_ns = Path(tempfile.mkdtemp(prefix="fleet-")), time.time_ns()
    process, state = up(asked, layout, data)
    try:
        for rate in (0.0, asked.rate):
            row(layout, asked.streams, rate, mixed(asked, state, data, asked.streams, rate))
        print(f"{layout}: all transfers", moved(state, began_ns), flush=True)
    finally:
        stop(process)
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["aggregated", "apart", "moves"])
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--engine", default="native", help="mock: to try this script")
    parser.add_argument("--prefill", type=int, default=2, help="workers")
    parser.add_argument("--decode", type=int, default=6, help="workers")
    parser.add_argument("--streams", type=int, default=64, help="connections whose answers run")
    parser.add_argument("--rate", type=float, default=16.0, help="long prompts per second")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short one")
    parser.add_argument("--answer", type=int, default=256, help="tokens of the answers that run")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--width", type=int, default=2, help="GPUs of a worker, in rank")
    parser.add_argument("--profile", type=Path, help="of one worker: the planner moves workers")
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    roles = ("--prefill", asked.prefill, "--decode", asked.decode, "--local-prefill-tokens", 0)
    disaggregated.LAYOUTS |= {"aggregated": ("--workers", asked.prefill + asked.decode), "apart": roles, "fleet": roles,
                              "wide": ("--workers", 2, "--tensor-parallel-size", asked.width)}  # fmt: skip
    print("| layout | load | answers: tokens/s (ended) | TTFT p50 | ITL p50 | p99 (ms) | failed | long prompts/s | "
          "TTFT p50 | p99 | first to second token p50, p99 | failed |")  # fmt: skip
    for part in asked.parts:
        if part in ("moves", "rank"):
            {"moves": moves, "rank": rank}[part](asked)
        else:
            beside(asked, part)


if __name__ == "__main__":
    main()
