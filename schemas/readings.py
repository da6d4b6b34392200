"""What a router read of WORK and DONE, for the other routers: one message for many, while they share requests.

Each message of the two streams then goes to one of them only. What is lost with a router is read from the streams.
"""

import msgspec

from schemas.wire import decoder


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A message of WORK: a request was sent to the worker that runs all of it, at rank 0. Fields as in the load header.

    Attributes:
        seq: of the message in WORK.
    """

    seq: int
    request: str
    attempt: int
    role: str
    worker: str
    prompt_tokens: int
    cached_tokens: int
    gateway: str
    deadline_ns: int
    priority: str
    n: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A message of DONE; ``seq``: its sequence."""

    seq: int
    request: str


class Other(msgspec.Struct, frozen=True, array_like=True):
    """A message of either stream, with the headers that its publisher gave it."""

    seq: int
    subject: str
    headers: dict[str, str]


class Readings(msgspec.Struct, frozen=True, omit_defaults=True):
    """``work`` and ``done``: messages that have more to say than the two short forms."""

    placed: tuple[Placed, ...] = ()
    ended: tuple[Ended, ...] = ()
    work: tuple[Other, ...] = ()
    done: tuple[Other, ...] = ()


decode = decoder(Readings)
