"""Models that workers of a role of their own serve (images, vectors), by name, from the registrations of those workers.

A model stays known after its last worker has left, so that a request that arrives while a worker is being replaced
waits in the queue instead of failing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from schemas.fleet import Registration, State

MAX_MODELS = 256

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

    def ready(self) -> dict[str, T]:
        """Models with a worker that takes requests, sorted by name."""
        workers = [each for each in self._workers.values() if each.state is State.ready]
        names = sorted({name for registration in workers for name in _names(registration)})
        return {name: self._known[name] for name in names if name in self._known}


def _names(registration: Registration) -> Iterable[str]:
    return (registration.model, *registration.aliases)
