"""One open answer inside a gateway: its token items, in order, each once, and never more than a bounded number.

An ``InflightRequest`` is fed by the log and emptied by whoever answers the client. It holds no task: waiting is a
future, and the gateway's one sweep ends what is overdue. When its client does not read, it keeps no further items: they
are in the log, and are read again from there when the client goes on (``gateway.log.catch_up``).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from schemas.errors import ServingError
from schemas.reassembly import TokenReassembler
from schemas.requests import GenerateRequest
from schemas.tokens import WHOLE_REQUEST, TokenItem

MAX_ITEMS = 2_048  # kept for a client that does not read, of a request with one choice and no log-probabilities
FEW_ITEMS = 16
PORTION_BYTES = 4_096  # of token ids taken at once: 1,024 tokens are rendered in about 2 ms
ITEM_BYTES = 16  # what an item counts at least

Behind = Callable[["InflightRequest"], None]


class InflightRequest:
    """Items of one request.

    Attributes:
        cancelling: the client is gone; kept until the terminal event is seen.
        behind: items are read from the log, as live ones were not kept.
        seq: while behind, everything up to this sequence of the token stream was fed; 0: not known, nothing was.
        on_behind: asks for the items that were not kept; set by the feed that it is attached to.
        abort: ends the client's connection; set by whoever answers it.
    """

    __slots__ = (
        "_attempt",
        "_ended",
        "_error",
        "_held",
        "_items",
        "_limit",
        "_live",
        "_more",
        "_paused",
        "_waiter",
        "abort",
        "behind",
        "cancel_sent",
        "cancelling",
        "fold",
        "on_behind",
        "request",
        "seq",
    )

    def __init__(self, request: GenerateRequest, *, bounded: bool = True) -> None:
        """
        Args:
            bounded: False: all items are kept, whoever takes them and when.
        """
        self.request = request
        self.fold = TokenReassembler(request.n)
        self.cancelling = False
        self.behind = False
        self.seq = 0
        self.cancel_sent = 0.0
        self.on_behind: Behind | None = None
        self.abort: Callable[[], None] | None = None
        self._limit = limit_of(request) if bounded else 1 << 62
        self._items: list[TokenItem] = []
        self._more = False  # the last portion was not all
        self._held: list[TokenItem] | None = None  # live items, while the last of the past is being read
        self._paused = False  # nobody reads the log for it, as what is here was not taken yet
        self._waiter: asyncio.Future[None] | None = None
        self._live: asyncio.Future[None] | None = None
        self._error: ServingError | None = None
        self._attempt = 0
        self._ended: set[int] = set()  # choices whose end came while it was behind

    @property
    def ended(self) -> bool:
        """The log has the end of every choice, whether it was taken or not."""
        return not self.fold.open or len(self._ended) >= self.request.n

    @property
    def paused(self) -> bool:
        """Its client does not read as fast as tokens come."""
        return self._paused

    # --- fed by the log ---

    def feed(self, item: TokenItem, seq: int) -> None:
        """A live item, in stream order. ``seq``: of the stream's entry that it is in."""
        if not self.behind:
            self._push(item, seq)
            return
        if item.finish is not None:
            self._note_end(item)
        if self._held is not None:
            self._held.append(item)
            if len(self._held) > self._limit:
                self._held = None

    def feed_past(self, item: TokenItem, seq: int) -> bool:
        """An item read from the log; False: enough is here, and no more is wanted until it was taken."""
        self._push(item, seq)
        return not self._paused

    def _push(self, item: TokenItem, seq: int) -> None:
        due = self.fold.push(item)
        if not due or self.cancelling:
            return
        items = self._items
        items += due
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if len(items) > self._limit and self.fold.open:
            self.behind = self._paused = True
            self.seq = seq - 1  # this entry again: the rest of it was not seen, and the reassembler skips duplicates
            self._held = None

    def _note_end(self, item: TokenItem) -> None:
        if item.attempt > self._attempt:
            self._attempt = item.attempt
            self._ended.clear()
        if item.attempt == self._attempt:
            self._ended.update(range(self.request.n) if item.choice == WHOLE_REQUEST else (item.choice,))

    # --- behind the live stream, and back ---

    def fall_behind(self, seq: int = 0) -> None:
        """From now on everything behind ``seq`` is read from the log."""
        self.behind, self._paused, self.seq = True, False, seq

    def hold(self) -> None:
        """Keep live items, from the next one on, until ``join``."""
        self._held = []

    def join(self) -> bool:
        """Go on live behind what was read; False: too many live items came meanwhile, and it is still behind."""
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
        """Wait until everything that the log has was fed.

        Raises:
            ServingError: the log cannot be read.
        """
        if self.behind and self._error is None and self.fold.open:
            self._live = asyncio.get_running_loop().create_future()
            await self._live
        if self._error is not None:
            raise self._error

    def complete(self, items: Iterable[TokenItem]) -> None:
        """The items of the request's record (``schemas.done.items``): whatever is missing comes now."""
        due = self.fold.conclude([part for item in items for part in _parts(item)])
        if due and not self.cancelling:
            self._items += due
        self.behind = self._paused = False
        self._held = None
        for waiter in (self._waiter, self._live):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    # --- emptied by whoever answers ---

    def fail(self, error: ServingError) -> None:
        """Whoever waits gets this error, after the items that are already here."""
        self._error = error
        for waiter in (self._waiter, self._live):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def available(self) -> list[TokenItem]:
        """What is here already, without waiting."""
        items, self._items = self._items, []
        return items

    async def take(self) -> list[TokenItem]:
        """The next items, at least one: all since the last call, or as many as are rendered without a stall.

        Raises:
            ServingError: nothing more will come (deadline, broker).
        """
        if self._more:  # the loop's other work has its turn between two portions
            await asyncio.sleep(0)
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._paused and self.on_behind is not None:
                self._paused = False
                self.on_behind(self)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._taken()

    async def take_within(self, seconds: float) -> list[TokenItem]:
        """As ``take``, but nothing if nothing comes in time."""
        if not self._items and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(seconds, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
            if not self._items and self._error is None:
                return []
        return await self.take()

    def _taken(self) -> list[TokenItem]:
        items = self._items
        if len(items) <= FEW_ITEMS:
            self._items, self._more = [], False
            return items
        size = 0
        for count, item in enumerate(items, 1):
            size += ITEM_BYTES + len(item.tokens)
            if size >= PORTION_BYTES:
                self._items, self._more = items[count:], count < len(items)
                return items[:count]
        self._items, self._more = [], False
        return items


def limit_of(request: GenerateRequest) -> int:
    """How many items are kept for a client that does not read: about a megabyte."""
    wanted = request.sampling.logprobs
    weight = 1 if wanted is None else 4 + wanted
    return max(MAX_ITEMS // weight, 64 * request.n)


def _parts(item: TokenItem) -> Iterator[TokenItem]:
    """An item in pieces that are rendered without a stall."""
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
