"""One open request in a gateway: its token items in order, each once, in a bounded buffer.

An ``InflightRequest`` is filled from the log and drained by the code that answers the client. It owns no task: waiting
uses a future, and the gateway's periodic sweep ends overdue requests. While a client does not read, its full buffer
drops live items; they are read from the log when the client continues (``penstock.gateway.request_log.subscriptions``).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from penstock.gateway.admission.rate_limits.limiter import Paid
from penstock.infra.bus.direct_get import Entry
from penstock.infra.process.turns import TurnBudget
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import ENDED, EarlierWorker
from penstock.schemas.requests import GenerateRequest, fallen_back
from penstock.schemas.token_dedup import DIFFERS, TokenReassembler
from penstock.schemas.tokens import ANOTHER_MODEL, WHOLE_REQUEST, Finish, TokenItem

log = structlog.get_logger("gateway")

MAX_ITEMS = 2_048  # buffered for a client that does not read, with one choice and no log-probabilities
PORTION_BYTES = 4_096  # of token ids returned at a time; rendering 1,024 tokens takes about 2 ms
ITEM_BYTES = 16  # size of an item without its tokens

# With these errors a gateway ends an answer although its request continues and can be read elsewhere, or later.
CONTINUES = (Code.shutting_down, Code.broker_unavailable)

Behind = Callable[["InflightRequest"], None]


class InflightRequest:
    """The items of one request.

    Attributes:
        cancelling: the reason for its cancellation, as in its record, until its terminal event. "": not cancelled.
        behind: live items were dropped, so items are read from the log.
        buffered: items that were not taken yet.
        limit: the number of buffered items above which live items are dropped.
        seq: while behind, the sequence of the token stream up to which everything was fed; 0 if nothing was.
        on_behind: asks for the dropped items. Set by the subscription that the request is attached to.
        abort: closes the client's connection. Set by the responder.
        turns: decides when the reader is woken and resumed. None: immediately.
        on_poisoned: called with the request if it ends as poisonous.
        request: as it was accepted, or as the fallback model that runs it has it.
        worker: the last one that streamed; "": none yet.
        earlier_workers: those that streamed before it.
        kept: all items so far, if they may have to be stored again. None: they are on disk.
        stored_seq: the sequence of its message in REQUESTS; 0: unknown, or its content is not there.
        end: the latest entry of the log that ends a choice.
        stored_link: the number of reconnects when the broker acknowledged that message.
        polls: of the queues, that had ended when it was accepted; -1: it was not accepted here.
        paid: the charge to its API key's limits, until it ends. None: nothing.
    """

    __slots__ = (
        "_attempt",
        "_ended",
        "_error",
        "_failed",
        "_held",
        "_live",
        "_mark",
        "_more",
        "_moved",
        "_nudged",
        "_paused",
        "_recorded_end_ns",
        "_streamed",
        "_waiter",
        "abort",
        "behind",
        "buffered",
        "cancel_sent",
        "cancelling",
        "earlier_workers",
        "end",
        "fold",
        "kept",
        "limit",
        "on_behind",
        "on_poisoned",
        "paid",
        "polls",
        "request",
        "seq",
        "stored_link",
        "stored_seq",
        "turns",
        "worker",
    )

    def __init__(self, request: GenerateRequest, *, bounded: bool = True, last_attempt: int | None = None) -> None:
        """
        Args:
            bounded: False keeps all items, even if they are not taken.
            last_attempt: as for ``TokenReassembler``.
        """
        self.request = request
        self.fold = TokenReassembler(request.n, last_attempt=last_attempt)
        self.cancelling = ""
        self.behind = False
        self.seq = 0
        self.cancel_sent = 0.0
        self.stored_seq = self.stored_link = self._recorded_end_ns = 0
        self.end: Entry | None = None
        self.polls = -1
        self.on_behind: Behind | None = None
        self.abort: Callable[[], None] | None = None
        self.turns: TurnBudget | None = None
        self.kept: list[TokenItem] | None = None
        self.paid: Paid | None = None
        self.on_poisoned: Callable[[GenerateRequest], None] | None = None
        self.worker = ""
        self.earlier_workers: tuple[EarlierWorker, ...] = ()
        self._failed = False
        self.limit = limit_of(request) if bounded else 1 << 62
        self.buffered: list[TokenItem] = []
        self._more = False  # the last portion left some items
        self._held: list[TokenItem] | None = None  # live items that wait until the last past ones are read
        self._paused = False  # the log is not read until the buffered items are taken
        self._waiter: asyncio.Future[None] | None = None
        self._live: asyncio.Future[None] | None = None
        self._error: ServingError | None = None
        self._attempt = 0
        self._streamed = 0  # the attempt that ``worker`` streamed
        self._mark: int | None = None  # the mark of ``fold`` at the last call of ``quiet_s``
        self._moved = 0.0  # monotonic time of the last change of the mark
        self._ended: set[int] = set()  # choices that ended while this was behind
        self._nudged = False

    @property
    def ended(self) -> bool:
        """Whether the log has the end of every choice. The reader may not have taken it yet."""
        if not self.fold.open:
            return True
        # Once live items are taken again, only ``fold`` counts: a fence that it has read may void the noted end.
        return self.behind and self._attempt >= self.fold.attempt and len(self._ended) >= self.request.n

    @property
    def paused(self) -> bool:
        """Whether the buffer is full, because the client reads more slowly than tokens arrive."""
        return self._paused

    def quiet_s(self, now: float) -> float:
        """Seconds without a new item from the log, as observed by calls of this method. 0 while none is expected."""
        mark = self.fold.mark
        if mark != self._mark or self._paused or self.ended:
            self._mark, self._moved = mark, now
        return now - self._moved

    @property
    def cut_off(self) -> bool:
        """Whether the reader got an error although the request continues."""
        return self._error is not None and self._error.code in CONTINUES

    @property
    def answered(self) -> bool:
        """Whether the log has the end of every choice, and none is a failure."""
        return self.ended and not self._failed

    # --- filled from the log ---

    def note_worker(self, worker: str, attempt: int) -> None:
        """Note the worker that streamed tokens of an attempt, unless the attempt is over."""
        if attempt < self.fold.attempt:
            return
        if self.worker:
            ended = "" if attempt == self._streamed else ENDED
            self.earlier_workers += (EarlierWorker(self._streamed, self.worker, ended),)
        self.worker, self._streamed = worker, attempt

    def feed(self, item: TokenItem, seq: int) -> None:
        """Add a live item, in stream order. ``seq`` is the sequence of its message."""
        if not self.behind:
            self._push(item, seq)
            return
        if item.finish is not None or item.attempt > self._attempt:
            self._note_behind(item)
        if self._held is not None:
            self._held.append(item)
            if len(self._held) > self.limit:
                self._held = None

    def feed_past(self, item: TokenItem, seq: int) -> bool:
        """Add an item read from the log. False if the buffer is full: stop until it is drained."""
        self._push(item, seq)
        return not self._paused

    def _push(self, item: TokenItem, seq: int) -> None:
        if item.finish is not None and item.finish.code:
            self._note_failure(item.finish)
        due = self.fold.push(item)
        if not due:
            if self.fold.fallback > self.request.fallback:
                self._fall_back(item)
            return
        if self.kept is not None:
            self.kept += due
        if self.cancelling:
            return
        items = self.buffered
        items += due
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if self.turns is None:
                waiter.set_result(None)
            else:
                self._waiter = None  # so that it is woken only once
                self.turns.wake(waiter)
        if len(items) > self.limit and self.fold.open:
            self.behind = self._paused = True
            # This message is read again, because its later items are missing. The reassembler drops duplicates.
            self.seq = seq - 1
            self._held = None

    def _fall_back(self, item: TokenItem) -> None:
        """Another model runs the request from now on. No token of the answer came before."""
        if self.kept is not None:
            self.kept.append(item)
        try:
            self.request = fallen_back(self.request, self.fold.fallback, item.attempt)
        except (msgspec.MsgspecError, IndexError) as error:
            log.error("fallback_unreadable", request=self.request.id, error=repr(error))
            what = f"request {self.request.id} was answered by another model, which this gateway cannot read"
            self.fail(ServingError(Code.internal, what))

    def _note_failure(self, finish: Finish) -> None:
        self._failed = True
        if finish.code == Code.poisoned_request and self.on_poisoned is not None:
            on_poisoned, self.on_poisoned = self.on_poisoned, None
            on_poisoned(self.request)

    def _note_behind(self, item: TokenItem) -> None:
        """Note the attempt of an item that is yet to be read from the log, and the choices that end with it."""
        if item.finish is not None and item.finish.code:
            self._note_failure(item.finish)
        if item.attempt > self._attempt:
            self._attempt = item.attempt
            self._ended.clear()
        if item.finish is not None and item.attempt == self._attempt:
            self._ended.update(range(self.request.n) if item.choice == WHOLE_REQUEST else (item.choice,))

    # --- behind the live stream ---

    def fall_behind(self, seq: int = 0) -> None:
        """Read everything after ``seq`` from the log from now on."""
        self.behind, self._paused, self.seq = True, False, seq

    def hold(self) -> None:
        """Hold live items back from now on, until ``join``."""
        self._held = []

    def join(self) -> bool:
        """Continue with live items. False if too many arrived meanwhile, so that it is still behind."""
        held, self._held = self._held, None
        if held is None:
            return False
        self.behind = False
        for item in held:
            self._push(item, self.seq + 1)
        if self._live is not None and not self._live.done():
            self._live.set_result(None)
        return True

    async def caught_up(self) -> None:
        """Wait until all items of the log were fed.

        Raises:
            ServingError: the log cannot be read.
        """
        if self.behind and self._error is None and self.fold.open:
            self._live = asyncio.get_running_loop().create_future()
            await self._live
        if self._error is not None:
            raise self._error.with_traceback(None)

    @property
    def ended_ns(self) -> int:
        """When the log got the latest end of a choice, Unix time; 0: none has ended."""
        return self.end.time_ns if self.end is not None else self._recorded_end_ns

    def complete(self, items: Iterable[TokenItem], fallback: int = 0, ended_ns: int = 0) -> None:
        """Add the missing items from the request's record (``penstock.schemas.done.items``).

        Args:
            ended_ns: when it ended by that record.
            fallback: the fallback that they are of, as in ``GenerateRequest``; 0: none.
        """
        self._recorded_end_ns = ended_ns
        parts = [part for item in items for part in _parts(item)]
        for part in parts:
            if part.finish is not None and part.finish.code:
                self._note_failure(part.finish)
        due = self.fold.conclude(parts)
        for part in due:
            if part.finish is DIFFERS:
                self._note_failure(DIFFERS)
        if fallback > self.request.fallback:
            self.fold.fallback = fallback
            self._fall_back(TokenItem(self.request.id, self.fold.attempt, ANOTHER_MODEL, fallback))
        if due and not self.cancelling:
            self.buffered += due
        self.behind = self._paused = False
        self._held = None
        for waiter in (self._waiter, self._live):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    # --- drained by the responder ---

    def fail(self, error: ServingError) -> None:
        """Have ``take`` raise this error once the buffered items are taken."""
        self._error = error
        for waiter in (self._waiter, self._live):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def nudge(self) -> None:
        """Let a ``take`` with ``nudged`` return without items."""
        self._nudged = True
        if self._waiter is not None:
            _wake(self._waiter)

    def available(self) -> list[TokenItem]:
        """Take the buffered items without waiting."""
        items, self.buffered = self.buffered, []
        return items

    async def take(self, *, nudged: bool = False) -> list[TokenItem]:
        """Wait for the next items, at least one.

        These are all items since the last call, or a portion that can be rendered without blocking other requests.

        Args:
            nudged: ``nudge`` also ends the wait, and the result is empty.
        Raises:
            ServingError: no more items will come, because of the deadline or the broker.
        """
        if self._more:  # other tasks run between two portions
            await asyncio.sleep(0)
        while not self.buffered:
            if self._error is not None:
                # Many requests may share the error; each would add its frames to the traceback.
                raise self._error.with_traceback(None)
            if nudged and self._nudged:
                self._nudged = False
                return []
            self._read_on()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._nudged = False
        if self.turns is not None and not self.turns.has_time():
            await self.turns.resume()
        return self._taken()

    async def take_within(self, seconds: float) -> list[TokenItem]:
        """As ``take``, but return an empty list if no item arrives in time."""
        if not self.buffered and self._error is None:
            self._read_on()
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(seconds, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
            if self.turns is not None:
                await self.turns.resume()
            if self.buffered:
                self._nudged = False
                return self._taken()
            if self._error is None:
                return []
        return await self.take()

    def _read_on(self) -> None:
        """Once all buffered items are taken, read what was dropped meanwhile from the log."""
        if self._paused and self.on_behind is not None:
            self._paused = False
            self.on_behind(self)

    def _taken(self) -> list[TokenItem]:
        items, size = self.buffered, 0
        for count, item in enumerate(items, 1):
            size += ITEM_BYTES + len(item.tokens)
            if size >= PORTION_BYTES:
                self.buffered, self._more = items[count:], count < len(items)
                return items[:count]
        self.buffered, self._more = [], False
        return items


def limit_of(request: GenerateRequest) -> int:
    """The number of items to buffer for a client that does not read: about 1 MB."""
    top = request.sampling.logprobs
    weight = 1 if top is None else 4 + top
    return max(MAX_ITEMS // weight, 64 * request.n)


def _parts(item: TokenItem) -> Iterator[TokenItem]:
    """Split an item into pieces that can be rendered without blocking other requests."""
    size = PORTION_BYTES // 4
    tokens, logprobs = item.tokens, item.logprobs
    last = max(0, len(tokens) // 4 - 1) // size if item.choice >= 0 else 0
    if not last:
        yield item
        return
    for number in range(last + 1):
        at, end = number * size, (number + 1) * size
        yield TokenItem(
            item.request,
            item.attempt,
            item.choice,
            item.first + at,
            tokens[4 * at : 4 * end],
            item.finish if number == last else None,
            logprobs[at:end] if logprobs is not None else None,
        )


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
