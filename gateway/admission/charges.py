"""Requests that count against the limits of their API keys and tenants, from the reservation to their end.

A request takes its prompt and the most that it may generate. When it has ended, what it did not generate is given back.
It holds one of the requests at a time until it has ended, whether or not its client still waits.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.gateway.access.authentication import Caller
from penstock.gateway.admission.rate_limits.limiter import Limiter, Paid
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.clock import BrokerClock
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest

LOOK_S = 1.0
MISSED = 3  # times that the log has neither a request nor its record: it was deleted, or never stored
GRACE_NS = 60_000_000_000  # beyond its deadline; by then a request has ended


class Charges:
    """
    Args:
        find_record, find_request: a request's terminal event and the request itself, by id.
    """

    def __init__(
        self,
        limiter: Limiter,
        find_record: Callable[[str], Awaitable[done.Done | None]],
        find_request: Callable[[str], Awaitable[GenerateRequest]],
        tasks: Tasks,
        clock: BrokerClock,
    ) -> None:
        self._limiter = limiter
        self._find_record = find_record
        self._find_request = find_request
        self._tasks = tasks
        self._clock = clock
        self.reserved: dict[str, Paid] = {}  # of requests that are not in the log yet

    async def reserve(self, caller: Caller, prepared: PreparedRequest) -> None:
        """
        Raises:
            ServingError: rate_limit_exceeded; broker_unavailable.
        """
        limited = caller.limited_by
        if not limited:
            return
        request = prepared.request
        output = 0 if request.output else request.n * request.stop.max_tokens
        tokens = prompt_tokens(request) + output
        self.reserved[request.id] = self._limiter.pay(limited, tokens) or await self._limiter.reserve(limited, tokens)

    def began(self, inflight: InflightRequest) -> None:
        """The request is being put into the log."""
        inflight.paid = self.reserved.pop(inflight.request.id, None)

    def abandon(self, request_id: str) -> None:
        """A request was prepared; if it was not put into the log, it has cost nothing."""
        paid = self.reserved.pop(request_id, None)
        if paid is not None:
            self._limiter.undo(paid)

    def rename(self, request_id: str, new: str) -> None:
        """A reserved request gets another id."""
        paid = self.reserved.pop(request_id, None)
        if paid is not None:
            self.reserved[new] = paid

    def repeated(self, inflight: InflightRequest) -> None:
        """The log had the request already, so nothing runs for what this one has taken: it is reserved again."""
        paid, inflight.paid = inflight.paid, None
        if paid is not None:
            self.reserved[inflight.request.id] = paid

    def ended(self, inflight: InflightRequest) -> None:
        """This gateway follows the request no longer. If it still runs, its record says when it has ended."""
        paid, inflight.paid = inflight.paid, None
        if paid is None:
            return
        request, fold = inflight.request, inflight.fold
        if fold.open:
            self._tasks.spawn(self._watch(paid, request), name="watch-paid")
        else:
            output = sum(map(fold.position, range(request.n))) if not request.output else 0
            self._limiter.settle(paid, prompt_tokens(request) + output)

    async def _watch(self, paid: Paid, request: GenerateRequest) -> None:
        used, missed = 1 << 62, 0  # nothing is given back if it is never known
        while missed < MISSED and self._clock.now_ns() < request.deadline_ns + GRACE_NS:
            await asyncio.sleep(LOOK_S)
            try:
                record = await self._find_record(request.id)
                missed = missed + 1 if record is None and not await self._is_stored(request.id) else 0
            except ServingError:  # the broker is away
                continue
            if record is not None:
                used = prompt_tokens(request) + record.usage.completion
                break
        self._limiter.settle(paid, used)

    async def _is_stored(self, request_id: str) -> bool:
        try:
            await self._find_request(request_id)
        except ServingError as error:
            if error.code is Code.request_not_found:
                return False
            raise
        return True


def prompt_tokens(request: GenerateRequest) -> int:
    """What a request's prompt is charged for. Of texts that its worker makes tokens of, one for every 4 bytes;
    a query counts in each of its pairs."""
    asked = request.embedding
    if asked is None:
        return request.prompt_tokens
    texts, queries = (sum(-(-len(text.encode()) // 4) for text in each) for each in (asked.texts, asked.queries))
    return request.prompt_tokens + texts + queries * (len(asked.texts) // (len(asked.queries) or 1))
