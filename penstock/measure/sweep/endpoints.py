"""The servers that a sweep loads, by name: their addresses, and those of their metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.launch.state import DeploymentState, read_state
from penstock.measure.generator.target import BadTarget, HttpTarget, parse_target

NAME = re.compile(r"[a-zA-Z0-9_-]+")
RESERVED = ("plots",)


class BadEndpoint(ValueError):
    """An endpoint that cannot be loaded; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A page of Prometheus metrics."""

    target: HttpTarget
    path: str


@dataclass(frozen=True, slots=True)
class SweptEndpoint:
    """A server under load. ``gpus`` 0: not given."""

    name: str
    target: HttpTarget
    pages: tuple[MetricsPage, ...]
    gpus: int = 0


def parse_endpoints(
    named: Sequence[str],
    metrics: Sequence[str] = (),
    gpus: Sequence[int] = (),
    *,
    api_key: str = "",
    insecure: bool = False,
) -> list[SweptEndpoint]:
    """Endpoints in the order given.

    Args:
        named: each ``NAME=URL``, or ``NAME=FILE`` with the ``state.json`` of ``penstock up``.
        metrics: further pages, each ``NAME=URL``; without a path the page is ``/metrics``.
        gpus: of each endpoint, or one number for all.

    Raises:
        BadEndpoint: a name or URL that cannot be used, or a name twice.
    """
    if len(gpus) not in (0, 1, len(named)):
        raise BadEndpoint(f"--gpus: {len(gpus)} numbers for {len(named)} endpoints; give one, or one for each")
    if unknown := {name_of(each, "--metrics") for each in metrics} - {name_of(each, "--endpoint") for each in named}:
        raise BadEndpoint(f"--metrics {sorted(unknown)[0]}: no endpoint has this name")
    endpoints: list[SweptEndpoint] = []
    for number, each in enumerate(named):
        name = name_of(each, "--endpoint")
        if any(name == other.name for other in endpoints):
            raise BadEndpoint(f"--endpoint {name}: named twice")
        more = [_page(value.partition("=")[2], "--metrics") for value in metrics if value.partition("=")[0] == name]
        try:
            target, pages = _located(each.partition("=")[2], api_key, insecure)
        except BadTarget as error:
            raise BadEndpoint(f"--endpoint {name}={error}") from None
        count = 0 if not gpus else gpus[0] if len(gpus) == 1 else gpus[number]
        endpoints.append(SweptEndpoint(name, target, (*pages, *more), count))
    return endpoints


def name_of(value: str, flag: str) -> str:
    """The name in ``NAME=…``.

    Raises:
        BadEndpoint: there is none, or it is no folder's name that we use.
    """
    name, mark, url = value.partition("=")
    if not mark or not url:
        raise BadEndpoint(f"{flag} {value}: expected NAME=URL")
    if not NAME.fullmatch(name):
        raise BadEndpoint(f"{flag} {value}: a name has letters, digits, '_' and '-' only")
    if name in RESERVED:
        raise BadEndpoint(f"{flag} {value}: the name {name!r} is reserved")
    return name


def _located(value: str, api_key: str, insecure: bool) -> tuple[HttpTarget, list[MetricsPage]]:
    if not value.endswith(".json") or "//" in value:
        target = parse_target(value, api_key=api_key, insecure=insecure)
        return target, [MetricsPage(target, "/metrics")]
    state = _state(value)
    target = parse_target(state.http_url, api_key=api_key)
    own = [process.metrics_url for process in state.processes if process.metrics_url]
    return target, [MetricsPage(target, "/metrics"), *(_page(url, value) for url in own)]


def _state(path: str) -> DeploymentState:
    try:
        return read_state(Path(path))
    except FileNotFoundError:
        raise BadTarget(f"{path}: no deployment runs there; start one with `penstock up`, or name a URL") from None
    except (OSError, msgspec.DecodeError) as error:
        raise BadTarget(f"{path}: {error}") from None


def _page(url: str, flag: str) -> MetricsPage:
    try:
        target = parse_target(url)
    except BadTarget as error:
        raise BadEndpoint(f"{flag}: {error}") from None
    path = urlsplit(url if "//" in url else f"//{url}").path or "/metrics"
    return MetricsPage(HttpTarget(target.host, target.port, "", target.tls), path)
