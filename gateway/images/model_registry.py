"""What the fleet's diffusion workers make, by model: learnt from their registrations.

A model stays known after its last worker has left, so that a request which comes while one is being replaced waits for
it like any other.
"""

from collections.abc import Iterable, Mapping

from schemas.fleet import Diffuser, Registration, State

ROLE = "diffusion"
REMEMBERED = 256


class DiffusionModelRegistry:
    """``put`` and ``left`` follow the fleet."""

    def __init__(self) -> None:
        self._known: dict[str, Diffuser] = {}
        self._workers: dict[str, Registration] = {}

    @property
    def known(self) -> Mapping[str, Diffuser]:
        """By each name of a model that is or was served; the last to register says what is made."""
        return self._known

    def put(self, registration: Registration) -> None:
        """A worker registered or renewed."""
        if registration.role != ROLE or registration.diffusion is None:
            return
        self._workers[registration.worker] = registration
        for name in _names(registration):
            self._known[name] = registration.diffusion
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def left(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def present(self) -> dict[str, Diffuser]:
        """Of models with a worker that takes requests, in the order of their names."""
        ready = [each for each in self._workers.values() if each.state is State.ready]
        names = sorted({name for registration in ready for name in _names(registration)})
        return {name: self._known[name] for name in names if name in self._known}


def _names(registration: Registration) -> Iterable[str]:
    return (registration.model, *registration.aliases)
