"""Writes numbered server-sent events, and leaves out those that a client has seen. Pure."""

from penstock.gateway.base.event_stream import invalid_event_id, parse_position


class EventWriter:
    """Collects the events of one push.

    Attributes:
        number: of the next event, from 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._first = 0
        self._out: list[bytes] = []

    def resume(self, last_event_id: str) -> None:
        """Skip everything up to this event; then write all of them.

        Raises:
            ServingError: not the id of an event of such an answer.
        """
        text = last_event_id.strip()
        if not text:
            raise invalid_event_id(last_event_id)
        self._first = parse_position(text, last_event_id) + 1

    @property
    def wanted(self) -> bool:
        """Whether the next event is one that the client has not seen."""
        return self.number >= self._first

    def write(self, kind: bytes, data: bytes) -> None:
        if self.wanted:
            self._out.append(b"id: %d\nevent: %b\ndata: %b\n\n" % (self.number, kind, data))
        self.number += 1

    def write_apart(self, kind: bytes, data: bytes) -> None:
        """An event without a number: the stream goes on elsewhere, and has another one in its place."""
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind, data))

    def take(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)
