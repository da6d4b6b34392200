"""Ends open answers whose request has ended although the end never came through the token stream.

Tokens are published without acknowledgement: the last of them can be lost with a broker's leader or with their worker's
lease, and are not sent again once the terminal event is stored. That event has the whole output.
"""

import asyncio
from collections.abc import Iterable

import structlog

from gateway.log.find import erased
from gateway.log.inflight import InflightRequest
from gateway.log.records import Records, has_output
from schemas import done
from schemas.errors import Code, ServingError

log = structlog.get_logger("gateway")

LOOK_S = 1.0  # an answer without new items for this long, and at most twice that, is looked up
AT_ONCE = 256


class Completion:
    """Call ``complete_idle`` often; it looks up open answers that got no items since its last check."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._marks: dict[InflightRequest, int] = {}
        self._idle: list[InflightRequest] = []  # to be looked up
        self._looked = 0.0

    async def complete_idle(self, readers: Iterable[InflightRequest], now: float) -> None:
        """
        Raises:
            ServingError: the log did not answer.
        """
        if now - self._looked >= LOOK_S and not self._idle:
            self._looked = now
            marks: dict[InflightRequest, int] = {}
            idle = []
            for number, inflight in enumerate(readers, 1):
                if not (inflight.ended or inflight.paused):
                    marks[inflight] = mark = inflight.fold.mark
                    if self._marks.get(inflight) == mark:
                        idle.append(inflight)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._idle, self._marks = idle, marks
        batch, self._idle = self._idle[:AT_ONCE], self._idle[AT_ONCE:]
        if not batch:
            return
        open_: dict[str, list[InflightRequest]] = {}
        for inflight in batch:
            open_.setdefault(inflight.request.id, []).append(inflight)
        for record in await self._records.ends([each[0].request for each in open_.values()]):
            for inflight in open_.get(record.request, ()):
                if not inflight.ended:
                    complete(inflight, record)


def complete(inflight: InflightRequest, record: done.Done) -> None:
    """Give an in-flight request the rest of its answer."""
    if has_output(record):
        log.info("answer_completed_from_record", request=record.request, tokens=record.usage.completion)
        inflight.complete(done.items(record))
    elif inflight.request.no_store:
        log.info("answer_erased", request=record.request)
        inflight.fail(erased(record.request))
    else:
        log.error("answer_lost", request=record.request, left_out=record.left_out)
        inflight.fail(ServingError(Code.internal, "the output did not fit into the request's record and was lost"))
