"""Diffusion models by name, from the registrations of their workers.

A model stays known after its last worker has left, so that a request that arrives while a worker is being replaced
waits in the queue instead of failing.
"""

from collections.abc import Iterable, Mapping

from schemas.fleet import Diffuser, Registration, State

ROLE = "diffusion"
MAX_MODELS = 256


class DiffusionModelRegistry:
    def __init__(self) -> None:
        self._known: dict[str, Diffuser] = {}
        self._workers: dict[str, Registration] = {}

    @property
    def known(self) -> Mapping[str, Diffuser]:
        """Models that are or were served, by each of their names; the worker that registered last counts."""
        return self._known

    def put(self, registration: Registration) -> None:
        """A worker registered, or renewed its registration."""
        if registration.role != ROLE or registration.diffusion is None:
            return
        self._workers[registration.worker] = registration
        for name in _names(registration):
            self._known[name] = registration.diffusion
        while len(self._known) > MAX_MODELS:
            del self._known[next(iter(self._known))]

    def remove(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def ready(self) -> dict[str, Diffuser]:
        """Models with a worker that takes requests, sorted by name."""
        workers = [each for each in self._workers.values() if each.state is State.ready]
        names = sorted({name for registration in workers for name in _names(registration)})
        return {name: self._known[name] for name in names if name in self._known}


def _names(registration: Registration) -> Iterable[str]:
    return (registration.model, *registration.aliases)
