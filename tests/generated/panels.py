"""Grafana's dashboard format, made from a few plain values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SCHEMA = 39  # Grafana 10.4 and later; earlier ones read it, and ignore what they do not know
WIDTH = 24  # columns of a dashboard
HEIGHT = 8  # rows of a panel
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECT = 'namespace=~"$namespace",model=~"$model"'
PLACE = 'namespace=~"$namespace"'  # of series without a model


class Query(NamedTuple):
    """A PromQL expression, and how its series are named (``{{label}}``)."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One diagram.

    Attributes:
        unit: Grafana's name of it: ``s``, ``bytes``, ``percentunit``, ``reqps``, ``short``.
        steps: from which value on it is yellow and red; empty: no colours.
        kind: ``timeseries`` or ``stat``.
        needs: what exports the series, where it is not Penstock itself.
        columns: of the 24 of a dashboard.
    """

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    about: str = ""
    steps: tuple[float, float] | None = None
    kind: str = "timeseries"
    needs: str = ""
    columns: int = 8


class Dashboard(NamedTuple):
    """``name``: of the file, and the identity in links."""

    name: str
    title: str
    panels: Sequence[Panel]


def rate(name: str, by: str = "", select: str = SELECT) -> str:
    """The sum of a counter's rate."""
    return f"sum{_by(by)} (rate({name}{{{select}}}[$__rate_interval]))"


def mean(name: str, by: str = "", select: str = SELECT) -> str:
    """The mean of a histogram."""
    return share(f"{name}_sum", f"{name}_count", by, select)


def share(part: str, whole: str, by: str = "", select: str = SELECT) -> str:
    """One counter's rate as a share of another's."""
    return f"{rate(part, by, select)} / {rate(whole, by, select)}"


def quantile(q: float, name: str, by: str = "", select: str = SELECT) -> str:
    """A quantile of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{{select}}}[$__rate_interval])))"


def total(name: str, by: str = "", select: str = SELECT) -> str:
    """The sum of a gauge."""
    return f"sum{_by(by)} ({name}{{{select}}})"


def most(name: str, by: str = "", select: str = SELECT) -> str:
    """The maximum of a gauge."""
    return f"max{_by(by)} ({name}{{{select}}})"


def latency(name: str, by: str = "", select: str = SELECT) -> list[Query]:
    """Mean, P50, P95 and P99 of a histogram."""
    prefix = f"{{{{{by}}}}} " if by else ""
    quantiles = [Query(quantile(q, name, by, select), f"{prefix}P{round(q * 100)}") for q in (0.5, 0.95, 0.99)]
    return [Query(mean(name, by, select), f"{prefix}mean"), *quantiles]


def by(
    title: str, function: Callable[..., str], name: str, label: str, select: str, unit: str = "short", **more: Any
) -> Panel:
    """A diagram with a line for each value of one label.

    Args:
        function: ``rate``, ``total`` or ``most`` of the metric ``name``.
        more: of the ``Panel``.
    """
    return Panel(title, [Query(function(name, label, select), f"{{{{{label}}}}}")], unit, **more)


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def to_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana imports it, with variables for the data source, the namespace and the model."""
    return {
        "uid": f"penstock-{dashboard.name}",
        "title": f"Penstock / {dashboard.title}",
        "tags": ["penstock"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "links": [
            {"type": "dashboards", "tags": ["penstock"], "title": "Penstock", "asDropdown": True, "keepTime": True}
        ],
        "panels": list(_placed(dashboard.panels)),
    }


def _variables() -> Iterator[Mapping[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, label, series in (
        ("namespace", "Namespace", "penstock_gateway_open_requests"),
        ("model", "Model", 'penstock_gateway_open_requests{namespace=~"$namespace"}'),
    ):
        query = f"label_values({series}, {name})"
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _placed(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.columns > WIDTH:
            x, y = 0, y + HEIGHT
        yield _panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.columns, "h": HEIGHT}}
        x += panel.columns


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    about = ". ".join(filter(None, (panel.about.rstrip("."), f"Needs {panel.needs}" if panel.needs else "")))
    return {
        "id": number,
        "title": panel.title,
        "description": about,
        "type": panel.kind,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(query, chr(ord("A") + index)) for index, query in enumerate(panel.queries)],
    }


def _field(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for colour, value in zip(("yellow", "red"), panel.steps or (), strict=False):
        steps.append({"color": colour, "value": value})
    custom = {"fillOpacity": 8, "showPoints": "never", "thresholdsStyle": {"mode": "line" if panel.steps else "off"}}
    drawing = {"custom": custom} if panel.kind == "timeseries" else {}
    return {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}} | drawing


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom"}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background" if panel.steps else "value"}


def _target(query: Query, ref: str) -> dict[str, Any]:
    return {"refId": ref, "expr": query.expr, "legendFormat": query.legend or "__auto", "datasource": SOURCE}
