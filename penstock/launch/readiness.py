"""Checks that a starting deployment can serve: its workers are registered, and each gateway answers that it is ready.

Registrations are read once: for the start of a deployment, not for serving.
"""

import asyncio
import contextlib
import re
import ssl
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.launch.state import Running
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import Registration

_MOST = 1 << 20


async def get(host: str, port: int, path: str, timeout_s: float = 2.0, *, tls: bool = False) -> tuple[int, bytes]:
    """Status and body of a GET; status 0: no answer.

    Args:
        tls: over HTTPS, to whichever certificate: nothing secret is sent.
    """
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=_unverified() if tls else None)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
                answer = await reader.read(_MOST)
                while more := await reader.read(_MOST):
                    answer += more
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split(None, 2)[1]), body
    return 0, b""


async def get_url(url: str, path: str = "") -> tuple[int, bytes]:
    """The same for a URL, with ``path`` after it."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return await get(parts.hostname or "", parts.port or (443 if tls else 80), parts.path + path, tls=tls)


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def reachable(host: str) -> str:
    """Where to reach a server that listens on ``host``: one cannot connect to "any address"."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    name, scheme = reachable(host), "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


async def metrics(process: Running) -> dict[str, float]:
    """The sums of a process's metrics by name; empty if it does not answer."""
    parts = urlsplit(process.metrics_url)
    status, body = await get(parts.hostname or "", parts.port or 80, parts.path)
    values: dict[str, float] = defaultdict(float)
    if status == 200:
        for name, value in SAMPLE.findall(body.decode(errors="replace")):
            values[name] += float(value)
    return dict(values)


class _Health(msgspec.Struct, frozen=True):
    """Of a gateway's ``/health/ready``; ``cells``: those that take no request, with the reason."""

    status: str
    cells: dict[int, str] = {}


_decode_health = msgspec.json.Decoder(_Health).decode


class Readiness:
    """The processes that are not ready yet, and their answers.

    Args:
        workers: names of the workers to wait for.
        gateways: the URL of each, by its name.
        ready: called once for each process that is.
        cells: numbers of those that gateways are to use; others may have no workers.
        pid_of: the process of a worker: the lease of a killed one of the same name lasts for seconds. None: any;
            so is a registration that does not say its process.
    """

    def __init__(
        self,
        workers: list[str],
        gateways: Mapping[str, str],
        ready: Callable[[str], None],
        cells: Collection[int] = (),
        pid_of: Callable[[str], int | None] = lambda worker: None,
    ) -> None:
        self.waiting = dict.fromkeys(gateways, "does not answer yet")
        self.waiting |= dict.fromkeys(workers, "is not registered yet")
        self._workers = frozenset(workers)
        self._gateways = gateways
        self._ready = ready
        self._cells = frozenset(cells)
        self._pid_of = pid_of

    async def look(self, cells: Sequence[Bus]) -> None:
        """Ask once; processes that are ready are removed from ``waiting``."""
        for bus in cells:
            if missing := self._workers & self.waiting.keys():
                found = {(each.name, each.pid) for each in await _registered(bus) if each.name in missing}
                for name in {name for name, pid in found if not pid or self._pid_of(name) in (None, pid)}:
                    self._done(name)
        for name, url in self._gateways.items():
            if name not in self.waiting:
                continue
            status, body = await get_url(url, "/health/ready")
            try:
                health = _decode_health(body)
            except msgspec.DecodeError:  # a metrics page, for one, answers every path with 200
                if status:
                    self.waiting[name] = f"another process answers on {url}"
                continue
            # Without workers of our own, others' may come later: gateways then only have to answer.
            if health.status != "ready" and self._workers:
                self.waiting[name] = body.decode(errors="replace")[:300]
            elif away := self._cells & health.cells.keys():
                self.waiting[name] = ", ".join(f"cell {each}: {health.cells[each]}" for each in sorted(away))
            else:
                self._done(name)

    def _done(self, name: str) -> None:
        del self.waiting[name]
        self._ready(name)


class ListedModel(msgspec.Struct):
    """A model of ``GET /v1/models``; ``root``: its canonical name."""

    id: str
    root: str = ""
    output_modalities: tuple[str, ...] = ("text",)

    @property
    def makes(self) -> str:
        """ "text", "image", "video", "embedding" or "score"."""
        return next((kind for kind in self.output_modalities if kind != "text"), "text")


class _Models(msgspec.Struct):
    data: list[ListedModel]


async def served_models(url: str) -> list[ListedModel] | None:
    """The models that a gateway lists; None: it wants a key."""
    status, body = await get_url(url, "/v1/models")
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(body, type=_Models).data
    return None if status == 401 else []


async def registered_models(cells: Iterable[Bus]) -> list[ListedModel]:
    """The models that workers serve; for where no gateway lists them without a key."""
    found: dict[str, ListedModel] = {}
    for each in [each for bus in cells for each in await _registered(bus)]:
        found.setdefault(each.model, ListedModel(each.model, each.model, (each.output or "text",)))
    return list(found.values())


async def _registered(bus: Bus) -> list[Registration]:
    try:
        return await registrations(bus)
    except ServingError:  # the stream may have no leader yet
        return []
