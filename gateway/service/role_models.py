"""Models that workers of a role of their own serve (images, vectors), by name, from the registrations of those workers.

A model stays known after its last worker has left, so that a request that arrives while a worker is being replaced
waits in the queue instead of failing. A gateway that starts meanwhile cannot prepare a request for it, and learns from
the log that there is such a model.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.schemas import requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Registration, State
from penstock.schemas.subjects import token

MAX_MODELS = 256
LATELY_NS = 3_600_000_000_000  # a model whose last request is older counts as removed
LOOK_AGAIN_S = 5.0
RETRY_S = 5.0  # a worker is replaced in seconds

T = TypeVar("T")


class RoleModels(Generic[T]):
    """
    Args:
        role: of the workers.
        describe: what such a worker registers of its model; None: nothing, so it is left out.
    """

    def __init__(self, role: str, describe: Callable[[Registration], T | None]) -> None:
        self._role = role
        self._describe = describe
        self._known: dict[str, T] = {}
        self._workers: dict[str, Registration] = {}

    @property
    def known(self) -> Mapping[str, T]:
        """Models that are or were served, by each of their names; the worker that registered last counts."""
        return self._known

    def put(self, registration: Registration) -> None:
        """A worker registered, or renewed its registration."""
        if registration.role != self._role or (described := self._describe(registration)) is None:
            return
        self._workers[registration.worker] = registration
        for name in _names(registration):
            self._known[name] = described
        while len(self._known) > MAX_MODELS:
            del self._known[next(iter(self._known))]

    def remove(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def counts(self) -> Counter[str]:
        """Workers that take requests, by each name of their models."""
        workers = (each for each in self._workers.values() if each.state is State.ready)
        return Counter(name for each in workers for name in _names(each))

    def ready(self) -> dict[str, T]:
        """Models with a worker that takes requests, sorted by name."""
        workers = [each for each in self._workers.values() if each.state is State.ready]
        names = sorted({name for registration in workers for name in _names(registration)})
        return {name: self._known[name] for name in names if name in self._known}


def _names(registration: Registration) -> Iterable[str]:
    return (registration.model, *registration.aliases)


class ServedLately:
    """Whether a request for a model was accepted within the last hour, from the log. Answers are kept for 5 s."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._looked: OrderedDict[tuple[str, str], tuple[float, bool]] = OrderedDict()

    async def check(self, endpoint: str, name: str) -> None:
        """
        Args:
            endpoint: as in ``GenerateRequest``: a name may mean models of several kinds; "": any that generates text.
        Raises:
            ServingError: broker_unavailable: it was; or the log did not answer.
        """
        at, served = self._looked.get((endpoint, name), (0.0, False))
        if not at or time.monotonic() - at > LOOK_AGAIN_S:
            served = await self._look(endpoint, name)
            self._looked[endpoint, name] = (time.monotonic(), served)
            self._looked.move_to_end((endpoint, name))
            if len(self._looked) > MAX_MODELS:
                self._looked.popitem(last=False)
        if served:
            raise ServingError(
                Code.broker_unavailable,
                f"no worker of model {name[:200]!r} is there, and this gateway started after the last one had left, so "
                "it cannot prepare a request yet; try again once a worker is back",
                param="model",
                retry_after=RETRY_S,
            )

    async def _look(self, endpoint: str, name: str) -> bool:
        stream, subject = self._bus.subjects.stream("REQUESTS"), f"{self._bus.subjects.all('request')}"
        subject = subject.removesuffix(">") + f"{token(name)}.>"
        entry = await get_last(self._bus, stream, subject)
        if entry is None or entry.time_ns < self._bus.clock.now_ns() - LATELY_NS:
            return False
        try:
            request = requests.decode(entry.data)
            return request.endpoint == endpoint if endpoint else not request.output
        except msgspec.MsgspecError:  # of a later release
            return False
