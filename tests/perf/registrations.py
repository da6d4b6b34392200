"""What a large fleet costs the processes that follow it: CPU, event-loop lag and time of decisions.

python -m tests.perf.registrations                     # 1,000 workers, 5,000 open streams: four minutes
python -m tests.perf.registrations --arrival-s 10      # the streams arrive over ten seconds, not all at once

The workers are simulated: registrations under real leases, renewed over one connection as their owners would, of a
model of their own, so that no request goes to them. Routers that ask what they cache are answered: nothing. The streams
are answers of the slow mock engine, all open at once. Both run beside two gateways, two routers and two workers.

These are measured three times: without anything, with the registrations, and with the streams as well; in between are
the lags of the moments in which the workers register and the streams arrive. The metric shows the worst lag of 30 to
60 s, so a measurement of 60 s has none of what was before it, and the moment behind it at most those of both.

A deployment for one measurement: started, awaited, and stopped behind it.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from penstock.infra.bus.client import Frame
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model.modeldir import TINY
from penstock.infra.process.turns import LAG_EVERY_S, LAG_WINDOW_S
from penstock.launch.state import DeploymentState, read_state
from penstock.schemas import kv, wire
from penstock.schemas.fleet import Registration
from penstock.workers.session.lease import Lease
from tests.perf.cpu import cpu_seconds

READY_S = 60.0
STOP_S = 20.0


@contextlib.contextmanager
def running(base: Path, *arguments: str) -> Iterator[None]:
    """`penstock up` with these arguments; its data is in ``base``/data, its log ``base``/up.log.

    Raises:
        RuntimeError: it was not ready in time; the text has the end of its log.
    """
    log = base / "up.log"
    up = penstock(
        "up", "--http-port=0", f"--data-dir={base}/data", "--log-format=json", "--dashboard-port=-1", *arguments,
        log=log,
    )  # fmt: skip
    try:
        _wait_until_ready(up, log)
        yield
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()


def _wait_until_ready(up: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and up.poll() is None:
        if b'"event": "ready"' in log.read_bytes() or b'"event":"ready"' in log.read_bytes():
            return
        time.sleep(0.1)
    raise RuntimeError(f"the deployment was not ready within {READY_S:g} s: {end_of(log)}")


def penstock(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start one of our commands, with its output in ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip


def end_of(log: Path) -> str:
    """The last lines of a log, in one."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])


GENERATORS = 2
OPEN_S = 90.0  # until all streams are open, beyond the time over which they arrive
TOKENS = 4_000  # of each answer: more than are written while it is measured
STREAM_S = 600.0  # the longest that one may last
LOOPS = ("router", "gateway", "worker")
ROLES = (*LOOPS, "nats")


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="registrations-") as folder:
        base = Path(folder)
        slots = -(-args.streams // 2)
        try:
            with running(
                base, "--engine=mock", f"--model={TINY}", f"--mock-speedup={args.mock_speedup:g}", "--gateways=2",
                "--routers=2", "--workers=2", f"--max-running={slots}", "--kv-blocks=400000",
            ):  # fmt: skip
                asyncio.run(_measure(base, args))
        except (OSError, RuntimeError, TimeoutError) as error:
            print(f"tests.perf.registrations: {error}", file=sys.stderr)
            return 1
    return 0


async def _measure(base: Path, args: argparse.Namespace) -> None:
    state = read_state(base / "data" / "state.json")
    print(f"{'':34}{'share of a core':>36}{'worst lag, ms (without waits for a core), and how often late':>66}")
    print(f"{'':34}{''.join(f'{role:>9}' for role in ROLES)}{''.join(f'{role:>22}' for role in LOOPS)}")
    await _row("nothing", state, args.duration_s)
    async with AsyncExitStack() as registered:
        bus = await registered.enter_async_context(
            await connect(state.nats_url, role="operator", name="registrations", namespace=state.namespace)
        )
        async with _moment(f"while {args.workers:,} workers register", state):
            for first in range(0, args.workers, 100):
                numbers = range(first, min(first + 100, args.workers))
                leases = await asyncio.gather(*(_register(bus, number) for number in numbers))
                for lease in leases:
                    registered.push_async_callback(lease.stop)
        await _row(f"{args.workers:,} registered workers", state, args.duration_s)
        async with AsyncExitStack() as streams:
            async with _moment(f"while {args.streams:,} streams arrive", state):
                streams.enter_context(_streams(base, state, args.streams, args.arrival_s))
                await _until_open(state, args.streams, OPEN_S + args.arrival_s)
            before = await asyncio.to_thread(_decisions, state)
            await _row(f"{args.streams:,} open streams", state, args.duration_s)
            count, seconds = (now - then for now, then in zip(_decisions(state), before, strict=True))
            if not count:
                count, seconds = before
            print(f"decisions: {count:.0f}, {seconds / max(count, 1) * 1e6:.0f} us each")


async def _register(bus: Bus, number: int) -> Lease:
    registration = Registration(
        f"simulated-{number}", "simulated", "aggregated", "mock", time.time_ns(), 32, 8_000, 256, 32_768
    )
    empty = wire.encode(kv.KvDump(registration.worker, registration.epoch, -1))

    def dump(asked: Frame) -> None:
        bus.nc.post(asked.reply.decode(), empty)

    async def regained() -> None:
        return None

    await bus.nc.subscribe_direct(bus.subjects.control(registration.worker), dump)
    lease = Lease(bus, registration.worker, lambda: registration, lambda: None, regained)
    await lease.acquire()
    return lease


@contextmanager
def _streams(base: Path, state: DeploymentState, count: int, arrival_s: float) -> Iterator[None]:
    """Answers that are being written; their generators end with it."""
    each = -(-count // GENERATORS)
    arrivals = f"--rate={each / arrival_s:g}" if arrival_s else f"--concurrency={each}"
    generators = [
        penstock(
            "bench", "sweep", f"--endpoint=penstock={state.http_urls[number % len(state.http_urls)]}",
            f"--model={state.model}", f"--tokenizer={TINY}", arrivals, f"--requests={each}", "--isl=40",
            "--isl-stddev=0", f"--osl={TOKENS}", "--warm-up=0", f"--timeout-s={STREAM_S:g}",
            f"--scrape-s={STREAM_S:g}", f"--seed={number}", f"--out={base / f'streams-{number}'}",
            log=base / f"streams-{number}.log",
        )
        for number in range(GENERATORS)
    ]  # fmt: skip
    try:
        yield
        ended = [number for number, each in enumerate(generators) if each.poll() is not None]
        if ended:
            raise RuntimeError(f"a load generator ended early: {end_of(base / f'streams-{ended[0]}.log')}")
    finally:
        for generator in generators:
            _end(generator)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


async def _until_open(state: DeploymentState, count: int, within_s: float) -> None:
    """
    Raises:
        TimeoutError: fewer streams were open after ``within_s``.
    """
    until, open_streams = time.monotonic() + within_s, 0.0
    while time.monotonic() < until:
        open_streams = await asyncio.to_thread(_sum, state, "worker", "penstock_worker_running")
        if open_streams >= count:
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"{open_streams:.0f} of {count} streams were open after {within_s:g} s")


async def _row(name: str, state: DeploymentState, seconds: float) -> None:
    """Measure for some seconds."""
    late = await _late(state)
    before = {process.name: cpu_seconds(process.pid or 0) for process in state.processes}
    began = time.monotonic()
    await asyncio.sleep(seconds)
    spent = time.monotonic() - began
    shares = dict.fromkeys(ROLES, 0.0)
    for process in state.processes:
        if process.role in shares:
            share = (cpu_seconds(process.pid or 0) - before[process.name]) / spent
            shares[process.role] = max(shares[process.role], share)
    await _print_row(name, "".join(f"{100 * shares[role]:8.1f}%" for role in ROLES), state, late)


@asynccontextmanager
async def _moment(name: str, state: DeploymentState) -> AsyncIterator[None]:
    """Show the worst lag up to the end of what happens inside, and how often one was late meanwhile."""
    late = await _late(state)
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    await asyncio.sleep(2 * LAG_EVERY_S)  # until the last of it shows
    await _print_row(name, f"{f'in {seconds:.1f} s':>36}", state, late)


async def _print_row(name: str, shares: str, state: DeploymentState, late_before: dict[str, float]) -> None:
    late, lags = await _late(state), ""
    for role in LOOPS:
        worst, worst_cpu = [
            max(await asyncio.to_thread(_values, state, role, f"penstock_{role}_loop_{kind}_seconds"), default=0.0)
            for kind in ("lag", "lag_cpu")
        ]
        lags += f"{f'{1e3 * worst:.1f} ({1e3 * worst_cpu:.1f}), {late[role] - late_before[role]:.0f}':>22}"
    print(f"{name:34}{shares}{lags}", flush=True)


async def _late(state: DeploymentState) -> dict[str, float]:
    """How often event loops were late so far, by role."""
    return {role: await asyncio.to_thread(_sum, state, role, f"penstock_{role}_loop_late_total") for role in LOOPS}


def _decisions(state: DeploymentState) -> tuple[float, float]:
    """How many there were, and the time that they took, s."""
    name = "penstock_router_decision_seconds"
    return _sum(state, "router", f"{name}_count"), _sum(state, "router", f"{name}_sum")


def _sum(state: DeploymentState, role: str, name: str) -> float:
    return sum(_values(state, role, name))


def _values(state: DeploymentState, role: str, name: str) -> list[float]:
    """Of a series, from every process of a role."""
    if role == "gateway":
        urls = [f"{url}/metrics" for url in state.http_urls[1:] or state.http_urls]
    else:
        urls = [process.metrics_url for process in state.processes if process.role == role and process.metrics_url]
    found = []
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            found += [sample.value for family in families for sample in family.samples if sample.name == name]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.registrations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, default=1_000, metavar="N", help="simulated registrations (default: 1000)")
    add("--streams", type=int, default=5_000, metavar="N", help="answers that are open at once (default: 5000)")
    add("--mock-speedup", type=float, default=0.1, metavar="X", help="of the mock engine (default: 0.1)")
    add(
        "--arrival-s", type=float, default=0.0, metavar="SECONDS",
        help="time over which the streams arrive; 0: all at once (default: 0)",
    )  # fmt: skip
    add(
        "--duration-s", type=float, default=2 * LAG_WINDOW_S, metavar="SECONDS",
        help="of each measurement; lags of less than %(default)g s are those of earlier moments, too (default: "
        "%(default)g)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
