"""How often workers lost their lease lately, by the names that they keep over their lives. Pure."""

from collections.abc import Iterable

from schemas.routers import LostLeases

WINDOW_NS = 600_000_000_000
NAMES = 16  # in a router's lease, which stays small
REMEMBERED = 10_000  # losses

Loss = tuple[str, str, str, int]  # name, role and model of the worker; Unix time, ns


class LeaseLosses:
    """Of the last ten minutes. A worker that leaves in order has lost nothing."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []  # oldest first

    def add(self, name: str, role: str, model: str, at_ns: int) -> None:
        self._losses.append((name, role, model, at_ns))
        del self._losses[:-REMEMBERED]

    def recent(self, now_ns: int) -> tuple[LostLeases, ...]:
        """Workers by their losses, most first."""
        if not self._losses:
            return ()
        self._losses = [loss for loss in self._losses if loss[3] > now_ns - WINDOW_NS]
        found: dict[str, LostLeases] = {}
        for name, role, model, at_ns in self._losses:
            before = found.get(name)
            found[name] = LostLeases(name, role, model, 1 + (before.count if before is not None else 0), at_ns)
        return tuple(sorted(found.values(), key=lambda each: (-each.count, each.worker))[:NAMES])

    def part(self) -> tuple[Loss, ...]:
        """For a snapshot."""
        return tuple(self._losses)

    def update(self, losses: Iterable[Loss]) -> None:
        """Continue from a snapshot."""
        self._losses = sorted({*losses, *self._losses}, key=lambda loss: loss[3])
