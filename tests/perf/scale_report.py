"""The points and figures of ``tests.perf.scale``, and their tables."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.cli.terminal import stdout
from tests.perf.broker import MESSAGES, BrokerFigures

ROLES = ("gateway", "router", "worker", "nats")
WIDTH = 150


_POINT = re.compile(r"(\d+):(\d+):(\d+)(?:x(\d+)(?:/(\d+))?)?")


class Point(NamedTuple):
    """The number of processes of each role.

    Attributes:
        cells: so many deployments, each with all of these processes and a namespace of its own.
        brokers: that the cells are divided among.
    """

    gateways: int
    routers: int
    workers: int
    cells: int = 1
    brokers: int = 1

    @classmethod
    def parse(cls, text: str) -> "Point":
        """``GATEWAYS:ROUTERS:WORKERS``, and perhaps ``xCELLS`` or ``xCELLS/BROKERS``.

        Raises:
            ValueError: it is not that, or a number is 0.
        """
        matched = _POINT.fullmatch(text)
        numbers = [int(each or 1) for each in matched.groups()] if matched else [0]
        if min(numbers) < 1:
            raise ValueError(
                f"{text!r}: name a point as GATEWAYS:ROUTERS:WORKERS, such as 4:1:8, or in cells, as 2:1:2x4"
            )
        return cls(*numbers)

    @property
    def row(self) -> tuple[str, ...]:
        cells = str(self.cells) if self.brokers == 1 else f"{self.cells} on {self.brokers} brokers"
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
