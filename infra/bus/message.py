"""A received message, as the NATS client delivers it. nats-py has no types of its own."""

from typing import Protocol


class Message(Protocol):
    """``headers`` is None if the message has none; ``reply`` is "" if no answer is expected."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def reply(self) -> str: ...

    @property
    def headers(self) -> dict[str, str] | None: ...
