"""HTML of the dashboard's pages. Everything that comes from requests is escaped by the templates."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from penstock.cli.figures import clock, show_duration, show_size, span
from penstock.log_tools.requests.find_requests import LoggedRequest
from penstock.log_tools.requests.slow import HeatMap, Slow
from penstock.log_tools.timeline.request_timeline import TicketLease
from penstock.operate.dashboard.live import Moment
from penstock.operate.observe import DeploymentSnapshot, away, gateways_line, tenant_rows, unsteady
from penstock.schemas.summary import STATES

WIDTH, HEIGHT = 240, 48
PAD = 2


def sparkline(values: Sequence[float | None], *, label: str) -> str:
    """A line through ``values`` from left to right; where a value is None there is a gap.

    Args:
        label: what a screen reader says of it.
    """
    numbers = [value for value in values if value is not None]
    top = max(numbers, default=0.0) or 1.0
    step = (WIDTH - 2 * PAD) / max(1, len(values) - 1)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = HEIGHT - PAD - (HEIGHT - 2 * PAD) * value / top
        lines[-1].append(f"{PAD + index * step:.1f},{y:.1f}")
    shapes = "".join(_shape(points) for points in lines if points)
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{shapes}</svg>'
    )


def _shape(points: Sequence[str]) -> str:
    first, last = points[0].partition(",")[0], points[-1].partition(",")[0]
    line = " ".join(points)
    if len(points) == 1:
        return f'<polyline class="line" points="{line} {line}"/>'
    area = f"{first},{HEIGHT} {line} {last},{HEIGHT}"
    return f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>'


PER_PAGE = 100
MADE_WITH = ("revision", "engine", "build", "adapter")  # columns where requests differ in it


def _meter(part: float, whole: float, label: str) -> Markup:
    """A share as a bar and a percentage."""
    if not whole:
        return Markup("–")
    share = min(1.0, part / whole)
    return Markup(
        '<span class="meter" role="meter" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{}" aria-label="{}">'
        '<span class="{}" style="width:{}%"></span></span> {}'
    ).format(f"{share:.0%}"[:-1], label, "fill high" if share >= 0.8 else "fill", f"{share * 100:.1f}", f"{share:.0%}")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"meter": _meter}
    made.filters |= {
        "ms": lambda value: span(value) or "–",
        "share": _share,
        "size": show_size,
        "duration": show_duration,
        "clock": lambda at_ns: clock(at_ns, time.time_ns()),
    }
    return made


_pages = _environment()


def overview(moment: Moment, *, stopped: bool, namespace: str) -> str:
    """The first page."""
    sections = live_sections(moment) if moment.history else {}
    return _render("overview.html", sections=sections, stopped=stopped, namespace=namespace, here="overview")


def live_sections(moment: Moment) -> dict[str, str]:
    """The HTML of the parts of the overview that change, by the id of their element."""
    latest = moment.history[-1]
    values: dict[str, Any] = {"seen": latest, "rates": latest.rates, "charts": charts(moment.history)}
    values["tenants"] = tenant_rows(latest.queues)
    values["unsteady"] = [*away(latest.cells), *unsteady(latest.workers)]
    values["gateways"] = "" if latest.gateways is None else gateways_line(latest.gateways, latest.at_ns)
    sections = {name: _render(f"live/{name}.html", **values) for name in _LIVE}
    return sections | {"problem": _render("live/problem.html", problem=moment.problem)}


_LIVE = ("summary", "workers", "queues", "streams", "recent")


def charts(history: Sequence[DeploymentSnapshot]) -> dict[str, Markup]:
    """One line for each rate that the summary shows."""
    series: dict[str, list[float | None]] = {
        "ended": [each.rates.ended_per_s for each in history],
        "tokens": [each.rates.output_tokens_per_s for each in history],
        "ttft": [each.rates.ttft_p95_ms for each in history],
        "hits": [each.rates.hit_rate for each in history],
        "waiting": [float(sum(queue.held + queue.unread for queue in each.queues)) for each in history],
        "failed": [each.rates.failed_share for each in history],
    }
    labels = {
        "ended": "requests per second",
        "tokens": "output tokens per second",
        "ttft": "time to first token",
        "hits": "share of cached prompt tokens",
        "waiting": "requests that wait for a worker",
        "failed": "share of failed requests",
    }
    return {name: Markup(sparkline(values, label=f"{labels[name]}, lately")) for name, values in series.items()}


class Searched(Protocol):
    """What a search for a text has found: ``found`` by request; it has come to those that ended at ``last_ns``."""

    found: dict[str, str]
    last_ns: int


def requests(
    found: Sequence[LoggedRequest],
    query: dict[str, str],
    *,
    older: str,
    error: str,
    namespace: str,
    search: Searched | None = None,
) -> str:
    """A page of the list.

    Args:
        query: the filters, by the names of the form's fields.
        older: sequences before which the next page begins; "": this is the last one.
    """
    return _render(
        "requests.html",
        found=[each.summary for each in found],
        query=query,
        states=STATES,
        older=older,
        error=error,
        differing=[name for name in MADE_WITH if len({getattr(each.summary, name) for each in found} - {""}) > 1],
        matches=search.found if search is not None else {},
        searched_ns=search.last_ns if search is not None and query.get("text") else 0,
        namespace=namespace,
        here="requests",
    )


def slow(
    compared: Slow | None, heat: HeatMap | None, query: dict[str, str], *, note: str, error: str, namespace: str
) -> str:
    """Where the slow requests differ.

    Args:
        query: the filters, and "why": what is compared.
        note: which requests were read, if not all.
    """
    filters = {name: value for name, value in query.items() if value and name not in ("why", "since", "until")}
    return _render(
        "slow.html",
        compared=compared,
        heat=_heat(heat, filters, query["why"]) if heat is not None else None,
        query=query,
        note=note,
        error=error,
        namespace=namespace,
        here="requests",
    )


class HeatCell(NamedTuple):
    """A cell of the heat map: its place, how dark it is (0 to 1), what it says, and the list of its requests."""

    x: int
    y: int
    shade: float
    title: str
    url: str


class Heat(NamedTuple):
    """What the template draws. ``rows``, ``columns``: their labels, with their places."""

    width: int
    height: int
    cells: list[HeatCell]
    rows: list[tuple[int, str]]
    columns: list[tuple[int, str]]


def _heat(heat: HeatMap, filters: dict[str, str], why: str) -> Heat:
    most = max(map(max, heat.counts))
    least = {"slow": "min_duration", "ttft": "min_ttft"}.get(why)
    cells = []
    for row, counts in enumerate(heat.counts):
        for column, count in enumerate(counts):
            if not count:
                continue
            begin = datetime.fromtimestamp(heat.begins_s[column])
            end = datetime.fromtimestamp(heat.begins_s[column] + heat.step_s)
            chosen = filters | {"since": begin.isoformat(), "until": end.isoformat()}
            chosen |= {least: f"{heat.from_ms[row]:g}ms"} if least else {}
            title = f"{count} from {begin:%H:%M:%S}, {span(heat.from_ms[row])} or more"
            shade = 0.15 + 0.85 * math.log1p(count) / math.log1p(most)
            url = f"/requests?{urlencode(chosen)}"
            cells.append(HeatCell(column, len(heat.counts) - 1 - row, round(shade, 2), title, url))
    rows = [(len(heat.from_ms) - 1 - row, span(each)) for row, each in enumerate(heat.from_ms)]
    every = max(1, len(heat.begins_s) // 8)
    form = "%H:%M:%S" if heat.step_s < 60 else "%H:%M" if heat.step_s < 3600 else "%m-%d %H:%M"
    columns = [
        (place, f"{datetime.fromtimestamp(at):{form}}") for place, at in enumerate(heat.begins_s) if place % every == 0
    ]
    return Heat(len(heat.begins_s), len(heat.from_ms), cells, rows, columns)


def request(request_id: str, body: Markup, *, acts: Sequence[str], mark: str, namespace: str) -> str:
    """The page of one request.

    Args:
        acts: what the operator may do: "terminate", "again".
        mark: of the forms for that.
    """
    return _render("request.html", id=request_id, body=body, acts=acts, mark=mark, namespace=namespace, here="requests")


def leases(found: Mapping[str, TicketLease], now_ns: int, *, stopped: bool, namespace: str) -> str:
    """KV blocks that workers hold for each other, open leases first."""
    ordered = sorted(found.items(), key=lambda each: (not each[1].is_open(now_ns), -each[1].offer.at_ns))
    return _render(
        "leases.html",
        found=ordered[:PER_PAGE],
        open=sum(lease.is_open(now_ns) for lease in found.values()),
        count=len(found),
        now_ns=now_ns,
        stopped=stopped,
        namespace=namespace,
        here="leases",
    )


def problem(title: str, text: str, *, namespace: str) -> str:
    """An error page."""
    return _render("problem.html", title=title, text=text, namespace=namespace, here="")


def _render(name: str, **values: Any) -> str:
    return _pages.get_template(name).render(values)
