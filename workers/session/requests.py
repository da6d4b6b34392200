"""A request as its worker sees it: from a job to sequences, from ended sequences to a terminal event.

``RequestTable`` has the requests of one session by state: running, ending, ended, cancelled before their job arrived.
``Housekeeping`` looks several times a second at deadlines, in-progress signs of running jobs, unacknowledged output.
"""

import asyncio
import contextlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import IN_PROGRESS
from penstock.infra.process.class_queue import StartShare
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.registry import stop_search
from penstock.schemas import block_hashes, done, wire
from penstock.schemas.errors import Code
from penstock.schemas.jobs import ALONE, EarlierWorker, Job, Stage, earlier_workers, rank_of, waited, weight_of
from penstock.schemas.requests import MARKS, GenerateRequest, Sampling, Stop
from penstock.schemas.tokens import Finish, Logprob, carried
from penstock.schemas.trace import Stamps, headers, stage_name
from penstock.schemas.transfer import Ticket
from penstock.workers.engine_loop.loop import BlockWait
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines.engine_protocol import (
    BlockReservation,
    MediaReservation,
    MediaSpan,
    PinnedPrompt,
    SequenceRequest,
)
from penstock.workers.session.lease import Outbox


class RunningRequest(msgspec.Struct, eq=False):
    """One request that runs here. ``delivery`` is the job's message, acknowledged after the terminal event."""

    request: GenerateRequest
    attempt: int
    delivery: Any
    sequences: list[SequenceState]
    outcomes: list[done.Outcome | None]
    routed_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    cached: int = 0
    progress_signalled: float = 0.0  # monotonic time of the last in-progress sign
    cancelled: tuple[Code, str] | None = None
    route: tuple[Stage, ...] = ()  # the stages after this worker
    job: Job | None = None
    kv_holder: SequenceState | None = None  # prefill stage: the sequence that keeps the prompt's blocks at its end
    pinned: PinnedPrompt | None = None  # the blocks it kept, for the decode worker
    media: MediaReservation | None = None
    fetching: Ticket | None = None  # for KV that the engine fetches by itself, until it has started
    handing_off: bool = False  # being handed to the next stage
    revision: str = ""  # of the weights when it came
    prefilled: bool = False  # by another worker: its times are of there, if it had begun
    grammar: object = None  # keeps the compiled constraint until its sequences have copies of it
    block_wait: BlockWait[Any] | None = None  # for blocks, into which data from another worker comes
    stamp_times: dict[str, int] | None = None  # of a traced request: times in ns by their names in ``Stamps``
    revisions: tuple[done.EarlierRevision, ...] = ()  # of weights that were replaced while it ran

    def times(self, offset_ns: int) -> tuple[int, int]:
        """When it started, and its first token, in Unix time at the broker; 0: did not happen.

        Args:
            offset_ns: from this machine's clock to the broker's.
        """
        return self.started_ns and self.started_ns + offset_ns, self.first_token_ns and self.first_token_ns + offset_ns

    @property
    def alone(self) -> bool:
        """Whether nothing else may run on this worker meanwhile."""
        return self.job is not None and self.job.suspect == ALONE

    @property
    def falls_back(self) -> bool:
        """Whether another model may run it in place of this one, since no token was streamed."""
        return bool(self.request.fallbacks) and not any(sequence.tokens for sequence in self.sequences)

    def waits_too_long(self, now_ns: int) -> bool:
        """Whether another model is to run it, if one can: this worker has not started it in time. Asked for once: if
        no other model can, it waits here."""
        request, job = self.request, self.job
        if not request.fallback_after_s or job is None or self.started_ns or self.prefilled or not self.falls_back:
            return False
        since_ns = self.routed_ns if request.fallback else request.created_ns
        late = now_ns - since_ns >= request.fallback_after_s * 1e9
        return late and not waited(earlier_workers(job), request.fell_back_at)

    @property
    def ended(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)

    @property
    def completed_here(self) -> bool:
        """Whether every sequence has ended or is to be handed off."""
        return all(o is not None or s.handed_off for o, s in zip(self.outcomes, self.sequences, strict=True))

    def detach_sequences(self) -> None:
        """It is over, or handed off. Its sequences no longer refer to it, so it is freed without garbage collection."""
        for sequence in self.sequences:
            sequence.owner = None


def admit(job: Job, request: GenerateRequest, delivery: Any, detokenizer: Detokenizer | None) -> RunningRequest:
    """The state of a request; choices that an earlier attempt ended have their outcomes already."""
    running = RunningRequest(request, job.attempt, delivery, [], [], job.decision.at_ns, route=job.route, job=job)
    for index in range(request.n):
        resumed = wire.unpack_tokens(job.resume[index]) if index < len(job.resume) else array("I")
        ended = index in job.finished
        stream = None
        if request.stop.strings and not ended:
            assert detokenizer is not None
            stream = stop_search(request, index, detokenizer)
            for token in resumed:
                stream.push(token)
        sequence = SequenceState(
            running,
            request.id,
            job.attempt,
            index,
            request.token_address,
            resumed,
            request.sampling.logprobs is not None,
            stream,
        )
        if job.route:
            sequence.max_tokens = request.stop.max_tokens
        sequence.falls_back = bool(request.fallbacks) and not any(job.resume)
        if index < len(job.logprobs):
            sequence.sent_logprobs += job.logprobs[index]
        running.sequences.append(sequence)
        running.outcomes.append(_ended_before(job, index, resumed) if ended else None)
    if job.scores:
        running.sequences[0].prompt_logprobs += job.scores
    return running


def _ended_before(job: Job, index: int, tokens: "array[int]") -> done.Outcome:
    """The outcome of a sequence that an earlier attempt ended."""
    place = job.finished.index(index)
    ending = job.endings[place] if place < len(job.endings) else Finish("")
    return done.Outcome(tokens.tobytes(), ending.reason, ending.stop)


def prompt_digests(request: GenerateRequest, revision: str, block_size: int) -> list[bytes]:
    """Names of the prompt's full blocks."""
    if request.digests and _hashed_here(request, revision, block_size):
        return block_hashes.split(request.digests)
    root = block_hashes.root(revision, request.lora, request.salt)
    return block_hashes.split(block_hashes.chain(request.prompt, block_size, root, media_extra(request, block_size)))


def _hashed_here(request: GenerateRequest, revision: str, block_size: int) -> bool:
    """Whether the gateway hashed the blocks as this worker does; the request may have moved to another revision."""
    return request.block_size == block_size and request.revision in ("", revision)


def media_extra(request: GenerateRequest, block_size: int) -> dict[int, bytes]:
    """Hashes of the media in each block, by block position."""
    if not request.media:
        return {}
    return block_hashes.media_extra(((m.position, m.tokens, m.digest) for m in request.media), block_size)


def sequence_requests(
    running: RunningRequest,
    revision: str,
    block_size: int,
    reservation: BlockReservation | None = None,
    opaque: bytes = b"",
    *,
    role: str = "",
) -> list[SequenceRequest]:
    """What the engine is to run: one sequence per choice that has not ended.

    In a prefill stage each ends after one new token, and one of them keeps the prompt's blocks. If the prompt's
    log-probabilities are wanted, the first of them computes them.

    Args:
        role: this worker's, in traces.
    """
    request = running.request
    prompt = wire.unpack_tokens(request.prompt)
    digests = block_hashes.split(request.digests) if _hashed_here(request, revision, block_size) else []
    root = block_hashes.root(revision, request.lora, request.salt)
    extra = media_extra(request, block_size)
    slots = running.media.slots if running.media is not None else [()] * len(request.media)
    media = [
        MediaSpan(each.position, each.tokens, each.digest, of, each.grid, each.seconds)
        for each, of in zip(request.media, slots, strict=True)
    ]
    open_ = [sequence for sequence, outcome in zip(running.sequences, running.outcomes, strict=True) if outcome is None]
    if running.route and open_:
        running.kv_holder = open_[0]
    scorer, score = None, max(1, running.job.scored if running.job is not None else 0)
    handed = reservation is not None or opaque  # the previous stage has streamed them all
    if open_ and request.sampling.prompt_logprobs is not None and score < len(prompt) and not handed:
        scorer = open_[0]
    rank, weight = (rank_of(running.job), weight_of(running.job)) if running.job is not None else (0, 1.0)
    share = StartShare(request.priority.rank, request.tenant, weight)
    return [
        SequenceRequest(
            key=sequence,
            prompt=prompt,
            sampling=_sampling(request),
            stop=_one_more(request.stop, sequence) if running.route else request.stop,
            choice=sequence.index,
            generated=sequence.tokens[:],
            digests=digests,
            root=root,
            extra=extra,
            media=media,
            pin=sequence is running.kv_holder,
            reservation=reservation,
            opaque=opaque,
            score=score if sequence is scorer else 0,
            rank=rank,
            trace=_trace(running, role),
            client_request_id=request.client_request_id,
            constraint=request.constraint,
            adapter=request.lora,
            handoff=ticket_id(running, running.route[0]) if running.route else "",
            share=share,
            salt=request.salt,
            no_store=request.no_store,
            chat=request.chat,
            falls_back=running.falls_back,
            patience_s=request.fallback_after_s if running.falls_back else 0.0,
        )
        for sequence in open_
    ]


def _trace(running: RunningRequest, role: str) -> dict[str, str] | None:
    request = running.request
    if running.stamp_times is None or request.trace is None:
        return None
    return headers(request.id, request.trace, stage_name(running.attempt, role))


def _sampling(request: GenerateRequest) -> Sampling:
    """Without the names of processors that keep a request from workers that know no constraints, adapters, fallbacks
    or chats."""
    if request.constraint is None and not (request.lora or request.fallback or request.chat):
        return request.sampling
    rest = tuple(each for each in request.sampling.logits_processors if each.name not in MARKS)
    return msgspec.structs.replace(request.sampling, logits_processors=rest)


def _one_more(stop: Stop, sequence: SequenceState) -> Stop:
    return msgspec.structs.replace(stop, max_tokens=min(stop.max_tokens, len(sequence.tokens) + 1))


def stamps(running: RunningRequest, offset_ns: int) -> Stamps | None:
    """Timings of a traced request at this worker, the longest among its sequences; None: it is not traced.

    Args:
        offset_ns: from this machine's clock to the broker's.
    """
    if running.stamp_times is None:
        return None
    engine: dict[str, float] = {}
    preemptions = 0
    for sequence in running.sequences:
        for each in sequence.measurements or ():
            preemptions += each.preemptions
            for name, value in each.values.items():
                engine[name] = max(value, engine.get(name, value))
    times = {name: at_ns + offset_ns for name, at_ns in running.stamp_times.items()}
    return Stamps(**times, preemptions=preemptions, engine=engine)


def next_job(running: RunningRequest, revision: str = "") -> Job:
    """The job for the next stage, which continues after what was generated here.

    Args:
        revision: of the weights that generated it; they may have been replaced since the decision.
    """
    assert running.job is not None
    decision = running.job.decision
    if decision.revision and revision:
        decision = msgspec.structs.replace(decision, revision=revision)
    wanted = running.request.sampling.logprobs is not None
    finished, endings = [], []
    for sequence, outcome in zip(running.sequences, running.outcomes, strict=True):
        if outcome is not None:
            finished.append(sequence.index)
            endings.append(sequence.finish or Finish(outcome.reason, outcome.stop))
    return msgspec.structs.replace(
        running.job,
        decision=decision,
        resume=tuple(sequence.tokens.tobytes() for sequence in running.sequences),
        finished=tuple(finished),
        endings=tuple(endings),
        route=running.route[1:],
        scored=max(running.job.scored, *(sequence.scored_tokens for sequence in running.sequences)),
        logprobs=tuple(carried(sequence.sent_logprobs) for sequence in running.sequences) if wanted else (),
        scores=carried(_prompt_logprobs(running)),
    )


def ticket_id(running: RunningRequest, stage: Stage) -> str:
    """Of the handoff to ``stage``, the same in every attempt to publish it."""
    return f"{running.request.id}:{running.attempt}:{stage.role}"


def _prompt_logprobs(running: RunningRequest) -> tuple[Logprob, ...]:
    """Log-probabilities of the prompt known here: one sequence has them, those of earlier attempts first."""
    return next((tuple(sequence.prompt_logprobs) for sequence in running.sequences if sequence.prompt_logprobs), ())


def already_over(sequence: SequenceState, request: GenerateRequest) -> Finish | None:
    """The end of a resumed sequence whose last attempt was lost between its last token and its end; else None."""
    if sequence.stream is not None and sequence.stream.stop is not None:
        return Finish("stop", sequence.stream.stop)
    if len(sequence.tokens) >= request.stop.max_tokens:
        return Finish("length")
    return None


def terminal(
    running: RunningRequest, worker: str, now_ns: int, made_with: done.MadeWith, offset_ns: int = 0
) -> done.Done:
    """The terminal event of a request whose choices have all ended, or that was cancelled.

    Args:
        now_ns: at the broker.
        offset_ns: from this machine's clock to the broker's.
    """
    request, (started_ns, first_token_ns) = running.request, running.times(offset_ns)
    code, message = "", ""
    for sequence in running.sequences:
        if sequence.finish is not None and sequence.finish.reason in ("error", "cancelled"):
            code, message = sequence.finish.code, sequence.finish.message
    if running.cancelled is not None:
        code, message = running.cancelled[0].value, running.cancelled[1]
    reason = "cancelled" if code == Code.cancelled else "error"
    counts = {sequence.index: sequence.usage for sequence in running.sequences if sequence.usage is not None}
    outcomes = tuple(
        outcome or done.Outcome(sequence.tokens.tobytes(), reason)
        for outcome, sequence in zip(running.outcomes, running.sequences, strict=True)
    )
    scores: tuple[Logprob, ...] = ()
    left_out = done.not_recorded(request)
    if request.sampling.logprobs is not None:
        outcomes, more = _with_logprobs(running, outcomes)
        left_out += more
    if request.sampling.prompt_logprobs is not None:
        scores = _prompt_logprobs(running)
        if len(scores) + 1 < request.prompt_tokens:
            scores, left_out = (), (*left_out, "scores")
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=running.attempt,
        worker=worker,
        choices=outcomes,
        usage=(done.total(counts, request.n) if counts else None)
        or done.usage_of(request, [outcome.tokens for outcome in outcomes], running.cached),
        timings=done.Timings(
            created_ns=request.created_ns,
            routed_ns=running.routed_ns,
            started_ns=started_ns,
            first_token_ns=first_token_ns,
            ended_ns=now_ns,
            streamed_ns=running.job.streamed_ns if running.job is not None else 0,
            earlier_workers=_earlier_workers(running, worker),
            made_with=_made_with(made_with, running),
            router=running.job.decision.router if running.job is not None else "",
        ),
        code=code,
        message=message,
        user=request.user,
        stamps=stamps(running, offset_ns),
        submitted=done.recorded(request),
        scores=scores,
        left_out=left_out,
    )


def _made_with(made_with: done.MadeWith, running: RunningRequest) -> done.MadeWith:
    fallback, before = running.request.fallback, running.revisions
    return msgspec.structs.replace(made_with, fallback=fallback, before=before) if fallback or before else made_with


def _earlier_workers(running: RunningRequest, worker: str) -> tuple[EarlierWorker, ...]:
    """Of earlier attempts, and of this one's earlier stages."""
    job = running.job
    if job is None:
        return ()
    route = job.decision.route[: len(job.decision.route) - len(job.route)]
    return earlier_workers(job) + tuple(
        EarlierWorker(job.attempt, stage.worker) for stage in route if stage.worker != worker
    )


def _with_logprobs(
    running: RunningRequest, outcomes: tuple[done.Outcome, ...]
) -> tuple[tuple[done.Outcome, ...], tuple[str, ...]]:
    """Outcomes with their log-probabilities; if some are missing, without, and the name of the field left out."""
    sent = [sequence.sent_logprobs for sequence in running.sequences]
    if any(len(values) != len(outcome.tokens) // 4 for values, outcome in zip(sent, outcomes, strict=True)):
        return outcomes, ("logprobs",)
    with_them = [msgspec.structs.replace(o, logprobs=tuple(values)) for o, values in zip(outcomes, sent, strict=True)]
    return tuple(with_them), ()


LONGEST_REASON = 200  # characters of why a request was cancelled
REMEMBERED = 20_000  # ended and cancelled requests each


class Admission(Enum):
    """What to do with a delivered job."""

    RUN = auto()
    OVER = auto()  # ended, revoked or overtaken by a later attempt: acknowledge it
    PENDING = auto()  # redelivered: the request keeps this delivery and acknowledges it when it ends


class RequestTable:
    """``ending`` holds requests whose terminal event or return is not stored yet; until it is, they are not over.

    Args:
        on_removed: called when this worker has no more to do with a request; True: it may still be computed here.
    Attributes:
        ended: the last attempt of each request that ended or was revoked here.
    """

    def __init__(self, on_removed: Callable[[RunningRequest, bool], None]) -> None:
        self.running: dict[str, RunningRequest] = {}
        self.ending: dict[str, RunningRequest] = {}
        self.ended: OrderedDict[str, int] = OrderedDict()
        self._cancelled: OrderedDict[str, str] = OrderedDict()  # request -> reason
        self._on_removed = on_removed

    def admission(self, request_id: str, attempt: int, delivery: Any) -> Admission:
        if self.ended.get(request_id, -1) >= attempt:
            return Admission.OVER
        for other in (self.ending.get(request_id), self.running.get(request_id)):
            if other is None or other.attempt < attempt:
                continue
            if other.attempt > attempt:
                return Admission.OVER
            other.delivery = delivery
            return Admission.PENDING
        return Admission.RUN

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt, or a later one, has come."""
        here = [each[request_id].attempt for each in (self.running, self.ending) if request_id in each]
        return max(*here, self.ended.get(request_id, -1), -1) >= attempt

    def owns(self, running: RunningRequest) -> bool:
        """Whether it is still this worker's, to run or to end."""
        return self.running.get(running.request.id) is running

    def is_current(self, running: RunningRequest) -> bool:
        """Whether it is still this worker's to run."""
        return self.owns(running) and running.cancelled is None

    def remove(self, running: RunningRequest, *, cancel: bool = True) -> None:
        """This worker has no more to do with it. ``cancel``: the runner may still be computing it."""
        if self.owns(running):
            del self.running[running.request.id]
        running.detach_sequences()
        self._on_removed(running, cancel)

    def begin_ending(self, running: RunningRequest) -> None:
        self.ending[running.request.id] = running

    def stop_ending(self, running: RunningRequest) -> None:
        if self.ending.get(running.request.id) is running:
            del self.ending[running.request.id]

    def mark_ended(self, request_id: str, attempt: int) -> None:
        """This attempt and earlier ones are over."""
        self.ended[request_id] = max(attempt, self.ended.get(request_id, attempt))
        self._cancelled.pop(request_id, None)
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)

    def remember_cancel(self, request_id: str, reason: str) -> None:
        """The client cancelled before the job arrived here."""
        if request_id in self.ended or request_id in self.ending:
            return
        self._cancelled[request_id] = reason[:LONGEST_REASON]
        if len(self._cancelled) > REMEMBERED:
            self._cancelled.popitem(last=False)

    def early_cancel(self, request_id: str) -> str | None:
        """The reason, if the request was cancelled before its job came."""
        return self._cancelled.get(request_id)


ACK_WAIT_S = 30.0  # of the session's consumer
INTERVAL_S = 0.1


class Housekeeping:
    """
    Args:
        stop_early: ends a running request with a code and a message.
        each_time: the runner's own upkeep, given the monotonic time.
    """

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        requests: RequestTable,
        stop_early: Callable[[RunningRequest, Code, str], None],
        each_time: Callable[[float], None],
    ) -> None:
        self._bus = bus
        self._outbox = outbox
        self._requests = requests
        self._stop_early = stop_early
        self._each_time = each_time

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._enforce_deadlines(self._bus.clock.now_ns())
            now = time.monotonic()
            await self._signal_progress(now)
            with contextlib.suppress(NatsError):  # the connection broke; the outbox resends on the next one
                await self._outbox.confirm()
            self._each_time(now)

    def _enforce_deadlines(self, now_ns: int) -> None:
        for running in list(self._requests.running.values()):
            if now_ns >= running.request.deadline_ns:
                self._stop_early(running, Code.deadline_exceeded, "the deadline passed while the request ran")

    async def _signal_progress(self, now: float) -> None:
        """Keep the broker from delivering running and ending jobs again."""
        for running in (*self._requests.running.values(), *self._requests.ending.values()):
            if now - running.progress_signalled > ACK_WAIT_S / 3 and self._bus.connected:
                running.progress_signalled = now
                with contextlib.suppress(NatsError):
                    await self._bus.nc.publish(running.delivery.reply, IN_PROGRESS)
