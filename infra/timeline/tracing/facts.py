"""What is kept of a request's messages until its trace is told: times, ids and counts, no prompts and no tables."""

import msgspec

from infra.timeline.tracing import attributes
from infra.timeline.tracing.span import Value
from schemas.done import Returned
from schemas.jobs import Decision
from schemas.requests import GenerateRequest
from schemas.trace import Stamps, wanted


class Facts(msgspec.Struct, frozen=True):
    """Of the request: ``request`` without what is large."""

    request: GenerateRequest
    attributes: dict[str, Value]

    @property
    def sampled(self) -> bool:
        """Its caller wants it traced; without a caller, whoever reads decides."""
        return self.request.trace is None or wanted(self.request.trace)

    @property
    def called(self) -> bool:
        """Its trace is part of a caller's."""
        return self.request.trace is not None and bool(self.request.trace.parent)


def facts(request: GenerateRequest) -> Facts:
    found = attributes.of_request(request)
    return Facts(msgspec.structs.replace(request, prompt=b"", digests=b"", media=(), diffusion=None), found)


class Handed(msgspec.Struct, frozen=True):
    """What a stage said when it handed on."""

    at_ns: int
    ticket: str
    target: str  # role of the next stage
    started_ns: int
    first_token_ns: int
    cached: int
    stamps: Stamps | None
    backend: str


class Visit(msgspec.Struct):
    """One worker's part in one attempt."""

    attempt: int
    role: str
    worker: str
    given_ns: int
    handed: Handed | None = None
    revoked: bool = False


class Routed(msgspec.Struct, frozen=True):
    """A router's decision, without its table of candidates."""

    attempt: int
    router: str
    since_ns: int  # it waited in the router from then on
    at_ns: int
    reason: str
    attributes: dict[str, Value]


class GivenBack(msgspec.Struct, frozen=True):
    """A returned attempt, and when the server stored that."""

    event: Returned
    at_ns: int


def routed(attempt: int, decision: Decision) -> Routed:
    return Routed(
        attempt,
        decision.router,
        decision.at_ns - decision.waited_ns,
        decision.at_ns,
        decision.reason,
        attributes.of_decision(decision, attempt),
    )
