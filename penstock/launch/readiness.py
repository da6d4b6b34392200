"""Whether a starting deployment can serve: its workers are registered, and each gateway answers that it is ready."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec
from nats.aio.client import Client

from penstock.launch.fleet import registered
from penstock.launch.http import get, get_url
from penstock.launch.state import Running
from penstock.schemas.subjects import Subjects

_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


async def metrics(process: Running) -> dict[str, float]:
    """The sums of a process's metrics by name; empty if it does not answer."""
    parts = urlsplit(process.metrics_url)
    status, body = await get(parts.hostname or "", parts.port or 80, parts.path)
    values: dict[str, float] = defaultdict(float)
    if status == 200:
        for name, value in _SAMPLE.findall(body.decode(errors="replace")):
            values[name] += float(value)
    return dict(values)


class Readiness:
    """The processes that are not ready yet, and their answers.

    Args:
        workers: names of the workers to wait for.
        gateways: the URL of each, by its name.
        ready: called once for each process that is.
    """

    def __init__(
        self,
        workers: list[str],
        gateways: Mapping[str, str],
        ready: Callable[[str], None],
    ) -> None:
        self.waiting = dict.fromkeys(gateways, "does not answer yet")
        self.waiting |= dict.fromkeys(workers, "is not registered yet")
        self._workers = frozenset(workers)
        self._gateways = gateways
        self._ready = ready

    async def look(self, nc: Client, subjects: Subjects) -> None:
        """Ask once; processes that are ready are removed from ``waiting``."""
        if missing := self._workers & self.waiting.keys():
            for name in await registered(nc, subjects) & missing:
                self._done(name)
        for name, url in self._gateways.items():
            if name not in self.waiting:
                continue
            status, body = await get_url(url, "/health/ready")
            # Without workers of our own, others' may come later: gateways then only have to answer.
            if status == 200 or (status and not self._workers):
                self._done(name)
            elif status:
                self.waiting[name] = body.decode(errors="replace")[:300]

    def _done(self, name: str) -> None:
        del self.waiting[name]
        self._ready(name)


class ServedModel(msgspec.Struct):
    """A model of ``GET /v1/models``; ``root``: its canonical name."""

    id: str
    root: str = ""
    output_modalities: tuple[str, ...] = ("text",)

    @property
    def makes(self) -> str:
        """ "text", "image", "video" or "embedding"."""
        return next((kind for kind in self.output_modalities if kind != "text"), "text")


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def served_models(url: str) -> list[ServedModel]:
    """The models that a gateway lists; none where it wants a key."""
    status, body = await get_url(url, "/v1/models")
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(body, type=_Models).data
    return []
