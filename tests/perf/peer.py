"""Penstock with its defaults beside NVIDIA Dynamo with several numbers of front ends, in turns on the same cores.

python -m tests.perf.peer --peer-python ~/peer/bin/python --workers 32 --front-ends 1,2,4,8,16 --connections 1024,4096

The peer's environment has `ai-dynamo`; its workers are its mockers, ours the mock engine, both without step times.
Routing by prefixes is on in both. Generators (`penstock bench http`) share the cores with what they load, and are dealt
over our gateways' port and the peer's front ends. The last columns have the busiest process of each kind, as a share
of a core: where one is full, more cores do not help.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.infra.model.modeldir import TINY
from penstock.infra.process.sockets import bind
from penstock.launch.state import read_state
from tests.perf.cpu import children
from tests.perf.registrations import READY_S, end_of, penstock, running

WARM_UP_S = 2.0
STOP_S = 10.0


class Target(NamedTuple):
    """What is loaded: the URLs that generators take in turn, a model, and its processes by kind."""

    urls: Sequence[str]
    model: str
    kinds: Mapping[int, str]


class Figures(NamedTuple):
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    failed: int
    cores: float
    busiest: Mapping[str, float]  # share of a core, by kind of process


@contextlib.contextmanager
def ours(asked: argparse.Namespace) -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        base = Path(folder)
        with running(base, "--engine=mock", "--mock-speedup=0", f"--workers={asked.workers}", f"--model={asked.model}"):
            state = read_state(base / "data" / "state.json")
            kinds = {each.pid: each.role for each in state.processes if each.pid is not None}
            yield Target([state.http_url], state.model, kinds)


@contextlib.contextmanager
def theirs(asked: argparse.Namespace, front_ends: int) -> Iterator[Target]:
    held = [bind("127.0.0.1", 0) for _ in range(front_ends)]
    ports = [each.getsockname()[1] for each in held]
    with tempfile.TemporaryDirectory(prefix="peer-") as folder, contextlib.ExitStack() as stack:
        planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
        workers = ("--model-path", asked.model, "--model-name", "peer", "--num-workers", asked.workers,
                   "--speedup-ratio", asked.peer_speedup, "--block-size", 32, "--max-num-seqs", 512)  # fmt: skip
        commands: dict[str, list[tuple[object, ...]]] = {"worker": [("dynamo.mocker", *workers)]}
        commands["front end"] = [
            ("dynamo.frontend", "--http-port", port, "--router-mode", "kv", "--kv-cache-block-size", 32)
            for port in ports
        ]
        environ = os.environ | {"DYN_FILE_KV": f"{folder}/kv", "DYN_LOG": "error"}
        environ.pop("PYTHONPATH", None)
        kinds: dict[int, str] = {}
        for kind, each in ((kind, each) for kind, several in commands.items() for each in several):
            log = stack.enter_context(Path(folder, f"{len(kinds)}.log").open("wb"))
            command = [str(asked.peer_python), "-m", *map(str, (*each, *planes))]
            process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(end, process)
            kinds[process.pid] = kind
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            listed(url, Path(folder))
        time.sleep(2)  # after which its front ends know all workers
        yield Target(urls, "peer", kinds | {child: kind for pid, kind in kinds.items() for child in children(pid)})


def end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def listed(url: str, folder: Path) -> None:
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            if b'"peer"' in answer.read():
                return
        if time.monotonic() > until:
            logs = "".join(end_of(each) for each in sorted(folder.glob("*.log")))
            raise RuntimeError(f"{url} lists no model after {READY_S:g} s: {logs[-2000:]}")
        time.sleep(0.2)


def measure(target: Target, connections: int, asked: argparse.Namespace) -> Figures:
    """Load it once; raises RuntimeError if a generator fails."""
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        count = max(asked.generators, len(target.urls))
        generators = [
            penstock(
                "bench", "http", f"--url={target.urls[number % len(target.urls)]}", f"--model={target.model}",
                f"--concurrency={-(-connections // count)}", f"--duration-s={asked.duration_s:g}",
                f"--warm-up-s={WARM_UP_S:g}", f"--prompt-words={asked.words}", f"--output-tokens={asked.tokens}",
                f"--seed={number}", f"--json={folder}/{number}.json",
                # One measures the processes, within the seconds that it counts.
                *([] if number else [f"--pids={','.join(map(str, target.kinds))}"]),
                log=Path(folder, f"{number}.log"),
            )
            for number in range(count)
        ]  # fmt: skip
        try:
            for number, generator in enumerate(generators):
                generator.wait(WARM_UP_S + asked.duration_s + READY_S)
                if not Path(folder, f"{number}.json").exists():
                    raise RuntimeError(f"a load generator failed: {end_of(Path(folder, f'{number}.log'))}")
        finally:
            for generator in generators:
                if generator.poll() is None:
                    generator.kill()
                    generator.wait()
        stages = [json.loads(Path(folder, f"{number}.json").read_text())["stages"][0] for number in range(count)]
    shares: list[tuple[str, float]] = []  # of a core
    for name, us in stages[0]["cpu_us_per_token"].items():
        shares.append((target.kinds[int(name.removeprefix("pid "))], us * stages[0]["tokens_per_s"] / 1e6))
    busiest = {kind: max(share for of, share in shares if of == kind) for kind in dict(shares)}
    return Figures(
        sum(each["requests_per_s"] for each in stages),
        statistics.median(each["ttft_p50_ms"] for each in stages),
        max(each["ttft_p99_ms"] for each in stages),
        sum(each["failed"] for each in stages),
        sum(share for _, share in shares),
        busiest,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="of its environment; without it, ours alone")
    parser.add_argument("--peer-speedup", type=float, default=1000.0, help="of its mockers")
    parser.add_argument("--front-ends", default="1,2,4,8,16", help="of the peer")
    parser.add_argument("--connections", default="1024,4096")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of either")
    parser.add_argument("--generators", type=int, default=max(1, (os.cpu_count() or 4) // 4))
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a model with a chat template")
    parser.add_argument("--words", type=int, default=200, help="per prompt, half of them shared")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--duration-s", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=3, help="of all lines in turns; the median counts")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no line begins after this")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    until = time.monotonic() + asked.limit_s
    loads = [int(each) for each in asked.connections.split(",")]
    peers = [int(each) for each in asked.front_ends.split(",")] if asked.peer_python else []
    lines: list[tuple[str, int]] = [("Penstock", 0), *((f"Dynamo, {each} front ends", each) for each in peers)]
    found: dict[tuple[str, int], list[Figures]] = {}
    for number in range(asked.rounds):
        for name, front_ends in lines:
            if time.monotonic() > until:
                print(f"round {number + 1}, {name}: left out, --limit-s {asked.limit_s:g} s were over", flush=True)
                continue
            try:
                with theirs(asked, front_ends) if front_ends else ours(asked) as target:
                    for connections in loads:
                        one = measure(target, connections, asked)
                        found.setdefault((name, connections), []).append(one)
                        print(f"round {number + 1}, {name}, {connections} connections: {one}", flush=True)
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"round {number + 1}, {name}: {error}"[:1500], flush=True)
    report(found, loads)
    if asked.json:
        figures = [{"name": name, "connections": load, "rounds": [each._asdict() for each in several]}
                   for (name, load), several in found.items()]  # fmt: skip
        asked.json.write_text(json.dumps({"cores": os.cpu_count(), "lines": figures}, indent=2) + "\n")
    return 0 if found and not any(each.failed for several in found.values() for each in several) else 1


def report(found: Mapping[tuple[str, int], Sequence[Figures]], loads: Sequence[int]) -> None:
    print(f"{os.cpu_count()} cores, medians\n| | connections | requests/s | TTFT p50, p99 (ms) | failed | cores | "
          "busiest |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for load in loads:
        rates: dict[str, float] = {}
        for (name, connections), several in found.items():
            if connections == load:
                one = sorted(several)[len(several) // 2]
                rates[name] = one.requests_per_s
                busiest = ", ".join(f"{kind} {share:.0%}" for kind, share in one.busiest.items())
                print(f"| {name} | {load} | {one.requests_per_s:,.0f} | {one.ttft_p50_ms:.1f}, {one.ttft_p99_ms:.1f} | "
                      f"{sum(each.failed for each in several)} | {one.cores:.1f} | {busiest} |")  # fmt: skip
        best = max((rate for name, rate in rates.items() if name != "Penstock"), default=0.0)
        if best and "Penstock" in rates:
            print(f"{load} connections: {rates['Penstock'] / best:.2f} times the peer's best")


if __name__ == "__main__":
    sys.exit(main())
