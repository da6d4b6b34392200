"""Ends open answers whose request has ended although the end never came through the token stream.

Tokens are published without acknowledgement: the last of them can be lost with a broker's leader or with their worker's
lease, and are not sent again once the terminal event is stored. That event has the whole output. The one of a request
with ``no_store`` has none: its tokens are read from memory storage again, where they may be although they came late,
and after the fence of the attempt that it names: that one was given up, but still ended the request.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

import structlog

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import Records, has_output
from penstock.infra.bus.memory_storage import lost
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem

log = structlog.get_logger("gateway")

LOOK_S = 1.0  # an answer without new items for this long, and at most twice that, is looked up
LOOK_UPS = 256  # at a time
AGAIN_S = 0.5
LOST_REMEMBERED = 10_000  # requests
LATE_S = 10.0  # after the terminal event, for tokens that come late

ReadAgain = Callable[[GenerateRequest, int], Awaitable[InflightRequest]]


class Completion:
    """Call ``complete_idle`` often; it looks up open answers that got no items since its last check.

    Args:
        read_again: returns everything that the token stream has of a request up to an attempt, its last.
    """

    def __init__(self, records: Records, read_again: ReadAgain, tasks: Tasks) -> None:
        self._records = records
        self._read_again = read_again
        self._tasks = tasks
        self._marks: dict[InflightRequest, int] = {}
        self._idle: list[InflightRequest] = []  # to be looked up
        self._looked = 0.0
        self._reading: set[InflightRequest] = set()
        self._lost: OrderedDict[str, None] = OrderedDict()  # requests whose text is nowhere

    async def complete_idle(self, readers: Iterable[InflightRequest], now: float) -> None:
        """
        Raises:
            ServingError: the log did not answer.
        """
        if now - self._looked >= LOOK_S and not self._idle:
            self._looked = now
            marks: dict[InflightRequest, int] = {}
            idle = []
            time_slice = TimeSlice()
            for inflight in readers:
                if not (inflight.ended or inflight.paused):
                    marks[inflight] = mark = inflight.fold.mark
                    if self._marks.get(inflight) == mark:
                        idle.append(inflight)
                await time_slice.yield_if_spent()
            self._idle, self._marks = idle, marks
        batch, self._idle = self._idle[:LOOK_UPS], self._idle[LOOK_UPS:]
        if not batch:
            return
        open_: dict[str, list[InflightRequest]] = {}
        for inflight in batch:
            open_.setdefault(inflight.request.id, []).append(inflight)
        for record in await self._records.ends([each[0].request for each in open_.values()]):
            for inflight in open_.get(record.request, ()):
                if not inflight.ended:
                    self.complete(inflight, record)

    def complete(self, inflight: InflightRequest, record: done.Done) -> None:
        """Give an in-flight request the rest of its answer."""
        if has_output(record):
            log.info("answer_completed_from_record", request=record.request, tokens=record.usage.completion)
            inflight.complete(done.items(record), done.fallback_of(record), record.timings.ended_ns)
        elif not inflight.request.no_store:
            if self._is_news(record.request):
                log.error("answer_lost", request=record.request, left_out=record.left_out)
            inflight.fail(ServingError(Code.internal, "the output did not fit into the request's record and was lost"))
        elif inflight not in self._reading:
            self._reading.add(inflight)
            work = self._complete_from_tokens(inflight, record)
            self._tasks.spawn(work, name="complete", on_failure=_not_read).add_done_callback(
                lambda _: self._reading.discard(inflight)
            )

    async def _complete_from_tokens(self, inflight: InflightRequest, record: done.Done) -> None:
        until = time.monotonic() + (LATE_S if record.request not in self._lost else 0.0)
        while not inflight.ended:
            again = await self._read_again(inflight.request, record.attempt)
            items = again.available()
            if inflight.ended:
                return
            if again.request.fallback > inflight.request.fallback:
                inflight.request = again.request
            if not again.fold.open:
                log.info("answer_completed_from_tokens", request=record.request, tokens=record.usage.completion)
                inflight.complete(items, ended_ns=record.timings.ended_ns)
            elif time.monotonic() > until:
                if not record.code and self._is_news(record.request):  # otherwise it has ended with an error
                    log.error("answer_lost", request=record.request, tokens=record.usage.completion)
                inflight.complete([*items, last_item(record)])
            else:
                await asyncio.sleep(AGAIN_S)

    def _is_news(self, request: str) -> bool:
        """Whether a lost answer is seen for the first time: each client that asks for it has a separate reader."""
        if request in self._lost:
            return False
        self._lost[request] = None
        if len(self._lost) > LOST_REMEMBERED:
            self._lost.popitem(last=False)
        return True


def last_item(record: done.Done) -> TokenItem:
    """How a request ends whose last tokens are lost."""
    if record.code:
        reason = "cancelled" if record.code == Code.cancelled else "error"
        finish = Finish(reason, None, record.usage.cached, record.code, record.message)
    else:
        error = lost(record.request)
        finish = Finish("error", None, record.usage.cached, error.code.value, error.message)
    return TokenItem(record.request, record.attempt, WHOLE_REQUEST, 0, b"", finish)


def _not_read(error: BaseException) -> None:
    log.warning("answer_not_completed", error=repr(error))  # the next look tries again
