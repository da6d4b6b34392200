"""How requests ended: their records in the log, found by subject and not by scanning.

A record takes one round trip, however much the log holds.
"""

from collections.abc import Sequence

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, get_last_of
from penstock.schemas import done
from penstock.schemas.requests import GenerateRequest

log = structlog.get_logger("gateway")


class Records:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream("DONE")

    async def find(self, request_id: str) -> done.Done | None:
        """The terminal event; None: there is none (yet).

        Raises:
            ServingError: the log did not answer.
        """
        entry = await get_last(self._bus, self._stream, self._bus.subjects.done_of(request_id))
        return _decoded(entry.data) if entry is not None else None

    async def ended_ns(self, request_id: str) -> int:
        """When a request has ended, Unix time; 0: it has not (yet).

        Raises:
            ServingError: the log did not answer.
        """
        entry = await get_last(self._bus, self._stream, self._bus.subjects.done_of(request_id))
        return entry.time_ns if entry is not None else 0

    async def ends(self, requests: Sequence[GenerateRequest]) -> list[done.Done]:
        """Of these requests, a few hundred at most, those that are over. Replicas may lag behind: ask again.

        Raises:
            ServingError: the log did not answer.
        """
        subjects = [self._bus.subjects.done(r.tenant, r.model, r.id) for r in requests]
        events = [_decoded(entry.data) for entry in await get_last_of(self._bus, self._stream, subjects)]
        return [event for event in events if event is not None]


def has_output(record: done.Done) -> bool:
    """Whether the record has the output's tokens."""
    return "tokens" not in record.left_out


def is_whole(record: done.Done) -> bool:
    """Whether everything that the answer shows is in the record."""
    return bool(record.submitted) and not {"tokens", "logprobs", "scores", "message"} & set(record.left_out)


def request_of(record: done.Done) -> GenerateRequest | None:
    """The recorded request, if it is there and this release can read it."""
    try:
        return done.request_of(record)
    except msgspec.MsgspecError as error:
        log.warning("recorded_request_unreadable", request=record.request, error=str(error))
        return None


def _decoded(data: bytes) -> done.Done | None:
    try:
        event = done.decode(data)
    except msgspec.MsgspecError as error:  # of a later release
        log.warning("terminal_event_unreadable", error=str(error))
        return None
    return event if isinstance(event, done.Done) else None
