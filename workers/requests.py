"""A worker's view of the requests it runs: from a job to sequences, from ended sequences to a terminal event."""

from array import array
from typing import Any

import msgspec

from configs.detokenize import Detokenizer
from schemas import blocks, done, wire
from schemas.errors import Code
from schemas.jobs import Job
from schemas.requests import GenerateRequest
from schemas.tokens import Finish
from workers.engines.base import SequenceRequest
from workers.runner import Choice


class Active(msgspec.Struct, eq=False):
    """One request that runs here. ``delivery`` is the job's message, acknowledged after the terminal event."""

    request: GenerateRequest
    attempt: int
    delivery: Any
    choices: list[Choice]
    outcomes: list[done.Outcome | None]
    routed_ns: int
    started_ns: int = 0
    first_token_ns: int = 0
    cached: int = 0
    renewed: float = 0.0  # monotonic time of the last in-progress sign
    cancelled: tuple[Code, str] | None = None

    @property
    def ended(self) -> bool:
        return all(outcome is not None for outcome in self.outcomes)


def admit(job: Job, request: GenerateRequest, delivery: Any, detokenizer: Detokenizer | None) -> Active:
    """Build the state of a request; choices that an earlier attempt ended are already outcomes."""
    active = Active(request, job.attempt, delivery, [], [], job.decision.at_ns)
    for index in range(request.n):
        resumed = wire.unpack_tokens(job.resume[index]) if index < len(job.resume) else array("I")
        ended = index in job.finished
        stream = None
        if request.stop.strings and not ended:
            assert detokenizer is not None
            stream = detokenizer.stream(request.stop.strings, min_tokens=request.stop.min_tokens)
            for token in resumed:
                stream.push(token)
        choice = Choice(
            active,
            request.id,
            job.attempt,
            index,
            request.gateway,
            resumed,
            request.sampling.logprobs is not None,
            stream,
        )
        active.choices.append(choice)
        active.outcomes.append(_ended_before(job, index, resumed) if ended else None)
    return active


def _ended_before(job: Job, index: int, tokens: "array[int]") -> done.Outcome:
    """The outcome of a choice that an earlier attempt ended."""
    place = job.finished.index(index)
    ending = job.endings[place] if place < len(job.endings) else Finish("")
    return done.Outcome(tokens.tobytes(), ending.reason, ending.stop)


def sequences(active: Active, revision: str) -> list[SequenceRequest]:
    """What the engine is asked to run: one sequence per choice that is still open."""
    request = active.request
    prompt = wire.unpack_tokens(request.prompt)
    digests = blocks.split(request.digests)
    root = blocks.root(revision, request.lora, request.salt)
    return [
        SequenceRequest(
            key=choice,
            prompt=prompt,
            sampling=request.sampling,
            stop=request.stop,
            choice=choice.index,
            generated=choice.tokens[:],
            digests=digests,
            root=root,
        )
        for choice, outcome in zip(active.choices, active.outcomes, strict=True)
        if outcome is None
    ]


def already_over(choice: Choice, request: GenerateRequest) -> Finish | None:
    """How a resumed choice had ended in substance, if its last attempt died before saying so."""
    if choice.stream is not None and choice.stream.stop is not None:
        return Finish("stop", choice.stream.stop)
    if len(choice.tokens) >= request.stop.max_tokens:
        return Finish("length")
    return None


def terminal(active: Active, worker: str, now_ns: int) -> done.Done:
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
    )
