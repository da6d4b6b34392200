"""A life of a worker that computes tokens: jobs become sequences in the engine thread, its flushes token items.

Stages that hand KV or embeddings to other workers are in ``workers.disaggregation``; what all workers share is in
``workers.life``.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog

from configs.settings import WorkerSettings
from infra.bus.connection import Bus
from infra.bus.publisher import Publisher
from infra.bus.tasks import end
from schemas import done, fleet, jobs, kv, requests
from schemas.control import Ok, Push, Pushed, Release
from schemas.errors import Code
from schemas.tokens import Finish, TokenItem
from schemas.transfer import Endpoint, Memory, Prefilled
from workers.disaggregation import DisaggCoordinator
from workers.engine_thread import EngineThread
from workers.engines.base import (
    Engine,
    EngineError,
    EngineInfo,
    EngineStats,
    MediaReservation,
    RequestError,
    Reservation,
    VisionEngine,
)
from workers.kv_dump import Dumper
from workers.kv_transfer.base import Transport
from workers.life import SETTLE_S, Life, Model, StageInput
from workers.metrics import Metrics
from workers.requests import RunningRequest, admit, already_over, sequences
from workers.sequence_state import Flush, SequenceState

log = structlog.get_logger("worker")

QUEUE_SHARE = 0.25  # jobs taken beyond the slots, so that a freed slot has work at once


class Session(Life):
    """``info`` and ``vision`` describe the engine that the thread runs; with a ``transport`` it hands blocks over."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        engine: EngineThread,
        info: EngineInfo,
        model: Model,
        settings: WorkerSettings,
        metrics: Metrics,
        transport: Transport | None = None,
        vision: VisionEngine | None = None,
    ) -> None:
        queue = max(1, int(info.slots * QUEUE_SHARE))
        super().__init__(bus, publisher, model, settings, metrics, slots=info.slots, queue=queue)
        self._engine = engine
        self._info = info
        self._stats = EngineStats(0, 0, 0, 0, info.total_blocks)
        self._flushes: asyncio.Queue[Flush] = asyncio.Queue()
        self._dumper = Dumper(engine, self.id, self.epoch)
        self._transport = transport
        self._vision = vision
        self._moving: set[asyncio.Task[Any]] = set()  # stages under way between workers
        self._silent: dict[str, RunningRequest] = {}  # traced, and no token of this worker yet
        self._disagg = DisaggCoordinator(
            self,
            bus,
            publisher,
            self._outbox,
            engine,
            info,
            transport,
            vision,
            model.name,
            model.revision,
            settings,
            metrics,
        )

    # --- life ---

    def _background(self) -> None:
        self._tasks.spawn(self._publish_flushes(), name="flushes")

    async def _opening(self) -> None:
        await self._disagg.open()

    async def _not_begun(self) -> list[RunningRequest]:
        """Asked of the engine's thread: a first token may be on its way here, and then this worker has to go on."""
        waiting = await super()._not_begun()
        try:
            async with asyncio.timeout(SETTLE_S):
                withdrawn = await asyncio.wrap_future(
                    self._engine.cancel_unstarted([active.choices for active in waiting])
                )
        except (TimeoutError, EngineError):  # in the midst of a long step, or broken: no token comes soon
            return [active for active in waiting if not active.started_ns]
        return [active for active, dropped in zip(waiting, withdrawn, strict=True) if dropped]

    def _holding(self) -> bool:
        return bool(self._disagg.open_leases)

    async def fence(self) -> None:
        """The lease is lost: drop everything without a word; others have taken over."""
        await self._drop_all()
        if self._moving:  # bounded by the transfer's own time; nothing may go on in the next session's name
            await asyncio.wait(self._moving, timeout=self._settings.transfer_timeout_s + 1.0)
        # Also without choices: behind this the engine delivers nothing more to this session, so that no flush is left
        # untaken here and the engine waits for it.
        dropped = asyncio.Event()

        def tell() -> None:
            self._loop.call_soon_threadsafe(dropped.set)

        self._engine.cancel([], tell)
        self._engine.flush_consumed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(dropped.wait(), 10)
        await self._close()
        self._engine.new_epoch()

    async def _closing(self) -> None:
        await self._disagg.close()
        await end(self._moving)

    async def _close(self) -> None:
        await super()._close()
        while not self._flushes.empty():
            self._flushes.get_nowait()
            self._engine.flush_consumed()

    def _registration(self) -> fleet.Registration:
        info, stats = self._info, self._stats
        return fleet.Registration(
            worker=self.id,
            model=self._model.name,
            role=self._settings.role,
            engine=info.name,
            epoch=self.epoch,
            block_size=info.block_size,
            total_blocks=info.total_blocks // info.dp_size,
            slots=info.slots // info.dp_size,
            max_model_len=info.max_model_len,
            state=self._state,
            aliases=self._model.aliases,
            revision=self._model.revision,
            kv_events=info.kv_events and self._settings.publish_events_and_metrics,
            load=fleet.Load(stats.running, stats.waiting, stats.used_blocks, stats.cached_blocks),
            dp_size=info.dp_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=self._settings.name,
            queue=-(-self._queue // info.dp_size),
            connection=self._model.connection,
            transfer=self._endpoint(),
            vision=self._vision is not None,
            logits_processors=info.logits_processors,
            reasoning_parser=self._model.reasoning_parser,
            tool_call_parser=self._model.tool_call_parser,
            max_batched_tokens=info.max_batched_tokens,
            tokenizer=self._model.tokenizer,
        )

    def _endpoint(self) -> Endpoint | None:
        """How other workers reach this one's blocks; of engines that move KV by themselves only who fits whom."""
        endpoint = self._transport.endpoint if self._transport is not None else None
        if not self._info.handover:
            return endpoint
        if endpoint is None:
            endpoint = Endpoint(self.id, self._info.name, address=socket.gethostname())
        layout = {"kv": Memory(0, 0, 0, layout=self._info.handover)}
        return msgspec.structs.replace(endpoint, pools=endpoint.pools | layout)

    # --- work in ---

    def _admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        if request.diffusion is not None:
            raise ValueError("this worker makes tokens, and pictures are asked for")
        return admit(job, request, delivery, self._model.detokenizer)

    async def _take(self, active: RunningRequest, arrived: StageInput | None) -> None:
        for choice in active.choices:
            if active.outcomes[choice.index] is None and (finish := already_over(choice, active.request)):
                await self._finish_choice(active, choice, finish)
        if active.ended:
            self._finish(active)
        else:
            self._begin(active, arrived)

    def _unwanted(self, arrived: StageInput) -> None:
        self._disagg.unwanted(arrived)

    def _begin(self, active: RunningRequest, arrived: StageInput | None) -> None:
        if self._settings.role == "encode":
            self._move(active, self._disagg.encode(active))
        elif isinstance(arrived, Prefilled):
            self._move(active, self._disagg.on_prefilled(active, arrived))
        elif active.request.media:
            self._move(active, self._disagg.load_embeddings(active, arrived))
        else:
            self.compute(active)

    # --- for stages ---

    def compute(self, active: RunningRequest, reservation: Reservation | None = None, opaque: bytes = b"") -> None:
        """Give a request to the engine, with the KV that was brought here for it, or with what it needs to fetch it."""
        asked = sequences(
            active, self._model.revision, self._info.block_size, reservation, opaque, role=self._settings.role
        )
        if active.marks is not None:
            self._silent[active.request.id] = active
        if reservation is not None:
            self._engine.call(lambda engine: engine.adopt(reservation))
        self._engine.submit(asked, lambda error: self._refuse(active, error))

    def on_handed_off(self, active: RunningRequest) -> None:
        """The next stage has it."""
        self._remember(active.request.id, active.attempt)
        self._remove(active, cancel=False, drop=False)  # the lease holds the blocks

    def release(self, order: Release) -> Ok:
        return self._disagg.release(order)

    async def push(self, order: Push) -> Pushed:
        return await self._disagg.push(order)

    def _move(self, active: RunningRequest, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.spawn(work, name="stage", on_failure=partial(self._failed, active, "a stage"))
        self._moving.add(task)
        task.add_done_callback(self._moved)

    def _moved(self, task: "asyncio.Task[Any]") -> None:
        self._moving.discard(task)
        self._idle.set()

    def _remove(self, active: RunningRequest, *, cancel: bool = True, drop: bool = True) -> None:
        """The engine lets go of all that is kept for it."""
        super()._remove(active)
        self._disagg.cancel_wait(active)
        if active.marks is not None and self._silent.get(active.request.id) is active:
            del self._silent[active.request.id]
        if cancel:
            self._engine.cancel(active.choices)
        holder, media = active.holder, active.media
        if holder is not None and drop:
            self._engine.call(lambda engine: engine.release_held(holder))
        if media is not None:
            active.media = None
            self._engine.call(lambda engine: _free(engine, media))

    def _refuse(self, active: RunningRequest, error: RequestError) -> None:
        """In the engine thread: the engine takes none of the request's sequences."""

        def end() -> None:
            self._spawn(self._end(active, Code(error.code), error.message))

        self._loop.call_soon_threadsafe(end)

    def _stop_early(self, active: RunningRequest, code: Code, message: str) -> None:
        if active.cancelled is not None or active.leaving:
            return  # the next stage hears of it too
        active.cancelled = (code, message)

        def dropped() -> None:  # engine thread; what was generated until now was handed over before
            self._loop.call_soon_threadsafe(self._flushes.put_nowait, _Ended(active))

        self._engine.cancel(active.choices, dropped)

    # --- tokens out ---

    def deliver(self, flush: Flush) -> None:
        """In the engine thread."""
        self._loop.call_soon_threadsafe(self._flushes.put_nowait, flush)

    async def _publish_flushes(self) -> None:
        while True:
            flush = await self._flushes.get()
            if isinstance(flush, _Ended):
                try:
                    await self._end_early(flush.active)
                except Exception as error:
                    self._failed(flush.active, "its end", error)
                continue
            try:
                await self._publish(flush)
            finally:
                self._engine.flush_consumed()

    async def _publish(self, flush: Flush) -> None:
        """What fails concerns the requests that it was for; all others go on, and batches stay in order."""
        for gateway, items in flush.items.items():
            try:
                await self._report.items(gateway, tuple(items))
            except Exception as error:
                for active in {id(one): one for item in items if (one := self._active.get(item.request))}.values():
                    self._failed(active, "its tokens' way out", error)
        if flush.batches and self._settings.publish_events_and_metrics:
            for rank, seq, events in flush.batches:
                try:
                    await self._report.events(self._model.name, rank, seq, tuple(events))
                except Exception:  # routers see the gap in the numbers, and ask for the whole cache
                    log.exception("kv_events_publish_failed", rank=rank, seq=seq)
        try:
            self._account(flush)
        except Exception as error:
            owners = [choice.owner for choice in (*flush.started, *flush.ended)]
            for active in {id(one): one for one in owners if isinstance(one, RunningRequest)}.values():
                self._failed(active, "its accounting", error)
        for choice in flush.ended:
            owner = choice.owner
            assert isinstance(owner, RunningRequest)
            try:
                self._ended(owner, choice)
            except Exception as error:
                self._failed(owner, "its end", error)

    def _account(self, flush: Flush) -> None:
        for choice in flush.started:
            active = choice.owner
            assert isinstance(active, RunningRequest)
            if not active.started_ns:
                active.started_ns = choice.started_ns
                active.cached = choice.cached
            if active.marks is not None:
                active.marks.setdefault("started_ns", choice.started_ns)
        if flush.items:
            now = time.time_ns()
            if self._silent:
                self._spoke(flush, now)
            tokens = 0
            for items in flush.items.values():
                for item in items:
                    tokens += len(item.tokens) >> 2
                    if not item.first:  # never so of the prompt's log-probabilities
                        active_now = self._active.get(item.request)
                        if active_now is not None and not active_now.first_token_ns:
                            active_now.first_token_ns = now
            self._metrics.tokens.inc(tokens)
        for held in flush.held:
            choice = held.key  # type: ignore[assignment]
            active = choice.owner
            assert isinstance(active, RunningRequest)
            active.held = held
        for choice in flush.started:
            active = choice.owner
            assert isinstance(active, RunningRequest)
            if active.fetching is not None:
                self._disagg.on_fetched(active)

    def _ended(self, active: RunningRequest, choice: SequenceState) -> None:
        """The engine is done with a choice, and all that it said of it is on its way."""
        finish = choice.finish
        if choice.lacking:
            if self.owns(active):
                self._requeue(active, choice.lacking, poison=False)
            return
        if finish is not None:
            active.outcomes[choice.index] = done.Outcome(choice.tokens.tobytes(), finish.reason, finish.stop)
        else:
            choice.handed = True
        if not active.computed or active.leaving or not self.current(active):
            return
        if active.ended:
            self._finish(active)
        else:
            active.leaving = True
            self._move(active, self._disagg.send_prefilled(active))

    def _spoke(self, flush: Flush, now_ns: int) -> None:
        """Of traced requests, the first token of this worker, which need not be the request's."""
        for items in flush.items.values():
            for item in items:
                active = self._silent.pop(item.request, None) if item.tokens else None
                if active is not None and active.marks is not None:
                    active.marks["first_token_ns"] = now_ns

    # --- ends ---

    async def _finish_choice(self, active: RunningRequest, choice: SequenceState, finish: Finish) -> None:
        """End a choice that the engine does not run."""
        choice.finish = finish
        active.outcomes[choice.index] = done.Outcome(choice.tokens.tobytes(), finish.reason, finish.stop)
        request = active.request
        item = TokenItem(request.id, active.attempt, choice.index, len(choice.tokens), b"", finish)
        await self._report.items(request.gateway, (item,))

    # --- upkeep ---

    def _upkeep(self, now: float) -> None:
        self._disagg.sweep(now)
        self._engine.ask(lambda engine: engine.stats(), self._stats_arrived)

    def _stats_arrived(self, stats: EngineStats) -> None:
        self._stats = stats  # a reference assignment, from the engine thread
        self._metrics.observe(stats, self._outbox.unsent_bytes)

    async def dump(self, page: int) -> kv.KvDump:
        """A page of the cache's names."""
        return await self._dumper.page(page, self._bus.max_message // 2)


class _Ended(Flush):
    """In the order of flushes: the engine has dropped this request."""

    __slots__ = ("active",)

    def __init__(self, active: RunningRequest) -> None:
        super().__init__()
        self.active = active


def _free(engine: Engine, media: MediaReservation) -> None:
    engine.media_release(media)  # type: ignore[attr-defined]  # only a vision engine made one


__all__ = ["Model", "Session"]
