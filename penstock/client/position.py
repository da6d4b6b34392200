"""How far an answer was read: a small value from which another process can continue."""

from typing import Literal

import msgspec

Kind = Literal["chat", "text"]


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """``str`` converts it to text, ``Position.parse`` back.

    Attributes:
        key: the idempotency key of the request.
        next: number of the first message that was not read.
    """

    key: str
    next: int = 0
    kind: Kind = "chat"
    stream: bool = False

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> "Position":
        """
        Raises:
            ValueError: not the text of a position.
        """
        try:
            parsed = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"{text[:80]!r} is not a position: {problem}") from None
        if not parsed.key or parsed.next < 0:
            raise ValueError(f"{text[:80]!r} is not a position: it needs a key, and a number of at least 0")
        return parsed
