"""Prefill and decode apart, through the whole pipeline on two GPUs: what a hand-over costs, and what it gains.

python -m tests.gpu.disaggregated --folder /dev/shm/random-8b [--engine vllm]

The folder is written by `python -m tests.gpu.pipeline --write`. Two deployments run one after the other on the same two
GPUs: two aggregated workers, and a prefill with a decode worker. Each answers single prompts of 4,096 tokens first
(from first to second token: the hand-over), then a mixed load: answers that run, with long prompts beside them.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from infra.launch.state import State, read_state
from tests.gpu.pipeline import LONGEST, START_S, VLLM, ints, penstock, prompt_tokens, words_for

LAYOUTS = {"aggregated": ("--workers", 2), "split": ("--prefill", 1, "--decode", 1)}


def up(asked: argparse.Namespace, layout: str, data: Path) -> tuple[subprocess.Popen[bytes], State]:
    """Start a deployment; it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine: list[object] = ["--engine", asked.engine]
    if asked.engine == "vllm":
        engine += ["--override-engine-args", json.dumps(VLLM)]
    began, log = time.perf_counter(), data / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            penstock("up", *engine, "--model", asked.folder, "--data-dir", data / "penstock", "--http-port", port,
                     *LAYOUTS[layout], "--max-model-len", LONGEST + 256, "--ready-s", START_S - 10,
                     "--log-format", "json", "--drain-s", 3),
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    while b'"ready"' not in log.read_bytes():
        if process.poll() is not None or time.perf_counter() - began > START_S:
            process.kill()
            raise SystemExit(f"penstock up did not get ready:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    print(f"{layout}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    return process, read_state(data / "penstock" / "state.json")


def handed_over(state: State) -> dict[str, float]:
    """Sums of the workers' metrics of reads."""
    found = {"bytes": 0.0, "seconds": 0.0, "reads": 0.0, "failures": 0.0}
    names = {
        "penstock_handoff_read_bytes_total": "bytes",
        "penstock_handoff_read_seconds_sum": "seconds",
        "penstock_handoff_read_seconds_count": "reads",
        "penstock_handoff_failures_total": "failures",
    }
    for process in state.processes:
        if process.role == "worker" and process.metrics_url:
            with urllib.request.urlopen(process.metrics_url, timeout=10) as answer:
                for line in answer.read().decode().splitlines():
                    name = line.split("{")[0].split(" ")[0]
                    if name in names:
                        found[names[name]] += float(line.rsplit(" ", 1)[1])
    return found


def single(asked: argparse.Namespace, state: State, data: Path) -> dict[str, float]:
    """Medians of prompts one at a time, and of their reads."""
    before, out = handed_over(state), data / "split.json"
    url = state.http_url
    subprocess.run(
        penstock("bench", "split", "--whole", url, "--split", url, "--prompt-tokens", asked.prompt,
                 "--vocabulary", 4000, "--rounds", asked.rounds, "--json", out),
        check=True, timeout=120, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = handed_over(state)
    found = json.loads(out.read_text())
    moved = {name: after[name] - before[name] for name in after}
    return {
        "ttft_ms": found["split"]["ttft_ms"],
        "second_ms": found["split"]["second_ms"],
        "reads": moved["reads"],
        "read_ms": moved["seconds"] / (moved["reads"] or 1) * 1e3,
        "gb_per_s": moved["bytes"] / 1e9 / (moved["seconds"] or 1),
        "failures": moved["failures"],
    }


def load(state: State, data: Path, name: str, streams: int, words: int, answer: int, seconds: float, seed: int) -> Any:
    out = data / f"{name}.json"
    process = subprocess.Popen(
        penstock("bench", "http", "--url", state.http_url, "--concurrency", streams, "--duration-s", seconds,
                 "--warm-up-s", 3, "--prompt-words", words, "--shared-prefix", 0, "--output-tokens", answer,
                 "--seed", seed, "--json", out),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return process, out


def mixed(asked: argparse.Namespace, state: State, data: Path, streams: int, long: int) -> dict[str, Any]:
    """Figures of the running answers, and of the long prompts beside them."""
    seed = 1000 * streams + 10 * long  # no prompt twice
    words = words_for(asked.folder, asked.short), words_for(asked.folder, asked.prompt - 96)
    loads = {"short": load(state, data, "short", streams, words[0], asked.answer, asked.seconds, seed)}
    if long:
        loads["long"] = load(state, data, "long", long, words[1], 4, asked.seconds, seed + 1)
    found = {}
    for name, (process, out) in loads.items():
        process.wait(timeout=asked.seconds + 60)
        (found[name],) = json.loads(out.read_text())["stages"]
    return found


def rows(asked: argparse.Namespace, layout: str) -> dict[str, Any]:
    data = Path(tempfile.mkdtemp(prefix="disaggregated-"))
    process, state = up(asked, layout, data)
    try:
        prompt_tokens(state.http_url, state.model, 4)
        found: dict[str, Any] = {"single": single(asked, state, data), "mixed": {}}
        one = found["single"]
        print(f"{layout}: one prompt of {asked.prompt}: TTFT {one['ttft_ms']:.1f} ms, first to second token "
              f"{one['second_ms']:.1f} ms; {one['reads']:.0f} reads, each {one['read_ms']:.2f} ms, "
              f"{one['gb_per_s']:.0f} GB/s, {one['failures']:.0f} failed", flush=True)  # fmt: skip
        for streams in asked.streams:
            for long in asked.long:
                each = found["mixed"][f"{streams}+{long}"] = mixed(asked, state, data, streams, long)
                for name, stage in each.items():
                    print(f"| {layout} | {streams} + {long} | {name} | {stage['tokens_per_s']:,.0f} | "
                          f"{stage['requests_per_s']:.2f} | {stage['ttft_p50_ms']:.0f} | {stage['ttft_p99_ms']:.0f} | "
                          f"{stage['itl_p50_ms']:.1f} | {stage['itl_p99_ms']:.1f} | {stage['failed']} |",
                          flush=True)  # fmt: skip
        print(f"{layout}: in all", handed_over(state), flush=True)
        return found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        logs(data)
        shutil.rmtree(data, ignore_errors=True)


def logs(data: Path) -> None:
    """The first warnings and errors of each process."""
    for path in sorted((data / "penstock" / "logs").glob("*.log")):
        warnings_found = [line for line in path.read_text(errors="replace").splitlines()
                if '"warning"' in line or '"error"' in line or "Traceback" in line]  # fmt: skip
        for line in warnings_found[:3]:
            print(f"{path.name} ({len(warnings_found)}): {line[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--layouts", default="aggregated,split")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short one")
    parser.add_argument("--answer", type=int, default=256, help="tokens of the answers that run")
    parser.add_argument("--streams", type=ints, default=(64,))
    parser.add_argument("--long", type=ints, default=(0, 6), help="long prompts at a time")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(f"{asked.engine}, long prompts of {asked.prompt - 96}, short of {asked.short} -> {asked.answer} tokens")
    print("| layout | short + long | of | tokens/s | requests/s | TTFT p50 | p99 | ITL p50 | p99 (ms) | failed |")
    found = {layout: rows(asked, layout) for layout in asked.layouts.split(",")}
    if asked.json:
        figures = {"engine": asked.engine, "layouts": found}
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
