"""Requests, tokens and CPU per request as gateways, routers and workers are added, on one machine.

python -m tests.perf.scale                             # 1, 2, 4, 8 gateways; 2, 4, 8, 16 workers: < 5 min
python -m tests.perf.scale --points 4:2:8,6:2:8 --words 32 --tokens 512
python -m tests.perf.scale --points 4:1:4,4:4:4c4      # one cell, and four
python -m tests.perf.scale --points 2:1:2x4,2:1:2x4/2  # four deployments on one broker, and on two
python -m tests.perf.scale --all --limit-s 280 --out scale  # short and long answers, and the broker alone

Each point is a deployment of its own (mock engine without step times), loaded by one `penstock bench http` per
gateway, each on that gateway's own port: connections would otherwise be spread unevenly by the kernel. The generators
share the machine's cores with what they measure; their share of a core is shown.

Interrupted, or ended by SIGTERM, it prints what it has. With --out, a folder has the same after every point.

The points and figures of ``tests.perf.scale``, and their tables.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.cli.terminal import stdout
from penstock.launch.state import DeploymentState, read_state
from tests.perf import broker
from tests.perf.broker import MESSAGES, BrokerFigures
from tests.perf.registrations import READY_S, end_of, penstock, running

ROLES = ("gateway", "router", "worker", "nats")
WIDTH = 150


_POINT = re.compile(r"(\d+):(\d+):(\d+)(?:c(\d+))?(?:x(\d+)(?:/(\d+))?)?")


class Point(NamedTuple):
    """The number of processes of each role.

    Attributes:
        cells: of the deployment, over which routers and workers are dealt.
        deployments: each with all of these processes and a namespace of its own.
        brokers: that the deployments are divided among.
    """

    gateways: int
    routers: int
    workers: int
    cells: int = 1
    deployments: int = 1
    brokers: int = 1

    @classmethod
    def parse(cls, text: str) -> "Point":
        """``GATEWAYS:ROUTERS:WORKERS``, perhaps ``cCELLS``, and perhaps ``xDEPLOYMENTS`` or ``xDEPLOYMENTS/BROKERS``.

        Raises:
            ValueError: it is not that, or a number is 0.
        """
        matched = _POINT.fullmatch(text)
        numbers = [int(each or 1) for each in matched.groups()] if matched else [0]
        if min(numbers) < 1:
            raise ValueError(
                f"{text!r}: name a point as GATEWAYS:ROUTERS:WORKERS, such as 4:1:8; in cells, 4:4:8c4; of several "
                "deployments, 2:1:2x4"
            )
        return cls(*numbers)

    @property
    def row(self) -> tuple[str, ...]:
        cells = f"{self.deployments} deployments" if self.deployments > 1 else str(self.cells)
        if self.brokers > 1:
            cells += f" on {self.brokers} brokers"
        return cells, str(self.gateways), str(self.routers), str(self.workers)


class Figures(NamedTuple):
    """The figures of one point, over all generators. CPU time is in µs per request, by role."""

    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    failed: int
    cpu_us: dict[str, float]
    busiest: dict[str, float]  # share of a core that the busiest process of a role used
    generator_share: float  # of a core, the busiest generator


class Series(NamedTuple):
    """Points under the same load."""

    name: str
    words: int  # per prompt, half of them shared
    tokens: int  # per answer
    points: tuple[Point, ...]


Result = tuple[Series, Point, Figures | str]


def write(where: Path | None, results: Sequence[Result], limits: Sequence[BrokerFigures], connections: int) -> None:
    """Write the figures to a JSON file, or with the tables to a folder; None: nowhere."""
    if where is None:
        return
    points = [
        {"series": series.name, "words": series.words, "tokens": series.tokens, **point._asdict()}
        | (result._asdict() if isinstance(result, Figures) else {"error": result})
        for series, point, result in results
    ]
    figures = {"cores": os.cpu_count(), "points": points, "broker": [each._asdict() for each in limits]}
    text = json.dumps(figures, indent=2) + "\n"
    if where.suffix == ".json":
        where.write_text(text)
        return
    where.mkdir(parents=True, exist_ok=True)
    (where / "scale.json").write_text(text)
    with (where / "scale.txt").open("w") as file:
        _show(Console(file=file, width=WIDTH), results, limits, connections)


def report(results: Sequence[Result], limits: Sequence[BrokerFigures], connections: int) -> None:
    console = stdout()
    console.width = max(console.width, WIDTH)
    _show(console, results, limits, connections)


def _show(console: Console, results: Sequence[Result], limits: Sequence[BrokerFigures], connections: int) -> None:
    for series in dict.fromkeys(series for series, _, _ in results):
        name = f"{series.name}: " if series.name else ""
        table = Table(
            title=f"{name}{os.cpu_count()} cores, {series.words} words → {series.tokens} tokens, {connections} "
            "connections a gateway; processes of each cell; CPU in µs per request (share of a core, busiest process)"
        )
        for column in (
            "cells", "gateways", "routers", "workers", "req/s", "tokens/s", "TTFT ms", "CPU", *ROLES, "generator",
            "failed",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for row in _rows((point, result) for of, point, result in results if of == series):
            table.add_row(*row)
        console.print(table)
    if limits:
        table = Table(title=f"the broker alone: {len(MESSAGES)} messages stored per request, without consumers")
        for column in ("publishers", "req/s", "messages/s", "cores", "CPU µs per request"):
            table.add_column(column, justify="right")
        for each in limits:
            table.add_row(
                str(each.publishers), f"{each.requests_per_s:,.0f}", f"{each.messages_per_s:,.0f}",
                f"{each.cores:.1f}", f"{each.cpu_us:.0f}",
            )  # fmt: skip
        console.print(table)


def _rows(results: Iterator[tuple[Point, Figures | str]]) -> Iterator[tuple[str, ...]]:
    for point, result in results:
        if isinstance(result, str):
            yield (*point.row, result)
            continue
        yield (
            *point.row,
            f"{result.requests_per_s:,.0f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.ttft_p50_ms:.1f}",
            f"{sum(result.cpu_us.values()):,.0f}",
            *(f"{result.cpu_us.get(role, 0):,.0f} ({result.busiest.get(role, 0):.0%})" for role in ROLES),
            f"{result.generator_share:.0%}",
            str(result.failed),
        )


WARM_UP_S = 1.5
START_S = 6.5  # that a point takes beside its duration and warm-up, about
BROKER_S = 3.0


def default_points(gateways: list[int], workers: list[int], routers: int) -> list[Point]:
    """First each number of gateways with the fewest workers, then each number of workers with at most 4 gateways."""
    beside = max((count for count in gateways if count <= 4), default=gateways[0])
    points = [Point(count, routers, workers[0]) for count in gateways]
    points += [Point(beside, routers, count) for count in workers]
    return list(dict.fromkeys(points))


def all_series(cores: int) -> list[Series]:
    """The series that show how a machine with ``cores`` cores scales, the most informative points first."""
    many = max(2, cores // 4)
    short = [Point(1, 1, 2), Point(4, 1, 4), Point(many, 1, many), Point(many, 2, many), Point(many, 4, many)]
    flat = [Point(4, 1, 2), Point(4, 1, 8), Point(4, 1, 16), Point(2, 1, 2), Point(8, 1, 2)]
    long = [Point(1, 1, 2), Point(many, 1, many), Point(many, 2, many), Point(many + 2, 2, many)]
    return [
        Series("short answers", 200, 64, tuple(dict.fromkeys(short))),
        Series("long answers", 32, 512, tuple(dict.fromkeys(long))),
        Series("one role is added", 200, 64, tuple(point for point in flat if point not in short)),
    ]


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        if args.all:
            series = all_series(os.cpu_count() or 1)
        else:
            points = (
                [Point.parse(each) for each in args.points.split(",")]
                if args.points
                else default_points(_numbers(args.gateways), _numbers(args.workers), args.routers)
            )
            series = [Series("", args.words, args.tokens, tuple(points))]
    except ValueError as error:
        print(f"tests.perf.scale: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[tuple[Series, Point, Figures | str]] = []
    limits: list[broker.BrokerFigures] = []
    try:
        for each, point, result in _results(series, args):
            results.append((each, point, result))
            print(f"{each.name} {point}: {result}", file=sys.stderr, flush=True)
            write(args.out, results, limits, args.connections)
            if args.all and not limits and len(results) >= args.rounds * len(series[0].points):
                limits += [broker.measure(count, BROKER_S) for count in (1, 4, 8)]
    except KeyboardInterrupt:
        print("interrupted: this is what was measured until then", file=sys.stderr)
    write(args.out, results, limits, args.connections)
    report(results, limits, args.connections)
    if args.json:
        write(Path(args.json), results, limits, args.connections)
    return 1 if any(isinstance(result, str) or result.failed for _, _, result in results) else 0


def _results(series: Iterable[Series], args: argparse.Namespace) -> Iterator[tuple[Series, Point, Figures | str]]:
    until = time.monotonic() + args.limit_s
    for each in series:
        for point in each.points:
            if time.monotonic() + args.warm_up_s + args.duration_s + START_S > until:
                yield each, point, f"left out: --limit-s {args.limit_s:g} s were over"
                continue
            try:
                for result in measure(point, each, args, until):
                    yield each, point, result
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                yield each, point, str(error)


def measure(point: Point, series: Series, args: argparse.Namespace, until: float) -> list[Figures]:
    """Start a deployment, or several, load them so many times, or until ``until`` is near, and stop them.

    Raises:
        RuntimeError: it did not start, or a generator failed; the text has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="scale-") as folder, contextlib.ExitStack() as deployments:
        base, states = Path(folder), list[DeploymentState]()
        arguments = (
            "--engine=mock", f"--mock-speedup={args.mock_speedup:g}", f"--gateways={point.gateways}",
            f"--routers={point.routers}", f"--workers={point.workers}", f"--max-running={args.max_running}",
            f"--cells={point.cells}",
        )  # fmt: skip
        for number in range(point.deployments):
            data = base / f"deployment-{number}"
            data.mkdir()
            broker = [f"--nats-url={states[number % point.brokers].nats_url}"] if number >= point.brokers else []
            deployments.enter_context(running(data, *arguments, f"--namespace=cell{number}", *broker))
            states.append(read_state(data / "data" / "state.json"))
        found = [_load(point, series, args, base, states)]
        while len(found) < args.rounds and time.monotonic() + args.warm_up_s + args.duration_s < until:
            found.append(_load(point, series, args, base, states))
        return found


def _load(
    point: Point, series: Series, args: argparse.Namespace, base: Path, states: Sequence[DeploymentState]
) -> Figures:
    urls = [url for state in states for url in state.http_urls[: point.gateways]] * args.generators
    connections = -(-args.connections // args.generators)
    roles = {each.pid: each.role for state in states for each in state.processes if each.pid is not None}
    generators = [
        penstock(
            "bench", "http", f"--url={url}", f"--model={states[0].model}", f"--concurrency={connections}",
            f"--duration-s={args.duration_s:g}", f"--warm-up-s={args.warm_up_s:g}", f"--prompt-words={series.words}",
            f"--output-tokens={series.tokens}", f"--seed={number}", f"--json={base}/{number}.json",
            # One measures the processes, within the seconds that it counts; the others count within about the same.
            *([f"--pids={','.join(map(str, roles))}"] if number == 1 else []),
            log=base / f"{number}.log",
        )
        for number, url in enumerate(urls, 1)
    ]  # fmt: skip
    try:
        for number, generator in enumerate(generators, 1):
            if (
                generator.wait(args.warm_up_s + args.duration_s + READY_S) not in (0, 1)
                or not (base / f"{number}.json").exists()
            ):
                raise RuntimeError(f"a load generator failed: {end_of(base / f'{number}.log')}")
    finally:
        for generator in generators:
            if generator.poll() is None:
                generator.kill()
                generator.wait()
    stages = [json.loads((base / f"{n}.json").read_text())["stages"][0] for n in range(1, len(generators) + 1)]
    return figures(stages, {f"pid {pid}": role for pid, role in roles.items()})


def figures(stages: list[dict[str, Any]], roles: dict[str, str]) -> Figures:
    """
    Args:
        stages: of every generator, as `penstock bench http` writes them; the first has measured the processes.
        roles: of the processes, by name.
    """
    rate = sum(stage["requests_per_s"] for stage in stages)
    cpu_us, busiest = dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0.0)
    for name, us_per_token in stages[0]["cpu_us_per_token"].items():
        share = us_per_token * stages[0]["tokens_per_s"] / 1e6  # of a core
        role = roles.get(name, name)
        cpu_us[role] = cpu_us.get(role, 0.0) + share / max(rate, 1e-9) * 1e6
        busiest[role] = max(busiest.get(role, 0.0), share)
    return Figures(
        rate,
        sum(stage["tokens_per_s"] for stage in stages),
        sorted(stage["ttft_p50_ms"] for stage in stages)[len(stages) // 2],
        sum(stage["failed"] for stage in stages),
        cpu_us,
        busiest,
        max(stage["own_cpu_share"] for stage in stages),
    )


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"{text!r}: the numbers must be positive")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gateways", default="1,2,4,8", metavar="N,N", help="with the first of --workers (default: 1,2,4,8)")
    add("--workers", default="2,4,8,16", metavar="N,N", help="with up to 4 gateways (default: 2,4,8,16)")
    add("--routers", type=int, default=1, metavar="N", help="in every point (default: 1)")
    add(
        "--points",
        default="",
        metavar="G:R:W[cC][xD[/B]],...",
        help="these points instead: gateways, routers, workers, cells; of each of D deployments on B brokers",
    )
    add("--connections", type=int, default=64, metavar="N", help="per gateway (default: 64)")
    add("--generators", type=int, default=1, metavar="N", help="load generators per gateway (default: 1)")
    add("--words", type=int, default=200, metavar="N", help="per prompt, half of them shared (default: 200)")
    add("--tokens", type=int, default=64, metavar="N", help="per answer (default: 64)")
    add("--duration-s", type=float, default=8.0, metavar="SECONDS", help="per point (default: 8)")
    add(
        "--warm-up-s",
        type=float,
        default=WARM_UP_S,
        metavar="SECONDS",
        help="per point, before that (default: 1.5)",
    )
    add("--rounds", type=int, default=1, metavar="N", help="loads of each point, one after the other (default: 1)")
    add("--max-running", type=int, default=256, metavar="N", help="sequences per step of a worker (default: 256)")
    add("--mock-speedup", type=float, default=0.0, metavar="X", help="0: without step times (default: 0)")
    add("--limit-s", type=float, default=260.0, metavar="SECONDS", help="no point begins after this (default: 260)")
    add("--all", action="store_true", help="short and long answers, one role after the other, and the broker alone")
    add("--json", default="", metavar="FILE", help="to write the figures to")
    add("--out", type=Path, default=None, metavar="FOLDER", help="for scale.json and scale.txt, after every point")
    return parser


if __name__ == "__main__":
    sys.exit(main())
