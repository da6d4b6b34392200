"""What this worker holds for others, and until when. Pure: time is an argument."""

from collections.abc import Callable

import msgspec

from workers.engines.base import Engine


class Pin(msgspec.Struct, eq=False):
    """The blocks behind one ticket. ``free`` lets go of them, in the engine's thread."""

    ticket: str
    pool: str
    target: str
    blocks: list[int]
    block_bytes: int
    expires: float
    free: Callable[[Engine], object]
    pushing: int = 0  # transfers of ours that read the blocks right now


class Pins:
    """Open leases by ticket. A lease ends once: by ``release``, by ``expired`` or by ``clear``."""

    def __init__(self) -> None:
        self._open: dict[str, Pin] = {}
        self._ended: dict[str, Pin] = {}  # while they are pushed: their blocks follow

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
        """End a lease; its pin if it was open and the blocks may be let go of now."""
        pin = self._open.pop(ticket, None)
        return None if pin is None else self._unless_pushing(pin)

    def expired(self, now: float) -> list[tuple[Pin, bool]]:
        """Leases that end now, each with whether its blocks may be let go of already."""
        late = [pin for pin in self._open.values() if pin.expires <= now]
        for pin in late:
            del self._open[pin.ticket]
        return [(pin, self._unless_pushing(pin) is not None) for pin in late]

    def pushed(self, pin: Pin) -> Pin | None:
        """A transfer out of the blocks has ended; the pin if its lease ended too and nothing else reads them."""
        pin.pushing -= 1
        if pin.pushing or pin.ticket not in self._ended:
            return None
        return self._ended.pop(pin.ticket)

    def clear(self) -> list[Pin]:
        """All leases end, whatever is under way."""
        pins = [*self._open.values(), *self._ended.values()]
        self._open.clear()
        self._ended.clear()
        return pins

    def _unless_pushing(self, pin: Pin) -> Pin | None:
        if not pin.pushing:
            return pin
        self._ended[pin.ticket] = pin
        return None
