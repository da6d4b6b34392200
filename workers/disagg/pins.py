"""Blocks pinned for other workers, each until its lease ends. Pure: time is an argument."""

from collections.abc import Callable

import msgspec

from penstock.workers.engines.base import Engine


class Pin(msgspec.Struct, eq=False):
    """The blocks of one ticket. ``free`` frees them, in the engine thread."""

    ticket: str
    pool: str
    target: str
    blocks: list[int]
    block_bytes: int
    expires: float
    free: Callable[[Engine], object]
    pushing: int = 0  # own transfers that read the blocks now


class Pins:
    """Open leases by ticket. A lease ends once: by ``release``, by ``expired`` or by ``clear``."""

    def __init__(self) -> None:
        self._open: dict[str, Pin] = {}
        self._ended: dict[str, Pin] = {}  # ended while they are pushed: freed after the push

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @property
    def blocks(self) -> int:
        return sum(len(pin.blocks) for pins in (self._open, self._ended) for pin in pins.values())

    def add(self, pin: Pin) -> None:
        assert pin.ticket not in self._open, f"ticket {pin.ticket} was issued twice"
        self._open[pin.ticket] = pin

    def get(self, ticket: str) -> Pin | None:
        """An open lease."""
        return self._open.get(ticket)

    def release(self, ticket: str) -> Pin | None:
        """End a lease; returns its pin if it was open and its blocks may be freed now."""
        pin = self._open.pop(ticket, None)
        return None if pin is None else self._unless_pushing(pin)

    def expired(self, now: float) -> list[tuple[Pin, bool]]:
        """End leases whose time has passed; each with whether its blocks may be freed now."""
        late = [pin for pin in self._open.values() if pin.expires <= now]
        for pin in late:
            del self._open[pin.ticket]
        return [(pin, self._unless_pushing(pin) is not None) for pin in late]

    def pushed(self, pin: Pin) -> Pin | None:
        """A push has ended; returns the pin if its lease has ended and nothing else reads the blocks."""
        pin.pushing -= 1
        if pin.pushing or pin.ticket not in self._ended:
            return None
        return self._ended.pop(pin.ticket)

    def clear(self) -> list[Pin]:
        """End all leases, whatever is in flight."""
        pins = [*self._open.values(), *self._ended.values()]
        self._open.clear()
        self._ended.clear()
        return pins

    def _unless_pushing(self, pin: Pin) -> Pin | None:
        if not pin.pushing:
            return pin
        self._ended[pin.ticket] = pin
        return None
