"""Charges requests to the limits of their API keys and tenants, from the reservation to the end.

A request is charged for its prompt and the most tokens that it may generate. Tokens that it did not generate are given
back at its end. Until then it counts as one of the concurrent requests, whether or not its client still waits.
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
MISSED = 3  # failed look-ups of a request and its record, after which it was deleted or never stored
GRACE_NS = 60_000_000_000  # after its deadline; a request has ended before


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
        """The request is being stored in the log."""
        inflight.paid = self.reserved.pop(inflight.request.id, None)

    def abandon(self, request_id: str) -> None:
        """A request was prepared. If it was not stored in the log, its charge is given back."""
        paid = self.reserved.pop(request_id, None)
        if paid is not None:
            self._limiter.undo(paid)

    def rename(self, request_id: str, new: str) -> None:
        """Change the id of a reserved request."""
        paid = self.reserved.pop(request_id, None)
        if paid is not None:
            self.reserved[new] = paid

    def repeated(self, inflight: InflightRequest) -> None:
        """The log already had the request, so this charge pays for nothing: it is a reservation again."""
        paid, inflight.paid = inflight.paid, None
        if paid is not None:
            self.reserved[inflight.request.id] = paid

    def ended(self, inflight: InflightRequest) -> None:
        """This gateway no longer follows the request. If it still runs, its record will show its end."""
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
        used, missed = 1 << 62, 0  # nothing is given back if the usage is never known
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
    """Tokens that a prompt is charged for. Texts that its worker tokenizes count as one token for every 4 bytes.

    A query counts in each of its pairs.
    """
    asked = request.embedding
    if asked is None:
        return request.prompt_tokens
    texts, queries = (sum(-(-len(text.encode()) // 4) for text in each) for each in (asked.texts, asked.queries))
    return request.prompt_tokens + texts + queries * (len(asked.texts) // (len(asked.queries) or 1))
