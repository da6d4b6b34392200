"""Prefill and decode apart, through the whole pipeline on two GPUs: what a handoff costs, and what it gains.

python -m tests.gpu.disaggregated --folder /dev/shm/random-8b [--engine vllm] [--rates 0,4] [--sweep 8,32,128]

The folder is written by `python -m tests.gpu.pipeline --write`. Deployments run one after the other on the same two
GPUs: two aggregated workers ("chunked": in steps of 1,024 tokens), and a prefill with a decode worker ("apart": which
computes prompts only while the prefill worker is behind; "never": none at all). Each answers single prompts of 4,096
tokens first (from first to second token: the handoff), then a mixed load: connections whose answers run, beside long
prompts that arrive at a given rate, which both must serve. A sweep gives throughput against speed of an answer: prompts
of 1,024, answers of 256 tokens.

Long prompts are traced: of each handoff, the log has the times of ``timeline``. `--engine mock` tries all on a CPU.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import read
from penstock.launch.state import DeploymentState, read_state
from penstock.schemas import done, jobs, requests, transfer
from tests.gpu.arrivals import IDS, arrive, first_tokens
from tests.gpu.pipeline import LONGEST, START_S, VLLM, ints, penstock, prompt_tokens, words_for

SPLIT = ("--prefill", 1, "--decode", 1)
LAYOUTS: dict[str, tuple[object, ...]] = {
    "aggregated": ("--workers", 2),
    "chunked": ("--workers", 2),
    "split": (*SPLIT, "--local-prefill-tokens", 256),
    "apart": (*SPLIT, "--local-prefill-tokens", 0),
    "never": (*SPLIT, "--local-prefill-tokens", 0, "--prefill-queue-tokens", 0),
}
CHUNK = 1024  # tokens per step of "chunked"
WARM_S = 3.0
SWEPT = (1024, 256)  # tokens of a prompt, of an answer


def up(asked: argparse.Namespace, layout: str, data: Path) -> tuple[subprocess.Popen[bytes], DeploymentState]:
    """Start a deployment; it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine: list[object] = ["--engine", asked.engine]
    if asked.engine == "vllm":
        chunk = {"max_num_batched_tokens": CHUNK} if layout == "chunked" else {}
        engine += ["--override-engine-args", json.dumps(VLLM | chunk | json.loads(asked.engine_args))]
    environ = os.environ | ({"PENSTOCK_MAX_BATCHED_TOKENS": str(CHUNK)} if layout == "chunked" else {})
    log = data / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            penstock("up", *engine, "--model", asked.folder, "--data-dir", data / "penstock", "--http-port", port,
                     *LAYOUTS[layout], "--max-model-len", LONGEST + 256, "--ready-s", START_S - 10,
                     "--log-format", "json", "--drain-s", 3),
            stdout=out, stderr=subprocess.STDOUT, env=environ,
        )  # fmt: skip
    ready(process, log, layout)
    return process, read_state(data / "penstock" / "state.json")


def ready(process: subprocess.Popen[bytes], log: Path, name: str) -> None:
    """Wait until a deployment says that it is."""
    began = time.perf_counter()
    while b'"ready"' not in log.read_bytes():
        if process.poll() is not None or time.perf_counter() - began > START_S:
            process.kill()
            raise SystemExit(f"penstock up did not get ready:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()


async def reads(state: DeploymentState, since_ns: int) -> list[transfer.Handoff]:
    """The ledger's lines of transfers that ended, well or not."""
    bus = await connect(state.nats_url, role="client", name="bench")
    try:
        stream, subject = bus.subjects.stream("HANDOFF"), bus.subjects.all("handoff")
        return [
            line
            async for entry in read(bus, stream, subject, since_ns=since_ns)
            for line in transfer.decode_ledger(entry.data).events
            if line.state in ("read", "failed")
        ]
    finally:
        await bus.close()


def moved(state: DeploymentState, since_ns: int) -> dict[str, float]:
    """Medians of the transfers since then."""
    lines = asyncio.run(reads(state, since_ns))
    good = [line for line in lines if line.state == "read" and line.bytes]  # vLLM does not tell the bytes
    speeds = [line.bytes / line.seconds / 1e9 for line in good]
    return {
        "reads": len(good),
        "failures": sum(line.state == "failed" for line in lines),
        "read_ms": statistics.median(line.seconds for line in good) * 1e3 if good else 0.0,
        "gb_per_s": statistics.median(speeds) if good else 0.0,
        "gb_per_s_best": max(speeds, default=0.0),
        "gb_per_s_least": min(speeds, default=0.0),
    }


# What follows the prefill worker's first token (published), up to that of the decode worker.
PARTS = ("offered", "stored", "received", "transfer begun", "KV there", "step begun", "next token")


async def timelines(state: DeploymentState, since_ns: int) -> list[list[float]]:
    """Of each traced handoff, when each of ``PARTS`` was, in ms after the first token."""
    bus = await connect(state.nats_url, role="client", name="bench")
    try:
        subjects, at = bus.subjects, dict[str, dict[str, int]]()
        async for entry in read(bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since_ns):
            work = jobs.decode(entry.data)
            if isinstance(work, transfer.Prefilled) and work.stamps is not None:
                at[work.request] = {"published": work.first_token_ns, "stored": entry.time_ns}
        async for entry in read(bus, subjects.stream("HANDOFF"), subjects.all("handoff"), since_ns=since_ns):
            for line in transfer.decode_ledger(entry.data).events:
                if line.state in LEDGER and (found := at.get(line.ticket.partition(":")[0])) is not None:
                    found[LEDGER[line.state]] = line.at_ns
        async for entry in read(bus, subjects.stream("DONE"), subjects.all("done"), since_ns=since_ns):
            event = done.decode(entry.data)
            if isinstance(event, done.Done) and event.request in at and event.stamps is not None:
                seen = event.stamps
                at[event.request] |= {
                    "received": seen.received_ns, "step begun": seen.started_ns, "next token": seen.first_token_ns
                }  # fmt: skip
    finally:
        await bus.close()
    whole = [each for each in at.values() if all(each.get(part) for part in ("published", *PARTS))]
    return [[(each[part] - each["published"]) / 1e6 for part in PARTS] for each in whole]


LEDGER = {"offered": "offered", "leased": "transfer begun", "read": "KV there"}


async def behind(state: DeploymentState, since_ns: int) -> list[int]:
    """Lengths of the prompts that the decode worker computed since the prefill worker was behind."""
    bus = await connect(state.nats_url, role="client", name="bench")
    try:
        found = []
        async for entry in read(bus, bus.subjects.stream("WORK"), bus.subjects.all("work"), since_ns=since_ns):
            job = jobs.decode(entry.data)
            if isinstance(job, jobs.Job) and job.decision.how.startswith("local: prefill workers are behind"):
                found.append(requests.decode_head(job.request).prompt_tokens)
        return found
    finally:
        await bus.close()


def timeline(state: DeploymentState, since_ns: int) -> dict[str, dict[str, Any]]:
    """Medians and 95th percentiles, and what they are of."""
    found = asyncio.run(timelines(state, since_ns))
    columns = {part: [each[number] for each in found] for number, part in enumerate(PARTS)}
    return {
        part: {"count": len(ms), "p50_ms": statistics.median(ms), "p95_ms": sorted(ms)[int(0.95 * len(ms))], "ms": ms}
        for part, ms in columns.items()
        if ms
    }


def print_timeline(layout: str, what: str, found: dict[str, dict[str, Any]]) -> None:
    if not found:
        return
    print(f"{layout}: {what}: of {found[PARTS[0]]['count']} handoffs, ms after the first token, p50 (p95): "
          + ", ".join(f"{part} {each['p50_ms']:.2f} ({each['p95_ms']:.2f})" for part, each in found.items()),
          flush=True)  # fmt: skip


def single(asked: argparse.Namespace, state: DeploymentState, data: Path) -> dict[str, Any]:
    """Medians of prompts one at a time, and of their reads."""
    since_ns, out = time.time_ns(), data / "split.json"
    url = state.http_url
    subprocess.run(
        penstock("bench", "split", "--whole", url, "--split", url, "--prompt-tokens", asked.prompt,
                 "--vocabulary", 4000, "--rounds", asked.rounds, "--json", out),
        check=True, timeout=120, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads(out.read_text())
    times = {"ttft_ms": found["split"]["ttft_ms"], "second_ms": found["split"]["second_ms"]} | moved(state, since_ns)
    since_ns = time.time_ns()
    asyncio.run(one_by_one(asked, state))
    return times | {"timeline": timeline(state, since_ns)}


async def one_by_one(asked: argparse.Namespace, state: DeploymentState) -> None:
    """Traced prompts, none of which comes twice."""
    draw = random.Random(asked.prompt)
    for _ in range(asked.traced):
        await first_tokens(state.http_url, state.model, draw.choices(range(*IDS), k=asked.prompt - 8))


def load(state: DeploymentState, data: Path, streams: int, words: int, answer: int, seconds: float, seed: int) -> Any:
    """``bench http`` in a process of its own, and the file of its figures."""
    out = data / f"{streams}.json"
    process = subprocess.Popen(
        penstock("bench", "http", "--url", state.http_url, "--concurrency", streams, "--duration-s", seconds,
                 "--warm-up-s", WARM_S, "--prompt-words", words, "--shared-prefix", 0, "--output-tokens", answer,
                 "--seed", seed, "--json", out),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return process, out


def mixed(asked: argparse.Namespace, state: DeploymentState, data: Path, streams: int, rate: float) -> dict[str, Any]:
    """Figures of the running answers, and of the long prompts beside them."""
    seed = round(1000 * streams + 10 * rate)  # no prompt twice
    words, found, since_ns = words_for(asked.folder, asked.short), {}, time.time_ns()
    process, out = load(state, data, streams, words, asked.answer, asked.seconds, seed)
    if rate:
        whole_s = WARM_S + asked.seconds
        found["long"] = asyncio.run(arrive(state.http_url, state.model, rate, whole_s, asked.prompt - 96, seed))
    process.wait(timeout=WARM_S + asked.seconds + 60)
    (found["short"],) = json.loads(out.read_text())["stages"]
    steady(found["short"], streams, asked.answer)
    found["timeline"] = timeline(state, since_ns)
    found["behind"] = asyncio.run(behind(state, since_ns))
    return found


def steady(stage: dict[str, Any], streams: int, answer: int) -> None:
    """Add the rate that the latency makes: answers that end in step are counted in lumps otherwise."""
    stage["steady_tokens_per_s"] = streams * answer / max(stage["latency_p50_ms"], 1e-3) * 1e3


def swept(asked: argparse.Namespace, state: DeploymentState, data: Path, streams: int) -> dict[str, Any]:
    """One point of the sweep, with tokens per second of a GPU and of an answer."""
    words = words_for(asked.folder, SWEPT[0])
    process, out = load(state, data, streams, words, SWEPT[1], asked.sweep_seconds, 77_000 + streams)
    process.wait(timeout=asked.sweep_seconds + 90)
    (found,) = json.loads(out.read_text())["stages"]
    steady(found, streams, SWEPT[1])
    found["per_gpu"] = found["steady_tokens_per_s"] / 2
    found["per_user"] = (SWEPT[1] - 1) / max(found["latency_p50_ms"] - found["ttft_p50_ms"], 1e-3) * 1e3
    return dict(found)


def rows(asked: argparse.Namespace, layout: str) -> dict[str, Any]:
    data, began_ns = Path(tempfile.mkdtemp(prefix="disaggregated-")), time.time_ns()
    process, state = up(asked, layout, data)
    try:
        prompt_tokens(state.http_url, state.model, 4)
        found: dict[str, Any] = {"single": single(asked, state, data), "mixed": {}, "sweep": {}}
        one = found["single"]
        print(f"{layout}: one prompt of {asked.prompt}: TTFT {one['ttft_ms']:.1f} ms, first to second token "
              f"{one['second_ms']:.1f} ms; {one['reads']:.0f} reads, median {one['read_ms']:.2f} ms, "
              f"{one['gb_per_s']:.0f} GB/s ({one['gb_per_s_least']:.0f} to {one['gb_per_s_best']:.0f}), "
              f"{one['failures']:.0f} failed", flush=True)  # fmt: skip
        print_timeline(layout, "alone", one["timeline"])
        for streams in asked.streams:
            for rate in asked.rates:
                each = found["mixed"][f"{streams}+{rate}"] = mixed(asked, state, data, streams, rate)
                row(layout, streams, rate, each)
                print_timeline(layout, f"{streams} + {rate:g}/s", each["timeline"])
                long = sum(tokens > asked.prompt // 2 for tokens in each["behind"])
                print(f"{layout}: {streams} + {rate:g}/s: since the prefill worker was behind, the decode worker "
                      f"computed {long} long and {len(each['behind']) - long} short prompts", flush=True)  # fmt: skip
        for streams in asked.sweep:
            each = found["sweep"][streams] = swept(asked, state, data, streams)
            print(f"| {layout} | sweep {streams} | {each['per_gpu']:,.0f} tokens/s per GPU | {each['per_user']:.1f} "
                  f"per answer | TTFT p50 {each['ttft_p50_ms']:.0f} p99 {each['ttft_p99_ms']:.0f} | ITL p50 "
                  f"{each['itl_p50_ms']:.1f} p99 {each['itl_p99_ms']:.1f} | {each['failed']} failed |",
                  flush=True)  # fmt: skip
        print(f"{layout}: all transfers", moved(state, began_ns), flush=True)
        return found
    finally:
        stop(process)
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


def row(layout: str, streams: int, rate: float, each: dict[str, Any]) -> None:
    short, long = each["short"], each.get("long")
    beside = "| | | | |"
    if long:
        times = f"{long['ttft_p50_ms']:.0f} | {long['ttft_p99_ms']:.0f}"
        times += f" | {long['second_p50_ms']:.1f}, {long['second_p99_ms']:.1f}"
        beside = f"{long['requests_per_s']:.2f} | {times} | {long['failed']} |"
    print(f"| {layout} | {streams} + {rate:g}/s | {short['steady_tokens_per_s']:,.0f} ({short['tokens_per_s']:,.0f}) | "
          f"{short['ttft_p50_ms']:.0f} | "
          f"{short['itl_p50_ms']:.1f} | {short['itl_p99_ms']:.1f} | {short['failed']} | {beside}",
          flush=True)  # fmt: skip


def logs(data: Path) -> None:
    """The first warnings and errors of each process."""
    for path in sorted((data / "penstock" / "logs").glob("*.log")):
        warnings_found = [line for line in path.read_text(errors="replace").splitlines()
                if '"warning"' in line or '"error"' in line or "Traceback" in line]  # fmt: skip
        for line in warnings_found[:3]:
            print(f"{path.name} ({len(warnings_found)}): {line[:300]}", flush=True)


def floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--engine", choices=("native", "vllm", "mock"), default="native")
    parser.add_argument("--engine-args", default="{}", help="vLLM's, as JSON, beside those of tests.gpu.pipeline")
    parser.add_argument("--layouts", default="aggregated,chunked,split,apart")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short one")
    parser.add_argument("--answer", type=int, default=256, help="tokens of the answers that run")
    parser.add_argument("--streams", type=ints, default=(64,))
    parser.add_argument("--rates", type=floats, default=(0.0, 4.0), help="long prompts per second")
    parser.add_argument("--sweep", type=ints, default=(), help="connections of each point")
    parser.add_argument("--sweep-seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--traced", type=int, default=40, help="single prompts for the timeline")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(f"{asked.engine}, long prompts of {asked.prompt - 96}, short of {asked.short} -> {asked.answer} tokens")
    print("| layout | load | answers: tokens/s (ended) | TTFT p50 | ITL p50 | p99 (ms) | failed | long prompts/s | "
          "TTFT p50 | p99 | first to second token p50, p99 | failed |")  # fmt: skip
    found = {layout: rows(asked, layout) for layout in asked.layouts.split(",")}
    if asked.json:
        figures = {"engine": asked.engine, "layouts": found}
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
