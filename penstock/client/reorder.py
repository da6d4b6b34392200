"""Puts the messages of one answer in order: each once, without gaps. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

MAX_AHEAD = 4096  # messages kept while earlier ones are missing; later ones are read again

HEADER_SEQ = "Penstock-Seq"
HEADER_FINAL = "Penstock-Final"
HEADER_ERROR = "Penstock-Error"
HEADER_RECORD = "Penstock-Record"
HEADER_REQUEST = "Penstock-Request-Id"


class Message(NamedTuple):
    """One message of an answer. ``record``: the whole answer, which replaces what came before."""

    seq: int
    body: bytes
    final: bool = False
    error: str = ""
    record: bool = False
    request: str = ""


def message_of(headers: Mapping[str, str], body: bytes) -> Message | None:
    """None: it has no number, so it is not part of an answer."""
    seq = headers.get(HEADER_SEQ, "")
    if not (seq.isascii() and seq.isdigit()):
        return None
    return Message(
        int(seq),
        body,
        HEADER_FINAL in headers,
        headers.get(HEADER_ERROR, ""),
        HEADER_RECORD in headers,
        headers.get(HEADER_REQUEST, ""),
    )


class ReorderBuffer:
    """Takes messages in any order, from several sources; returns them by number."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.ended = False
        self._ahead: dict[int, Message] = {}

    def take(self, message: Message) -> list[Message]:
        """Add a message; returns those that are next in order."""
        if self.ended:
            return []
        if message.record:
            return self._end([message])
        if message.seq != self.next:
            if message.seq > self.next and (len(self._ahead) < MAX_AHEAD or message.seq in self._ahead):
                self._ahead[message.seq] = message
            return []
        ready = []
        following: Message | None = message
        while following is not None:
            ready.append(following)
            self.next += 1
            if following.final:
                return self._end(ready)
            following = self._ahead.pop(self.next, None)
        return ready

    @property
    def hole(self) -> tuple[int, int] | None:
        """Numbers of the first and last message missing before one that has arrived."""
        return (self.next, min(self._ahead) - 1) if self._ahead else None

    def end(self) -> None:
        """No message follows those that were returned."""
        self._end([])

    def _end(self, ready: list[Message]) -> list[Message]:
        self.ended = True
        self._ahead.clear()
        return ready
