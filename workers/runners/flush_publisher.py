"""From the engine's flushes to published token items, KV events and ended sequences, in order.

``Dumper`` sends the names in the prefix cache to routers that missed events: one snapshot, in pages that fit a message.

``TokenPace`` (pure) measures how fast a worker's tokens come, and what its engine spends on them, for
``penstock.schemas.pace``. It looks at running requests about once a second, and when they end: nothing is added to the
path of a token, and a slow worker is known before its first answer ends.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from penstock.infra.bus.clock import steady_ns
from penstock.schemas import done, kv
from penstock.schemas.pace import PREFILL
from penstock.schemas.tokens import COUNTS
from penstock.workers.engine_loop.loop import EngineLoop, StepPace
from penstock.workers.engine_loop.step_output import CacheSnapshot, Flush, SequenceState
from penstock.workers.session.request_runner import SessionContext
from penstock.workers.session.requests import RunningRequest

log = structlog.get_logger("worker")


class FlushPublisher:
    """``deliver`` and ``end_cancelled`` are called in the engine thread, everything else in the event loop.

    Args:
        completed: called when every sequence of a request has ended or was handed off.
        fetched: called when the engine has started a request with KV that it fetched by itself.
    """

    def __init__(
        self,
        context: SessionContext,
        engine: EngineLoop,
        completed: Callable[[RunningRequest], None],
        fetched: Callable[[RunningRequest], None],
    ) -> None:
        self._nc = context.bus.nc
        self._reporter = context.reporter
        self._requests = context.requests
        self._terminal = context.terminal
        self._metrics = context.metrics
        self._model = context.model.name
        self._publish_events = context.settings.publish_events_and_metrics
        self._engine = engine
        self._completed = completed
        self._fetched = fetched
        self._loop = asyncio.get_running_loop()
        self._flushes: asyncio.Queue[Flush] = asyncio.Queue()
        self._late: asyncio.TimerHandle | None = None
        self._traced: dict[str, RunningRequest] = {}  # traced requests without a token of this worker yet

    def deliver(self, flush: Flush) -> None:
        """Publish a flush after the earlier ones."""
        self._loop.call_soon_threadsafe(self._flushes.put_nowait, flush)

    def end_cancelled(self, running: RunningRequest) -> None:
        """End a cancelled request after the flushes with its last tokens."""
        self.deliver(_Cancelled(running))

    def trace_first_token(self, running: RunningRequest) -> None:
        self._traced[running.request.id] = running

    def forget(self, running: RunningRequest) -> None:
        if running.stamp_times is not None and self._traced.get(running.request.id) is running:
            del self._traced[running.request.id]

    async def run(self) -> None:
        while True:
            flush = await self._flushes.get()
            if isinstance(flush, _Cancelled):
                try:
                    await self._terminal.end_cancelled(flush.running)
                except Exception as error:
                    self._terminal.fail(flush.running, "its end", error)
                continue
            try:
                await self._publish(flush)
            finally:  # the engine needs the interpreter as soon as it may continue
                self._nc.when_written(self._consumed)

    def _consumed(self) -> None:
        self._engine.flush_consumed()
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._requests.running:  # not earlier: until a flush is consumed, the next does not leave
            self._late = self._loop.call_at(self._engine.flush_due, self._engine.flush_late)

    async def _publish(self, flush: Flush) -> None:
        """A failure ends the requests it concerns; all others continue, and KV batches stay in order."""
        for gateway, items in flush.items.items():
            try:
                await self._reporter.items(gateway, tuple(items))
            except Exception as error:
                requests = (self._requests.running.get(item.request) for item in items)
                for running in {id(each): each for each in requests if each is not None}.values():
                    self._terminal.fail(running, "publishing its tokens", error)
        if flush.batches and self._publish_events:
            for rank, seq, events in flush.batches:
                try:
                    await self._reporter.events(self._model, rank, seq, tuple(events))
                except Exception:  # routers see the gap in the numbers and ask for a dump
                    log.exception("kv_events_publish_failed", rank=rank, seq=seq)
        try:
            self._account(flush)
        except Exception as error:
            owners = (_owner(sequence) for sequence in (*flush.started, *flush.ended))
            for running in {id(each): each for each in owners if each is not None}.values():
                self._terminal.fail(running, "its accounting", error)
        for sequence in flush.ended:
            owner = _owner(sequence)
            if owner is None:
                continue
            try:
                self._on_sequence_ended(owner, sequence)
            except Exception as error:
                self._terminal.fail(owner, "its end", error)

    def _account(self, flush: Flush) -> None:
        for sequence in flush.started:
            running = _owner(sequence)
            if running is None:
                continue
            if not running.started_ns:
                running.started_ns = sequence.started_ns
                running.cached = sequence.cached
            if running.stamp_times is not None:
                running.stamp_times.setdefault("started_ns", sequence.started_ns)
        if flush.items:
            self._account_tokens(flush, steady_ns())
        for pinned in flush.pinned:
            holder = pinned.key
            assert isinstance(holder, SequenceState)
            running = _owner(holder)
            if running is not None:
                running.pinned = pinned
        for sequence in flush.started:
            running = _owner(sequence)
            if running is not None and running.fetching is not None:
                self._fetched(running)

    def _account_tokens(self, flush: Flush, now_ns: int) -> None:
        if self._traced:
            self._stamp_first_tokens(flush, now_ns)
        tokens = 0
        for items in flush.items.values():
            for item in items:
                if item.choice == COUNTS:
                    continue
                tokens += len(item.tokens) >> 2
                if not item.first:  # prompt log-probabilities never begin at 0
                    running = self._requests.running.get(item.request)
                    if running is not None and not running.first_token_ns:
                        running.first_token_ns = now_ns
        self._metrics.tokens.inc(tokens)

    def _stamp_first_tokens(self, flush: Flush, now_ns: int) -> None:
        """The first token of this worker, which need not be the request's first."""
        for items in flush.items.values():
            for item in items:
                running = self._traced.pop(item.request, None) if item.tokens else None
                if running is not None and running.stamp_times is not None:
                    running.stamp_times["first_token_ns"] = now_ns

    def _on_sequence_ended(self, running: RunningRequest, sequence: SequenceState) -> None:
        """The engine is done with a sequence, and its tokens are published or in the outbox."""
        finish = sequence.finish
        if sequence.lost_input:
            self._terminal.requeue(running, sequence.lost_input)
            return
        if finish is not None:
            running.outcomes[sequence.index] = done.Outcome(sequence.tokens.tobytes(), finish.reason, finish.stop)
        else:
            sequence.handed_off = True
        if running.completed_here and not running.handing_off and self._requests.is_current(running):
            self._completed(running)


class _Cancelled(Flush):
    """Queued among flushes: the engine has dropped this request."""

    __slots__ = ("running",)

    def __init__(self, running: RunningRequest) -> None:
        super().__init__()
        self.running = running


def _owner(sequence: SequenceState) -> RunningRequest | None:
    """None: its request is over, or handed off."""
    owner = sequence.owner
    assert owner is None or isinstance(owner, RunningRequest)
    return owner


ANSWER_S = 5.0
EVENT_BYTES = 64  # of an event without its digests


class EventPage(NamedTuple):
    rank: int
    seq: int
    events: list[kv.KvEvent]


class Dumper:
    """Page 0 takes a snapshot of all ranks at once; later pages are the rest of it, rank by rank."""

    def __init__(self, engine: EngineLoop, worker: str, epoch: int) -> None:
        self._engine = engine
        self._worker = worker
        self._epoch = epoch
        self._pages: list[EventPage] = []

    async def page(self, number: int, limit_bytes: int) -> kv.KvDump:
        """
        Raises:
            TimeoutError: the engine did not answer in time.
        """
        if number == 0:
            names = await self._ask()
            self._pages = [
                EventPage(rank, seq, page)
                for rank, (events, seq) in enumerate(names)
                for page in in_pages(events, limit_bytes)
            ]
        rank, seq, events = self._pages[number] if number < len(self._pages) else EventPage(0, -1, [])
        more = number + 1 if number + 1 < len(self._pages) else 0
        return kv.KvDump(self._worker, self._epoch, seq, tuple(events), rank, more)

    async def _ask(self) -> list[CacheSnapshot]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[CacheSnapshot]] = loop.create_future()

        def answer(names: list[CacheSnapshot]) -> None:
            loop.call_soon_threadsafe(_resolve, future, names)

        self._engine.dump(answer)
        return await asyncio.wait_for(future, ANSWER_S)


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def in_pages(events: list[kv.KvEvent], limit_bytes: int) -> list[list[kv.KvEvent]]:
    """Events in pages of about ``limit_bytes`` each, in order; at least one."""
    pages: list[list[kv.KvEvent]] = [[]]
    size = 0
    for event in events:
        cost = EVENT_BYTES + len(getattr(event, "digests", b""))
        if size + cost > limit_bytes and pages[-1]:
            pages.append([])
            size = 0
        pages[-1].append(event)
        size += cost
    return pages


LOOK_S = 1.0
WINDOW_S = 30.0  # the measure is of this window and of the one before it; longer until there is enough to measure
LEAST_TOKENS, LEAST_PROMPTS, LEAST_DECODES = 20, 3, 10  # in them; fewer say nothing
KNOWN_S = 600.0  # a measure is kept while there is too little to measure: routers avoid a slow worker


class _Sums:
    __slots__ = (
        "busy_s",
        "computed",
        "decode_s",
        "decodes",
        "prompt_s",
        "prompt_tokens",
        "prompts",
        "token_s",
        "tokens",
    )

    def __init__(self) -> None:
        self.token_s = self.prompt_s = self.busy_s = self.decode_s = 0.0
        self.tokens = self.prompts = self.prompt_tokens = self.computed = self.decodes = 0


class TokenPace:
    """One for all sessions of a worker: a slow machine loses leases, too, while its engine keeps running.

    Args:
        role: of the worker.
    Attributes:
        measured: ``latency_us``, ``engine_us``, ``work_ns`` and ``decode_us`` as in ``fleet.Load``.
    """

    def __init__(self, role: str) -> None:
        self._of_prompts = role == PREFILL
        self._now, self._before = _Sums(), _Sums()
        self._seen = (0.0, 0, 0.0)  # of the engine, at the last look
        self._since: float | None = None  # of this window; None: there was no look
        self._looked = float("-inf")
        self._known = float("-inf")  # when there was something to measure
        self._computed = 0  # of ``_now``, at the last look
        self.measured = (0, 0, 0, 0)

    def look(self, running: Iterable[RunningRequest], now: float, now_ns: int, engine: StepPace) -> None:
        """Count what has come since the last look, unless that was just now.

        Args:
            now: monotonic, seconds.
            now_ns: of ``steady_ns``.
            engine: what its steps have taken.
        """
        if now - self._looked < LOOK_S:
            return
        if self._since is None:
            self._since = now
        for each in running:
            self.count(each, now_ns)
        sums, seen = self._now, (engine.busy_s, engine.decodes, engine.decode_s)
        busy_s, decodes, decode_s = self._seen
        sums.busy_s += seen[0] - busy_s
        sums.decodes += seen[1] - decodes
        sums.decode_s += seen[2] - decode_s
        self._seen, self._looked = seen, now
        if sums.computed != self._computed:
            self._computed, self._known = sums.computed, now
        elif now - self._known > KNOWN_S:
            self._before, self._now, self._computed, self._since = _Sums(), _Sums(), 0, now
            self.measured = (0, 0, 0, 0)
            return
        self._measure()
        if now - self._since > WINDOW_S and self._enough(sums):  # a slow worker gets little to do: it takes longer
            self._before, self._now, self._computed, self._since = sums, _Sums(), 0, now

    def _enough(self, *sums: _Sums) -> bool:
        if self._of_prompts:
            return sum(each.prompts for each in sums) >= LEAST_PROMPTS
        return sum(each.tokens for each in sums) >= LEAST_TOKENS

    def count(self, running: RunningRequest, now_ns: int) -> None:
        """Count the tokens of a request; also as it ends."""
        for sequence in running.sequences:
            if sequence.first > sequence.seen_tokens or sequence.seen_ns:
                self._count(running, sequence, now_ns)

    def computing_s(self, tokens: int) -> float:
        """How long this many tokens of a prompt take from its start, by those of the last minute; 0: unknown."""
        known = self._now.prompt_tokens + self._before.prompt_tokens
        return tokens * (self._now.prompt_s + self._before.prompt_s) / known if known else 0.0

    def _count(self, running: RunningRequest, sequence: SequenceState, now_ns: int) -> None:
        sums = self._now
        new = sequence.first - sequence.seen_tokens
        sums.computed += new
        since_ns = sequence.seen_ns
        if not since_ns:
            if not sequence.started_ns:
                return
            # The prompt's computing ends with the first token. Where this worker continues a request, it is unknown.
            since_ns = sequence.started_ns
            if not running.prefilled and running.first_token_ns and not sequence.seen_tokens:
                since_ns = running.first_token_ns
                new -= 1
                if not sequence.index:
                    sums.prompts += 1
                    sums.prompt_s += max(0, running.first_token_ns - sequence.started_ns) / 1e9
                    sums.prompt_tokens += running.request.prompt_tokens - sequence.cached
                    sums.computed += running.request.prompt_tokens - sequence.cached
        if sequence.finish is None or new:  # else it ended before, and waits for the others of its request
            sums.token_s += max(0, now_ns - since_ns) / 1e9
            sums.tokens += new
        sequence.seen_ns, sequence.seen_tokens = now_ns, sequence.first

    def _measure(self) -> None:
        def both(name: str) -> float:
            return float(getattr(self._now, name) + getattr(self._before, name))

        count, seconds = both("tokens"), both("token_s")
        if self._of_prompts:
            count, seconds = both("prompts"), both("prompt_s")
        computed, busy_s, decodes = both("computed"), both("busy_s"), both("decodes")
        if self._enough(self._now, self._before) and computed > 0:
            self.measured = (
                round(1e6 * seconds / count),
                round(1e6 * busy_s / count),
                round(1e9 * busy_s / computed),
                round(1e6 * both("decode_s") / decodes) if decodes >= LEAST_DECODES else 0,
            )
