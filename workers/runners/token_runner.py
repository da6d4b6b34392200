"""Runs requests for tokens: jobs become sequences in the engine thread, its flushes token items.

Stages that hand KV or embeddings to other workers are in ``disaggregation``.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any, NamedTuple

import msgspec

from penstock.infra.bounded import QueueLimits
from penstock.infra.bus.clock import steady_ns
from penstock.infra.bus.tasks import end
from penstock.infra.constraints.trials import CPU_S, ConstraintTrials, Trial, TrialsBusy
from penstock.infra.process.scheduling import CoreWaits
from penstock.schemas import control, done, fleet, jobs, kv, requests
from penstock.schemas.errors import Code
from penstock.schemas.jobs import WAITED
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.transfer import MIXED, Endpoint, Memory, Prefilled
from penstock.workers.disagg.disaggregation import OTHER_WEIGHTS, DisaggCoordinator
from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines.engine_protocol import (
    BlockReservation,
    Engine,
    EngineError,
    EngineInfo,
    EngineStats,
    Grammars,
    KvTransfer,
    MediaReservation,
    PinnedPrompt,
    RequestError,
    VisionEngine,
    kv_transfer_of,
    vision_of,
)
from penstock.workers.kv_transfer.transport_protocol import Transport
from penstock.workers.runners.flush_publisher import Dumper, FlushPublisher, TokenPace
from penstock.workers.session.adapters import AdapterTable
from penstock.workers.session.request_runner import SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest, admit, already_over, sequence_requests
from penstock.workers.session.terminal_events import SETTLE_S
from penstock.workers.session.weights import WeightsTable

QUEUE_SHARE = 0.25  # jobs taken beyond the slots, so that a freed slot has work at once
IDLE_STATS_S = 0.5  # between two looks at an engine that makes no steps; registrations are renewed less often
TRIAL_CPU_S = 2 * CPU_S  # so that what a gateway accepted is not refused here, where the processor may be slower
TRIAL_WAIT_S = 3_600.0  # a request's deadline is sooner,
TRIAL_LIMITS = QueueLimits(1 << 16, 1 << 30, 1 << 16, 1 << 30)  # and a worker takes few requests at a time
PROFILE_S = 60.0  # of a trace, at most: each second of it is megabytes, held in memory until it is written
TIER_STEP = 1.25
FENCE_S = 10.0  # how long a fenced session waits for the engine's step to end


def tier_costs(known: tuple[float, ...], load_s: float, read_s: float, compute_s: float) -> tuple[float, ...]:
    """``Registration.tier_costs``, which change only by ``TIER_STEP``: each change is a registration.

    Args:
        known: as registered.
        load_s: to copy a block from host memory; 0: unknown, as the others.
        read_s: to read one from a file into host memory.
        compute_s: to compute one.
    """
    if not (load_s and compute_s):
        return known
    times = (load_s, load_s + read_s) if read_s else (load_s,)
    costs = tuple(float(f"{each / compute_s:.2g}") for each in times)
    near = len(costs) == len(known) and all(
        before / TIER_STEP <= each <= before * TIER_STEP for each, before in zip(costs, known, strict=True)
    )
    return known if near else costs


class _Parked(NamedTuple):
    """A request that is to be submitted later. ``revision``: what ``reservation`` and ``opaque`` were computed with."""

    running: RunningRequest
    revision: str
    reservation: BlockReservation | None = None
    opaque: bytes = b""


class TokenRunner:
    """
    Args:
        engine: takes the sequences.
        info: what the engine is.
        transport: moves KV blocks to and from other workers; None: this worker moves none.
        vision: of the engine, if its model takes images.
        grammars: of the engine, if it applies constraints.
        pace: of the worker, over all its sessions.
        adapters: LoRA adapters of the engine, if it applies any; likewise.
        weights: of the engine, if they can change or sleep; likewise.
        prefixes: of the engine, to move prefixes between its cache and those of other workers; None: they stay.
    Attributes:
        disaggregation: the stages of requests that other workers begin or continue.
        publisher: publishes what the engine has computed.
        stage_tasks: stages that are being read, sent or encoded.
    """

    def __init__(
        self,
        context: SessionContext,
        engine: EngineLoop,
        info: EngineInfo,
        transport: Transport | None = None,
        vision: VisionEngine | None = None,
        grammars: Grammars | None = None,
        pace: TokenPace | None = None,
        adapters: AdapterTable | None = None,
        weights: WeightsTable | None = None,
        prefixes: KvTransfer | None = None,
    ) -> None:
        self.slots = info.slots
        self.queue = max(1, int(info.slots * QUEUE_SHARE))
        self._context = context
        self._requests = context.requests
        self._terminal = context.terminal
        self._engine = engine
        self._info = info
        self._transport = transport
        self._moves_prefixes = prefixes is not None and transport is not None
        self._vision = vision
        self._grammars = grammars
        self._trials = ConstraintTrials(cpu_s=TRIAL_CPU_S, wait_s=TRIAL_WAIT_S, limits=TRIAL_LIMITS)
        self._stats = EngineStats(0, 0, 0, 0, info.total_blocks)
        self._pace = pace if pace is not None else TokenPace(context.settings.role)
        self._adapters = adapters
        self._weights = weights
        self._parked: dict[str, _Parked] = {}  # by request: what waits for the weights
        self._core_waits = CoreWaits()
        self._tier_costs: tuple[float, ...] = ()
        self._steps_seen = -1
        self._asked = 0.0
        self._profiling = False
        self._dumper = Dumper(engine, context.id, context.epoch)
        self.stage_tasks: set[asyncio.Task[Any]] = set()
        self._returning: asyncio.Task[Any] | None = None  # of requests that another model may run
        self._compiling: set[asyncio.Task[Any]] = set()
        self.disaggregation = DisaggCoordinator(
            context, engine, info, transport, vision, self._submit, prefixes, self._pace.computing_s
        )
        self.publisher = FlushPublisher(context, engine, self._on_completed, self.disaggregation.on_fetched)
        self._loop = asyncio.get_running_loop()

    # --- requests ---

    def admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        if request.output:
            raise ValueError("this worker generates tokens, and the request is for something else")
        running = admit(job, request, delivery, self._context.model.detokenizer)
        running.revision = self._context.model.revision
        return running

    async def run(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        if self._weights is not None and (drew := self._other_weights(running)) is not None:
            if stage_input is not None:  # nor is what they computed of the prompt of use
                self.release_input(stage_input)
                stage_input = None
            if drew != self._weights.shown.before:
                self._terminal.requeue(running, OTHER_WEIGHTS)
                return
        for sequence in running.sequences:
            finish = already_over(sequence, running.request)
            if finish is not None and running.outcomes[sequence.index] is None:
                await self._finish_sequence(running, sequence, finish)
        if running.ended:
            self._terminal.finish(running)
        elif self._context.settings.role == "encode":
            self._run_stage(running, self.disaggregation.encode(running))
        elif self._grammars is not None and running.request.constraint is not None:
            self._run_stage(running, self._compile(self._grammars, running, stage_input), self._compiling)
        else:
            self._start(running, stage_input)

    def _other_weights(self, running: RunningRequest) -> str | None:
        """The revision whose weights drew tokens of a request; None: there are none, or these drew them."""
        if running.job is None or not any(each.tokens for each in running.sequences):
            return None
        drew = running.job.decision.revision
        if drew in ("", self._context.model.revision):
            return None
        running.revisions = (done.EarlierRevision(drew, tuple(len(each.tokens) for each in running.sequences)),)
        return drew

    async def _compile(self, grammars: Grammars, running: RunningRequest, stage_input: StageInput | None) -> None:
        """Start a request once its constraint is compiled. That takes milliseconds, and the engine does not wait."""
        constraint = running.request.constraint
        assert constraint is not None
        running.grammar = grammars.known(constraint)
        if running.grammar is None:
            try:
                running.grammar = await self._tried(grammars, constraint, running.request)
            except RequestError as error:
                if stage_input is not None:
                    self.release_input(stage_input)
                await self._terminal.reject(running, Code(error.code), error.message)
                return
        if self._requests.running.get(running.request.id) is running and running.cancelled is None:
            self._start(running, stage_input)
        elif stage_input is not None:
            self.release_input(stage_input)

    async def _tried(
        self, grammars: Grammars, constraint: requests.Constraint, request: requests.GenerateRequest
    ) -> object:
        """A compiled constraint, which could be compiled in a process that can be ended."""

        def compile(trial: Trial) -> object:
            return grammars.compile(constraint, trial.size_bytes)

        try:
            async with asyncio.timeout((request.deadline_ns - self._context.bus.clock.now_ns()) / 1e9):
                trial = await self._trials.of(constraint, request.tenant, compile)
        except TimeoutError:
            raise RequestError(Code.deadline_exceeded, "the deadline passed before its turn to be compiled") from None
        except TrialsBusy as busy:
            raise RequestError(Code.overloaded, str(busy)) from None
        if trial.reason:
            raise RequestError(Code.invalid_request, f"the constraint cannot be compiled: {trial.reason}")
        return trial.made

    def _start(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        if isinstance(stage_input, Prefilled):
            self._run_stage(running, self.disaggregation.on_prefilled(running, stage_input))
        elif running.request.media:
            self._run_stage(running, self.disaggregation.load_embeddings(running, stage_input))
        elif self._moves_prefixes and self.disaggregation.may_read_prefix(running):
            self._run_stage(running, self.disaggregation.read_prefix(running))
        else:
            self._submit(running)

    async def _finish_sequence(self, running: RunningRequest, sequence: SequenceState, finish: Finish) -> None:
        """End a sequence that the engine does not run."""
        sequence.finish = finish
        running.outcomes[sequence.index] = done.Outcome(sequence.tokens.tobytes(), finish.reason, finish.stop)
        request = running.request
        item = TokenItem(request.id, running.attempt, sequence.index, len(sequence.tokens), b"", finish)
        await self._context.reporter.items(request.token_address, (item,))

    def _run_stage(
        self, running: RunningRequest, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[Any]] | None = None
    ) -> None:
        """Run a transfer to or from another worker, or other work of ``tasks``, in the background."""
        tasks = self.stage_tasks if tasks is None else tasks
        failed = partial(self._terminal.fail, running, "a stage")
        task = self._context.tasks.spawn(work, name="stage", on_failure=failed)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _submit(
        self, running: RunningRequest, reservation: BlockReservation | None = None, opaque: bytes = b""
    ) -> None:
        """Give a request to the engine, with KV that was fetched for it or with what the engine needs to fetch it."""
        context = self._context
        # What another worker has begun does not wait for what runs here to end.
        if self._weights is not None and self._weights.holds and (self._weights.frozen or not running.prefilled):
            self._parked[running.request.id] = _Parked(running, context.model.revision, reservation, opaque)
            return
        submitted = sequence_requests(
            running, context.model.revision, self._info.block_size, reservation, opaque, role=context.settings.role
        )
        if running.stamp_times is not None:
            self.publisher.trace_first_token(running)
        if reservation is not None:
            self._engine.call(lambda engine: kv_transfer_of(engine).adopt(reservation))
        self._engine.submit(submitted, lambda error: self._on_refused(running, error), running.request.id)

    def _on_refused(self, running: RunningRequest, error: RequestError) -> None:
        """In the engine thread: the engine takes none of the request's sequences."""

        def reject() -> None:
            self._terminal.spawn(self._terminal.reject(running, Code(error.code), error.message))

        self._loop.call_soon_threadsafe(reject)

    def _on_completed(self, running: RunningRequest) -> None:
        if running.ended:
            self._terminal.finish(running)
        else:
            running.handing_off = True
            ticket = self.disaggregation.offer(running)
            self._run_stage(running, self.disaggregation.send_prefilled(running, ticket))

    def _follow_prompts(self, engine: Engine) -> None:
        """In the engine thread."""

        def prompts_end(sequences: list[Any]) -> None:
            self._loop.call_soon_threadsafe(self._on_prompts_end, sequences)

        def prompts_written(prompts: list[PinnedPrompt], layers: int) -> None:
            self._loop.call_soon_threadsafe(self._on_prompts_written, prompts, layers)

        if engine.kv_transfer is not None:
            engine.kv_transfer.prompts_end = prompts_end
            engine.kv_transfer.prompts_written = prompts_written

    def _on_prompts_end(self, sequences: list[Any]) -> None:
        for sequence in sequences:
            if sequence.owner is not None:
                self.disaggregation.announce(sequence.owner)

    def _on_prompts_written(self, prompts: list[PinnedPrompt], layers: int) -> None:
        for prompt in prompts:
            sequence: Any = prompt.key
            if sequence.owner is not None:
                self.disaggregation.written(sequence.owner, prompt, layers)

    # --- waiting for the weights (``RequestHolder``) ---

    def begun(self) -> int:
        count = len(self._requests.running) - len(self._parked)
        return count or int(self._terminal.pending or self.holds_leases)

    async def park_waiting(self) -> None:
        waiting = [each for each in self._requests.running.values() if not each.started_ns]
        groups = [running.sequences for running in waiting]

        def take_back(engine: Engine) -> list[bool]:
            return [
                not any(each.started_ns for each in sequences) and sum(engine.cancel(each) for each in sequences) > 0
                for sequences in groups
            ]

        for running, taken in zip(waiting, await asyncio.wrap_future(self._engine.call(take_back)), strict=True):
            if not taken or self._requests.running.get(running.request.id) is not running:
                continue
            if running.prefilled:  # the KV that came for it went with its sequences
                self._terminal.requeue(running, "its worker's weights change")
            else:
                self._parked[running.request.id] = _Parked(running, self._context.model.revision)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def submit_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for running, revision, reservation, opaque in parked.values():
            if revision == self._context.model.revision or not running.prefilled:
                self._submit(running, reservation, opaque)
                continue
            if reservation is not None:
                self._release_reservation(reservation)
            self._terminal.requeue(running, OTHER_WEIGHTS)

    def _release_reservation(self, reservation: BlockReservation) -> None:
        self._engine.call(lambda engine: kv_transfer_of(engine).release(reservation))

    # --- early ends ---

    def accepts_stop(self, running: RunningRequest) -> bool:
        return not running.handing_off

    def stop_early(self, running: RunningRequest) -> None:
        self._engine.cancel(running.sequences, lambda: self.publisher.end_cancelled(running))

    def free(self, running: RunningRequest, cancel: bool) -> None:
        self._pace.count(running, steady_ns())
        parked = self._parked.pop(running.request.id, None)
        if parked is not None and parked.reservation is not None:
            self._release_reservation(parked.reservation)
        if running.block_wait is not None:
            self._engine.cancel_wait(running.block_wait)
        self.publisher.forget(running)
        self.disaggregation.withdraw(running)
        if cancel:
            self._engine.cancel(running.sequences)
        holder, media = running.kv_holder, running.media
        if holder is not None:
            self._engine.call(lambda engine: engine.release_pinned(holder))
        if media is not None:
            running.media = None
            self._engine.call(lambda engine: _free_media(engine, media))

    def release_input(self, stage_input: StageInput) -> None:
        self.disaggregation.release_input(stage_input)

    async def not_begun(self) -> list[RunningRequest]:
        """Asks the engine thread: a first token may be on its way here, and then this worker must continue."""
        return await self._unstarted([running for running in self._requests.running.values() if not running.started_ns])

    async def _return_late(self, late: list[RunningRequest]) -> None:
        """Return those that have not started, so that another model may run them."""
        for running in await self._unstarted(late):
            after_s = running.request.fallback_after_s
            self._terminal.requeue(running, f"{WAITED}: no worker of it started the request within {after_s:g} s")

    async def _unstarted(self, waiting: list[RunningRequest]) -> list[RunningRequest]:
        groups = [running.sequences for running in waiting]
        try:
            async with asyncio.timeout(SETTLE_S):
                cancelled = await asyncio.wrap_future(self._engine.cancel_unstarted(groups))
        except (TimeoutError, EngineError):  # in a long step, or broken: no token comes soon
            return [running for running in waiting if not running.started_ns]
        return [running for running, gone in zip(waiting, cancelled, strict=True) if gone]

    # --- start and stop ---

    async def open(self) -> None:
        self._context.tasks.spawn(self.publisher.run(), name="flushes")
        self._engine.begin_session(self.publisher.deliver)
        await self.disaggregation.open()
        if self.disaggregation.announces:
            self._engine.call(self._follow_prompts)
        if self._adapters is not None:
            await self._adapters.follow(self._context.bus)
            self._context.tasks.spawn(self._adapters.keep(), name="adapters")
        if self._weights is not None:
            await self._weights.follow(self._context, self)
            self._context.tasks.spawn(self._weights.keep(), name="weights")

    async def fence(self) -> None:
        await end(self._compiling)
        if self.stage_tasks:  # bounded by the transfer timeout; none may continue in the next session
            await asyncio.wait(self.stage_tasks, timeout=self._context.settings.transfer_timeout_s + 1.0)
        # Else the next session would take requests that wait for a long step.
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(FENCE_S):
                await asyncio.wrap_future(self._engine.call(lambda engine: None))

    async def close(self) -> None:
        if self._adapters is not None:
            await self._adapters.unfollow()
        if self._weights is not None:
            await self._weights.unfollow()
        await self.disaggregation.close()
        await end(self.stage_tasks | self._compiling)
        await self._trials.close()

    # --- registration ---

    def registration(self, state: fleet.WorkerState) -> fleet.Registration:
        info, stats, model, settings = self._info, self._stats, self._context.model, self._context.settings
        kv_events, adapters = info.kv_events and settings.publish_events_and_metrics, self._adapters
        return fleet.Registration(
            worker=self._context.id,
            model=model.name,
            role=settings.role,
            engine=info.name,
            epoch=self._context.epoch,
            block_size=info.block_size,
            total_blocks=info.total_blocks // info.dp_size,
            slots=(stats.slots or info.slots) // info.dp_size,
            max_model_len=info.max_model_len,
            state=state,
            aliases=model.aliases,
            revision=model.revision,
            kv_events=kv_events,
            load=fleet.Load(
                stats.running,
                stats.waiting,
                stats.used_blocks,
                stats.cached_blocks,
                self._engine.steps,
                int(1000 * self._engine.pace.slowest_s),
                int(1000 * self._engine.pace.quiet_s),
                *self._pace.measured,
                self._core_waits.percent,
                stats.gpus,
                connector=self.disaggregation.use(stats),
            ),
            dp_size=info.dp_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=settings.name,
            queue=-(-self.queue // info.dp_size),
            connection=model.connection,
            transfer=self._endpoint(),
            vision=self._vision is not None,
            logits_processors=(
                *info.logits_processors,
                *info.constraints,
                *((requests.ADAPTER,) if adapters else ()),
                requests.FALLBACK,
            ),
            reasoning_parser=model.reasoning_parser,
            tool_call_parser=model.tool_call_parser,
            max_batched_tokens=info.max_batched_tokens,
            tokenizer=model.tokenizer,
            silent_cache=settings.prefix_cache and not kv_events and settings.role != "encode" and not info.pair_only,
            pair_only=info.pair_only,
            ignored_options=info.ignored_options,
            device=self._context.metrics.device,
            source=model.source,
            adapters=adapters.registered() if adapters else (),
            adapter_slots=adapters.slots if adapters else 0,
            weights=fleet.FIXED if self._weights is None else self._weights.shown,
            moves_prefixes=self._moves_prefixes,
            reserves=self.disaggregation.reserves,
            reads_layers=self.disaggregation.reserves,
            tier_costs=self._tier_costs,
        )

    def _endpoint(self) -> Endpoint | None:
        """How other workers reach this one's blocks. For engines that move KV by themselves: who is compatible."""
        endpoint = self._transport.endpoint if self._transport is not None else None
        quantization = MIXED if self._context.settings.mixed_quantization else self._info.quantization
        if endpoint is not None and quantization:
            endpoint = msgspec.structs.replace(endpoint, quantization=quantization)
        if not self._info.handoff_layout:
            return endpoint
        if endpoint is None:
            address = socket.gethostname()
            endpoint = Endpoint(self._context.id, self._info.name, address=address, quantization=quantization)
        layout = {"kv": Memory(0, 0, 0, self._info.handoff_memory, layout=self._info.handoff_layout)}
        return msgspec.structs.replace(endpoint, pools=endpoint.pools | layout)

    # --- upkeep and control ---

    @property
    def holds_leases(self) -> bool:
        return bool(self.disaggregation.open_leases)

    def housekeeping(self, now: float) -> None:
        self.disaggregation.sweep(now)
        self._pace.look(self._requests.running.values(), now, steady_ns(), self._engine.pace)
        self._context.metrics.paced(*self._pace.measured)
        stats = self._stats
        self._tier_costs = tier_costs(self._tier_costs, stats.load_s, stats.disk_read_s, stats.compute_s)
        self._core_waits.look(now)
        if self._returning is None or self._returning.done():
            now_ns = self._context.bus.clock.now_ns()
            if late := [each for each in self._requests.running.values() if each.waits_too_long(now_ns)]:
                self._returning = self._context.tasks.spawn(self._return_late(late), name="late")
        if self._weights is not None and self._weights.watches:
            self._weights.look(now)
        steps = self._engine.steps
        if steps != self._steps_seen or now - self._asked > IDLE_STATS_S:  # an idle engine is left asleep
            self._steps_seen, self._asked = steps, now
            self._engine.ask(lambda engine: engine.stats(), self._on_stats)

    def _on_stats(self, stats: EngineStats) -> None:
        self._stats = stats  # in the engine thread; a reference assignment is atomic
        grammars = None if self._grammars is None else self._grammars.stats()
        self._context.metrics.observe(stats, self._context.outbox.unsent_bytes, grammars)

    async def dump(self, page: int) -> kv.KvDump:
        return await self._dumper.page(page, self._context.bus.max_message // 2)

    def release(self, order: control.Release) -> control.Ok:
        return self.disaggregation.release(order)

    async def push(self, order: control.Push) -> control.Pushed:
        return await self.disaggregation.push(order)

    def pin_prefix(self, order: control.PinPrefix) -> control.PrefixPinned:
        return self.disaggregation.pin_prefix(order)

    async def rest(self, order: control.Sleep | control.Wake) -> control.Ok:
        return await self._weights.rest(order) if self._weights is not None else control.Ok("its engine does not sleep")

    async def profile(self, order: control.RecordTrace) -> control.RecordedTrace:
        """One trace at a time; the engine serves meanwhile, slower."""
        if self._info.name != "native":
            return control.RecordedTrace(
                error=f"only the native engine records traces on request, not {self._info.name}"
            )
        if not 0 < order.seconds <= PROFILE_S:
            return control.RecordedTrace(error=f"{order.seconds:g} s cannot be recorded; the limit is {PROFILE_S:g} s")
        if self._profiling:
            return control.RecordedTrace(error="a trace is being recorded already; try again when it has ended")
        from penstock.workers.engines.native.profiler import StepTrace  # torch

        self._profiling = True
        try:
            trace = await asyncio.wrap_future(self._engine.call(lambda engine: StepTrace()))
            try:
                await asyncio.sleep(order.seconds)
            finally:
                ended = asyncio.wrap_future(self._engine.call(lambda engine: trace.end()))
            await ended
            path = await asyncio.to_thread(trace.write)  # a step of many kernels is megabytes of text
        except (EngineError, OSError, RuntimeError, ValueError) as error:
            return control.RecordedTrace(error=f"no trace could be recorded: {error}")
        finally:
            self._profiling = False
        return control.RecordedTrace(socket.gethostname(), str(path))


def _free_media(engine: Engine, media: MediaReservation) -> None:
    vision_of(engine).release(media)
