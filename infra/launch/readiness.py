"""Whether a starting deployment can serve: its workers are registered, and each gateway answers that it is ready."""

import contextlib
from collections.abc import Callable, Mapping

import msgspec
from nats.aio.client import Client

from infra.launch.fleet import registered
from infra.launch.http import get_url
from schemas.subjects import Subjects


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


async def first_model(url: str, apart: bool) -> tuple[str, str] | None:
    """A model that is served, and what it makes: "text", "image", "video" or "embedding"; not text with ``apart``."""

    class Model(msgspec.Struct):
        id: str
        output_modalities: tuple[str, ...] = ("text",)

    class Models(msgspec.Struct):
        data: list[Model]

    status, body = await get_url(url, "/v1/models")
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):
            for model in msgspec.json.decode(body, type=Models).data:
                makes = next((kind for kind in model.output_modalities if kind != "text"), "text")
                if apart == (makes != "text"):
                    return model.id, makes
    return None
