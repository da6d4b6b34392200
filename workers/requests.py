"""A worker's view of the requests it runs: from a job to sequences, from ended sequences to a terminal event."""

from array import array
from typing import Any

import msgspec

from infra.model.detokenizer import Detokenizer
from schemas import blocks, done, wire
from schemas.errors import Code
from schemas.jobs import Job, Stage, rank_of
from schemas.requests import GenerateRequest, Stop
from schemas.tokens import Finish, Logprob, carried
from schemas.trace import Stamps, headers, stage_name
from schemas.transfer import Ticket
from workers.engines.base import Held, MediaReservation, MediaSpan, Reservation, SequenceRequest
from workers.sequence_state import SequenceState


class RunningRequest(msgspec.Struct, eq=False):
    """One request that runs here. ``delivery`` is the job's message, acknowledged after the terminal event."""

    request: GenerateRequest
    attempt: int
    delivery: Any
    choices: list[SequenceState]
    outcomes: list[done.Outcome | None]
    routed_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    cached: int = 0
    renewed: float = 0.0  # monotonic time of the last in-progress sign
    cancelled: tuple[Code, str] | None = None
    route: tuple[Stage, ...] = ()  # the stages after this worker
    job: Job | None = None
    holder: SequenceState | None = (
        None  # a prefill stage: the choice whose sequence keeps the prompt's blocks at its end
    )
    held: Held | None = None  # and these are they, for the next worker
    media: MediaReservation | None = None
    fetching: Ticket | None = None  # what its engine fetches by itself, until it has begun to run
    leaving: bool = False  # it is being handed to the next stage
    marks: dict[str, int] | None = None  # of a traced request: times of ``Stamps`` by their names

    @property
    def ended(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)

    @property
    def computed(self) -> bool:
        """Every choice has ended or was handed over."""
        return all(o is not None or c.handed for o, c in zip(self.outcomes, self.choices, strict=True))


def admit(job: Job, request: GenerateRequest, delivery: Any, detokenizer: Detokenizer | None) -> RunningRequest:
    """Build the state of a request; choices that an earlier attempt ended are already outcomes."""
    active = RunningRequest(request, job.attempt, delivery, [], [], job.decision.at_ns, route=job.route, job=job)
    for index in range(request.n):
        resumed = wire.unpack_tokens(job.resume[index]) if index < len(job.resume) else array("I")
        ended = index in job.finished
        stream = None
        if request.stop.strings and not ended:
            assert detokenizer is not None
            stream = detokenizer.stream(request.stop.strings, min_tokens=request.stop.min_tokens)
            for token in resumed:
                stream.push(token)
        choice = SequenceState(
            active,
            request.id,
            job.attempt,
            index,
            request.gateway,
            resumed,
            request.sampling.logprobs is not None,
            stream,
        )
        if job.route:
            choice.max_tokens = request.stop.max_tokens
        if index < len(job.logprobs):
            choice.said += job.logprobs[index]
        active.choices.append(choice)
        active.outcomes.append(_ended_before(job, index, resumed) if ended else None)
    if job.scores:
        active.choices[0].scores += job.scores
    return active


def _ended_before(job: Job, index: int, tokens: "array[int]") -> done.Outcome:
    """The outcome of a choice that an earlier attempt ended."""
    place = job.finished.index(index)
    ending = job.endings[place] if place < len(job.endings) else Finish("")
    return done.Outcome(tokens.tobytes(), ending.reason, ending.stop)


def prompt_digests(request: GenerateRequest, revision: str, block_size: int) -> list[bytes]:
    """CacheSnapshot of the prompt's full blocks."""
    if request.digests and _named_here(request, revision, block_size):
        return blocks.split(request.digests)
    root = blocks.root(revision, request.lora, request.salt)
    return blocks.split(blocks.chain(request.prompt, block_size, root, media_extra(request, block_size)))


def _named_here(request: GenerateRequest, revision: str, block_size: int) -> bool:
    """Whether the gateway has named the blocks as this worker does; a request may have moved to another revision."""
    return request.block_size == block_size and request.revision in ("", revision)


def media_extra(request: GenerateRequest, block_size: int) -> dict[int, bytes]:
    """Hashes of the media in each block, by block position."""
    if not request.media:
        return {}
    return blocks.media_extra(((m.position, m.tokens, m.digest) for m in request.media), block_size)


def sequences(
    active: RunningRequest,
    revision: str,
    block_size: int,
    reservation: Reservation | None = None,
    opaque: bytes = b"",
    *,
    role: str = "",
) -> list[SequenceRequest]:
    """What the engine is asked to run: one sequence per choice that is still open.

    In a prefill stage each ends after one new token, and one of them keeps the prompt's blocks. If the prompt's
    log-probabilities are wanted, the first choice's sequence tells them.

    Args:
        role: this worker's, in traces.
    """
    request = active.request
    prompt = wire.unpack_tokens(request.prompt)
    digests = blocks.split(request.digests) if _named_here(request, revision, block_size) else []
    root = blocks.root(revision, request.lora, request.salt)
    extra = media_extra(request, block_size)
    slots = active.media.slots if active.media is not None else [()] * len(request.media)
    media = [
        MediaSpan(each.position, each.tokens, each.digest, of) for each, of in zip(request.media, slots, strict=True)
    ]
    open_ = [choice for choice, outcome in zip(active.choices, active.outcomes, strict=True) if outcome is None]
    if active.route and open_:
        active.holder = open_[0]
    scorer, score = None, max(1, active.job.scored if active.job is not None else 0)
    handed = reservation is not None or opaque  # by a stage that has told them all
    if open_ and request.sampling.prompt_logprobs is not None and score < len(prompt) and not handed:
        scorer = open_[0]
    rank = rank_of(active.job) if active.job is not None else 0
    trace = None
    if active.marks is not None and request.trace is not None:
        trace = headers(request.id, request.trace, stage_name(active.attempt, role))
    return [
        SequenceRequest(
            key=choice,
            prompt=prompt,
            sampling=request.sampling,
            stop=_one_more(request.stop, choice) if active.route else request.stop,
            choice=choice.index,
            generated=choice.tokens[:],
            digests=digests,
            root=root,
            extra=extra,
            media=media,
            hold=choice is active.holder,
            reservation=reservation,
            opaque=opaque,
            score=score if choice is scorer else 0,
            rank=rank,
            trace=trace,
        )
        for choice in open_
    ]


def _one_more(stop: Stop, choice: SequenceState) -> Stop:
    return msgspec.structs.replace(stop, max_tokens=min(stop.max_tokens, len(choice.tokens) + 1))


def stamps(active: RunningRequest) -> Stamps | None:
    """What is to be said of a traced request's time here. Of several choices, the longest times."""
    if active.marks is None:
        return None
    engine: dict[str, float] = {}
    preemptions = 0
    for choice in active.choices:
        for each in choice.measured or ():
            preemptions += each.preemptions
            for name, value in each.values.items():
                engine[name] = max(value, engine.get(name, value))
    return Stamps(**active.marks, preemptions=preemptions, engine=engine)


def next_job(active: RunningRequest) -> Job:
    """The job of the stage after this one: it goes on behind what was generated here."""
    assert active.job is not None
    wanted = active.request.sampling.logprobs is not None
    finished, endings = [], []
    for choice, outcome in zip(active.choices, active.outcomes, strict=True):
        if outcome is not None:
            finished.append(choice.index)
            endings.append(choice.finish or Finish(outcome.reason, outcome.stop))
    return msgspec.structs.replace(
        active.job,
        resume=tuple(choice.tokens.tobytes() for choice in active.choices),
        finished=tuple(finished),
        endings=tuple(endings),
        route=active.route[1:],
        scored=max(active.job.scored, *(choice.scored for choice in active.choices)),
        logprobs=tuple(carried(choice.said) for choice in active.choices) if wanted else (),
        scores=carried(_scores(active)),
    )


def _scores(active: RunningRequest) -> tuple[Logprob, ...]:
    """Log-probabilities of the prompt that are known here: one choice told them, behind what earlier attempts did."""
    return next((tuple(choice.scores) for choice in active.choices if choice.scores), ())


def already_over(choice: SequenceState, request: GenerateRequest) -> Finish | None:
    """How a resumed choice had ended in substance, if its last attempt died before saying so."""
    if choice.stream is not None and choice.stream.stop is not None:
        return Finish("stop", choice.stream.stop)
    if len(choice.tokens) >= request.stop.max_tokens:
        return Finish("length")
    return None


def terminal(active: RunningRequest, worker: str, now_ns: int) -> done.Done:
    """The terminal event of a request whose choices have all ended, or that was cancelled."""
    request = active.request
    code, message = "", ""
    for choice in active.choices:
        if choice.finish is not None and choice.finish.reason in ("error", "cancelled"):
            code, message = choice.finish.code, choice.finish.message
    if active.cancelled is not None:
        code, message = active.cancelled[0].value, active.cancelled[1]
    reason = "cancelled" if code == Code.cancelled else "error"
    outcomes = tuple(
        outcome or done.Outcome(choice.tokens.tobytes(), reason)
        for outcome, choice in zip(active.outcomes, active.choices, strict=True)
    )
    scores: tuple[Logprob, ...] = ()
    left_out: tuple[str, ...] = ()
    if request.sampling.logprobs is not None:
        outcomes, left_out = _with_logprobs(active, outcomes)
    if request.sampling.prompt_logprobs is not None:
        scores = _scores(active)
        if len(scores) + 1 < len(request.prompt) // 4:
            scores, left_out = (), (*left_out, "scores")
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=active.attempt,
        worker=worker,
        choices=outcomes,
        usage=done.Usage(
            prompt=len(request.prompt) // 4,
            completion=sum(len(outcome.tokens) // 4 for outcome in outcomes),
            cached=active.cached,
        ),
        timings=done.Timings(
            created_ns=request.created_ns,
            routed_ns=active.routed_ns,
            started_ns=active.started_ns,
            first_token_ns=active.first_token_ns,
            ended_ns=now_ns,
        ),
        code=code,
        message=message,
        user=request.user,
        stamps=stamps(active),
        submitted=bytes(active.job.request) if active.job is not None else wire.encode(request),
        scores=scores,
        left_out=left_out,
    )


def _with_logprobs(
    active: RunningRequest, outcomes: tuple[done.Outcome, ...]
) -> tuple[tuple[done.Outcome, ...], tuple[str, ...]]:
    """Outcomes with their log-probabilities, and the name of what is not known of them."""
    told = [choice.said for choice in active.choices]
    if any(len(said) != len(outcome.tokens) // 4 for said, outcome in zip(told, outcomes, strict=True)):
        return outcomes, ("logprobs",)
    with_them = [msgspec.structs.replace(o, logprobs=tuple(said)) for o, said in zip(outcomes, told, strict=True)]
    return tuple(with_them), ()
