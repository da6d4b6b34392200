"""Request options that every generation endpoint shares, and what they resolve to."""

import secrets
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from penstock.schemas.streams import LONGEST_DEADLINE_S

BOM = b"\xef\xbb\xbf"  # which some clients write in front of UTF-8
CHAT = "chat"  # values of GenerateRequest.endpoint
COMPLETION = "text"
RESPONSE = "response"
COMPACTION = "compaction"
MESSAGE = "message"

SEED_MASK = (1 << 63) - 1
SERVICE_TIERS = {"flex": Priority.batch, "priority": Priority.interactive}

# One token of a NATS subject. Not "$", which in Python also matches before a final line break.
_WORKER_PATTERN = r"^[A-Za-z0-9_-]{1,128}(?![\s\S])"

Duration = Annotated[float, Meta(gt=0, le=LONGEST_DEADLINE_S)]
Name = Annotated[str, Meta(max_length=256)]


class CommonOptions(Struct, frozen=True, kw_only=True):
    """null means: not given."""

    model: (
        Annotated[
            str, Meta(max_length=512, description='missing, null or "": the one model of this kind that is served')
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: Annotated[bool, Meta(description="answer with server-sent events")] | None = None
    user: Name | None = None
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    timeout_s: Annotated[Duration, Meta(description="seconds until an unfinished request fails")] | None = None
    deadline_s: Annotated[Duration, Meta(description="alias of timeout_s; the shorter of the two applies")] | None = (
        None
    )
    no_store: Annotated[bool, Meta(description="never write prompt and answer to a disk")] | None = None
    worker: Annotated[str, Meta(pattern=_WORKER_PATTERN, description="id of the only worker to run on")] | None = None


def random_seed() -> int:
    """53 bits: JSON numbers are doubles in JavaScript and other languages, and a rounded seed draws another answer."""
    return secrets.randbits(53)


def resolve_seed(body: CommonOptions, draw: Callable[[], int]) -> int:
    """The client's seed, else one from ``draw``; in [0, 2**63)."""
    return (draw() if body.seed is None else body.seed) & SEED_MASK


def resolve_deadline_s(body: CommonOptions, default_s: float) -> float:
    """Seconds from acceptance in which the request must finish."""
    given = [seconds for seconds in (body.timeout_s, body.deadline_s) if seconds is not None]
    return min(given, default=default_s)


def resolve_priority(priority: Priority | None, service_tier: str | None, highest: Priority | None = None) -> Priority:
    """``priority`` wins over OpenAI's ``service_tier``.

    Args:
        highest: the class of a request that names none, and of one that names a higher one; None: it may have any.
    """
    named = priority or SERVICE_TIERS.get(service_tier or "")
    if highest is None:
        return named or Priority.standard
    return highest if named is None or named.rank < highest.rank else named


def read_switch(text: str, header: str) -> bool:
    """A header that is on ("1", "true") or off ("0", "false", empty).

    Raises:
        ServingError: invalid_request: anything else, which must not be taken for off.
    """
    match text.strip().lower():
        case "1" | "true":
            return True
        case "" | "0" | "false":
            return False
    raise ServingError(Code.invalid_request, f"{header} is {text[:40]!r}; use 1 or 0", param=header)
