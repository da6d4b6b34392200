"""How requests and attempts end: worker or router → all.

``Done`` is the one terminal event of a request; its Nats-Msg-Id is the request id. ``Returned`` ends an
attempt only: the worker gives the request back unstarted or unfinished, and a router steers it again.
"""

import msgspec

from schemas.tokens import File
from schemas.trace import Stamps
from schemas.wire import decoder, encode


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Unix time in ns; 0: did not happen."""

    created_ns: int = 0
    routed_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice: its tokens (packed u32) and why it ended."""

    tokens: bytes = b""
    reason: str = ""
    stop: str | int | None = None
    files: tuple[File, ...] = ()  # of a request for pictures


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag="done"):
    """Terminal event. ``code`` is empty when the request succeeded."""

    request: str
    model: str
    attempt: int
    worker: str = ""
    choices: tuple[Outcome, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    code: str = ""
    message: str = ""
    user: str = ""
    stamps: Stamps | None = None  # of a traced request, by its last worker


class Returned(msgspec.Struct, frozen=True, omit_defaults=True, tag="returned"):
    """This attempt ended without a result, through no fault of the request (unless ``poison``)."""

    request: str
    model: str
    attempt: int
    worker: str
    reason: str
    poison: bool = False  # the engine failed while it ran this request


decode = decoder(Done | Returned)  # type: ignore[arg-type]


def encode_within(event: Done, limit: int) -> bytes:
    """A terminal event in at most ``limit`` bytes: its tokens, which the token log has too, are left out if need be."""
    payload = encode(event)
    if len(payload) <= limit:
        return payload
    choices = tuple(msgspec.structs.replace(choice, tokens=b"") for choice in event.choices)
    return encode(msgspec.structs.replace(event, choices=choices))
