"""Draws our Grafana dashboards from a Prometheus, without Grafana: a picture for each dashboard.

    python -m tests.perf.pictures --prometheus http://127.0.0.1:9090 --minutes 5 --out pictures

It reads the same JSON files, queries and units as Grafana does. The look is its own. Needs ``penstock[bench]``.
"""

import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.configs.flags import Parser
from penstock.deploy.monitoring import GRAFANA, wrong_url

POINTS = 120  # of a line
TIMEOUT_S = 20.0
WIDTH_INCHES, ROW_INCHES, TITLE_INCHES = 13.0, 0.32, 0.5
_SCALES = {  # Grafana's unit -> (factor, what is written at the axis)
    "s": (1e3, "ms"),
    "ms": (1.0, "ms"),
    "percentunit": (100.0, "%"),
    "bytes": (1 / (1 << 20), "MiB"),
    "Bps": (1 / (1 << 20), "MiB/s"),
    "binBps": (1 / (1 << 20), "MiB/s"),
    "reqps": (1.0, "per second"),
}


class Line(NamedTuple):
    """A series: ``points`` are (Unix time, value)."""

    name: str
    points: tuple[tuple[float, float], ...]


class Span(NamedTuple):
    """The time that is drawn, as Unix times, and the seconds between two points."""

    start: float
    end: float
    step: float


def run(argv: Sequence[str]) -> int:
    """Write the pictures; 1 if Prometheus does not answer."""
    parser = Parser(prog="python -m tests.perf.pictures", description="draw the dashboards' panels")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=5.0, help="until now (default: %(default)s)")
    parser.add_argument("--rate", default="30s", help="window of rates (default: %(default)s)")
    parser.add_argument("--out", default="pictures", help="folder (default: %(default)s)")
    parser.add_argument("dashboards", nargs="*", metavar="NAME", help="such as health; default: all")
    args = parser.parse_args(argv)
    if problem := wrong_url(args.prometheus):
        print(f"--prometheus {args.prometheus}: {problem}", file=sys.stderr)
        return 1
    now = time.time()
    span = Span(now - 60 * args.minutes, now, max(1.0, 60 * args.minutes / POINTS))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    wanted = {"namespace": ".*", "model": ".*", "__rate_interval": args.rate}
    for path in sorted(GRAFANA.glob("*.json")):
        if args.dashboards and path.stem not in args.dashboards:
            continue
        board = json.loads(path.read_text(encoding="utf-8"))
        try:
            lines = {panel["id"]: lines_of(args.prometheus, panel, span, wanted) for panel in board["panels"]}
        except (OSError, ValueError) as error:
            print(f"{args.prometheus}: {error}", file=sys.stderr)
            return 1
        draw(board, lines, span, out / f"dashboard-{path.stem}.png")
        print(
            f"{out / f'dashboard-{path.stem}.png'}: {sum(map(bool, lines.values()))} of {len(lines)} panels have data"
        )
    return 0


def lines_of(url: str, panel: Mapping[str, Any], span: Span, variables: Mapping[str, str]) -> list[Line]:
    """The series of a panel's queries.

    Raises:
        OSError: Prometheus does not answer, or refuses a query.
    """
    found = []
    for target in panel.get("targets", ()):
        asked = {"query": filled(target["expr"], variables), "start": span.start, "end": span.end, "step": span.step}
        address = f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            results = json.loads(answer.read())["data"]["result"]
        for result in results:
            points = tuple((float(at), float(value)) for at, value in result["values"] if value != "NaN")
            if points:
                found.append(Line(named(target.get("legendFormat", ""), result["metric"]), points))
    return found


def filled(expr: str, variables: Mapping[str, str]) -> str:
    """A query with Grafana's variables replaced."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: variables.get(match[1] or match[2], match[0]), expr)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """The name of a series, as its panel's legend says."""
    if not legend:
        return ", ".join(f"{key}={value}" for key, value in labels.items() if key != "__name__")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend)


def draw(board: Mapping[str, Any], lines: Mapping[int, Sequence[Line]], span: Span, path: Path) -> None:
    """Draw a dashboard, each panel where Grafana has it."""
    import matplotlib.pyplot as plt

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    inches = ROW_INCHES * rows + TITLE_INCHES
    figure = plt.figure(figsize=(WIDTH_INCHES, inches), dpi=72)
    figure.suptitle(board["title"], x=0.01, ha="left", fontsize=12, weight="bold")
    for panel in board["panels"]:
        at = panel["gridPos"]
        bottom = 1 - (TITLE_INCHES + ROW_INCHES * (at["y"] + at["h"]) - 0.25) / inches
        place = (at["x"] / 24 + 0.03, bottom, at["w"] / 24 - 0.04, (ROW_INCHES * at["h"] - 0.6) / inches)
        axis = figure.add_axes(place)
        factor, unit = _SCALES.get(panel["fieldConfig"]["defaults"].get("unit", ""), (1.0, ""))
        axis.set_title(f"{panel['title']}{f' ({unit})' if unit else ''}", fontsize=8, loc="left")
        for line in lines[panel["id"]]:
            axis.plot([(at_s - span.end) / 60 for at_s, _ in line.points], [v * factor for _, v in line.points],
                      linewidth=1.1, label=line.name.strip()[:28] or "value")  # fmt: skip
        axis.set_xlim((span.start - span.end) / 60, 0)
        axis.tick_params(labelsize=6)
        axis.grid(alpha=0.25)
        if lines[panel["id"]]:
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=5.5, loc="upper left", frameon=False, ncols=2)
        else:
            axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", fontsize=7, color="gray")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
