"""A request without a worker: what routing derives from it, how it may run, and the job that sends it to one. Pure.

A request whose attempt ended with a crash of its worker is a suspect: it may be what ends its workers. So are all that
ran there. Suspects are spread over different workers, so that the next crash names few. One that two crashes name runs
alone: its worker runs nothing else meanwhile, and a model has one such request at a time. If its worker crashes even
so, it is the cause.

Each such request takes three workers, and one that differs a little is another one. So the requests of a tenant with
several within an hour are watched, as its gateway has marked them: a single crash is enough for them to run alone.

What is known comes from the log. DONE says of each attempt that a worker, or someone on its behalf, returned it, and
whether it crashed (``done.Returned.crashed``). Jobs carry which attempts were lost with their worker. Such a loss may
turn out to be a crash, once the supervisor or the restarted worker reports it. The first one is taken for a crash at
once, since spreading costs nothing; before a third worker the request waits for what is to be known, within a bound.
"""

import enum
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.router.placement.routing import RoutingDecision, RoutingRequest
from penstock.router.state.attempts import Positions, count_crashes
from penstock.router.state.holders import TargetId
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration, Revisions, WorkerState
from penstock.schemas.jobs import (
    ALONE,
    FELL_BACK,
    SUSPECT,
    Decision,
    DecisionInputs,
    EarlierWorker,
    Job,
    LoadHeader,
    score_table,
)
from penstock.schemas.requests import GenerateRequest, stored_as_fallback, without_fallbacks
from penstock.schemas.tokens import Finish, Logprob

EVIDENCE_S = 30.0  # Kubernetes starts a container that crashed a second time again after 20 s


class Standing(enum.StrEnum):
    """How a request may run."""

    free = ""
    suspect = SUSPECT  # away from other suspects
    unknown = "unknown"  # not before it is known why its workers were lost
    alone = ALONE
    poisonous = "poisonous"  # not at all


_NONE: frozenset[str] = frozenset()


class PendingRequest(msgspec.Struct, eq=False):
    """A request that is to be placed, for the first time or again.

    Attributes:
        request: while it is held, as ``trimmed`` leaves it.
        raw: the request as it was stored; b"": that is left in the log, to be read again when it is placed or ends.
        reply: where to acknowledge its message; "": a later attempt, whose message was acknowledged.
        since_ns: when this router got it.
        resume, finished, endings, scored, logprobs, scores, streamed_ns: as in ``Job``, from earlier attempts.
        reason: why it is placed: "new", "worker_lost", "worker_lost: ..." (how its process ended), "returned: ...".
        revision: of the model that earlier attempts ran in.
        share: the share of its class's space that it counts in, while it is held.
        earlier_workers: those of all earlier attempts.
        suspect: how it may run, as of the last look.
        gone: the worker of the attempt before, if its process has ended and it may be registered yet.
        claimed_ns: when its message came to be held, or was claimed last; 0: it is not to be claimed.
        missing_since: monotonic time since when its revision has had no worker; 0: it has one.
    """

    request: GenerateRequest
    raw: bytes
    reply: str
    since_ns: int
    attempt: int = 1
    resume: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()
    endings: tuple[Finish, ...] = ()
    reason: str = "new"
    scored: int = 0
    revision: str = ""
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    scores: tuple[Logprob, ...] = ()
    share: str = ""
    missing_since: float = 0.0
    streamed_ns: int = 0
    earlier_workers: tuple[EarlierWorker, ...] = ()
    suspect: Standing = Standing.free
    gone: str = ""
    claimed_ns: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def streaming(self) -> bool:
        """The client has tokens, which only the same revision can continue. Images and vectors start over instead."""
        return not self.request.output and (self.scored > 0 or any(self.resume) or bool(self.finished))

    @property
    def pinned_revision(self) -> str:
        """The revision of earlier attempts, or else the requested one; "": any."""
        return self.revision or self.request.revision

    @property
    def resumed_tokens(self) -> int:
        """Tokens streamed for the choices that have not finished."""
        if not self.resume:
            return 0
        return sum(len(part) // 4 for i, part in enumerate(self.resume) if i not in self.finished)

    @property
    def computes_whole_prompt(self) -> bool:
        """Prompt log-probabilities are missing: cached blocks have none."""
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def processors(self) -> frozenset[str]:
        """Names of the logits processors that its worker must have."""
        processors = self.request.sampling.logits_processors
        return frozenset(each.name for each in processors) if processors else _NONE


def trimmed(request: GenerateRequest) -> GenerateRequest:
    """What a router reads of a request: not its prompt, and little else that its client wrote. The job has it as it
    was stored (``PendingRequest.raw``)."""
    return request.without_texts(fallbacks=without_fallbacks(request).fallbacks)


def why_fall_back(pending: PendingRequest, workers: bool, now_ns: int, absent_s: float) -> str:
    """Why a held request is to run as one of its fallbacks; "": it waits on.

    Args:
        workers: of its model are there, full or not.
        absent_s: for so long it must have waited without any.
    """
    request = pending.request
    if pending.streaming or not request.fallbacks:
        return ""
    waited_s = (now_ns - (pending.since_ns if request.fallback else request.created_ns)) / 1e9
    if 0 < request.fallback_after_s <= waited_s:
        return f"no worker of {request.model!r} started it within {request.fallback_after_s:g} s"
    return f"{request.model!r} has no worker" if not workers and waited_s >= absent_s else ""


def as_fallback(pending: PendingRequest, number: int, why: str, now_ns: int) -> PendingRequest:
    """A request without a token as one of its fallbacks runs it.

    Args:
        pending: with ``raw``.
        number: as in ``GenerateRequest.fallback``.
    Raises:
        msgspec.MsgspecError, IndexError: this build cannot read it.
    """
    request, raw = stored_as_fallback(pending.raw, number, pending.attempt)
    return PendingRequest(
        request,
        raw,
        pending.reply,
        now_ns,
        attempt=pending.attempt,
        reason=f"{FELL_BACK}: {why}",
        earlier_workers=pending.earlier_workers,
    )


def routing_request(
    pending: PendingRequest,
    keys: Sequence[int],
    *,
    avoid: frozenset[str],
    revision: str | None,
    shared_blocks: int = 0,
    session: tuple[TargetId, ...] = (),
) -> RoutingRequest:
    """
    Args:
        keys: of the prompt's full blocks.
        avoid: workers to use only if no other is left.
        revision: as ``required_revision`` returned it.
        shared_blocks, session: as in ``RoutingRequest``.
    """
    request = pending.request
    return RoutingRequest(
        request.model,
        request.prompt_tokens,
        request.stop.max_tokens,
        prompt_blocks=len(keys),
        n=request.n,
        worker=request.worker,
        avoid=avoid,
        resumed_tokens=pending.resumed_tokens,
        medium=request.media[0].digest if request.media else b"",
        output=request.output,
        processors=pending.processors,
        revision=revision,
        tokenizer=request.tokenizer,
        shared_blocks=shared_blocks,
        session=session,
        adapter=request.lora,
    )


def required_revision(pending: PendingRequest, registered: Revisions) -> str | None:
    """The revision that must run the request; None: any.

    Before its first token, a request whose revision has no ready worker moves to the serving revision.
    """
    if pending.request.embedding is not None:
        return None  # its workers may serve the name of a language model, whose revisions are not theirs
    pinned = pending.pinned_revision
    if pending.streaming and pinned:
        return pinned if pinned in registered.present else registered.continued.get(pinned, pinned)
    if pending.request.worker:
        return None
    if pinned and (pinned in registered.present or registered.serving is None):
        return pinned
    return registered.serving


def lane(pending: PendingRequest, local_prefill_tokens: int) -> str:
    """Requests of one lane wait for the same workers; requests of other lanes do not wait behind them."""
    request = pending.request
    long = pending.prompt_tokens > local_prefill_tokens
    kind = "media" if request.media else "long" if long else "short"
    parts = (request.model, request.worker, request.output or kind, pending.pinned_revision, request.tokenizer)
    return " ".join(
        (
            *parts,
            *([request.lora] if request.lora else ()),
            *sorted(pending.processors),
            *([pending.suspect] if pending.suspect else ()),
        )
    )


def standing(
    returned: Mapping[int, str],
    lost: Sequence[tuple[int, str]],
    explained: Callable[[str], bool],
    waited_s: float,
    *,
    repeats: bool = False,
    watched: bool = False,
) -> Standing:
    """How a request may run, after attempts that ended without a result.

    Args:
        returned: by attempt, as ``ReturnedAttempts`` has it.
        lost: attempts that were lost with their worker, and that worker.
        explained: whether a lost worker is known not to have crashed, since it is registered again.
        waited_s: since the last attempt ended.
        repeats: it has the content of a request that was found to be poisonous.
        watched: its tenant has had several of those lately.
    """
    crashes = count_crashes(returned)
    if ALONE in returned.values() or (repeats and crashes):
        return Standing.poisonous
    if repeats:
        crashes = 2
    enough = 1 if watched else 2
    open_losses = len({attempt for attempt, worker in lost if attempt not in returned and not explained(worker)})
    if open_losses and crashes + open_losses >= enough and waited_s < EVIDENCE_S:
        return Standing.unknown
    if crashes >= enough:
        return Standing.alone
    return Standing.suspect if crashes or open_losses else Standing.free


def crowded(tracker: LoadTracker, model: str, suspect: Standing, now_ns: int) -> frozenset[str]:
    """Workers that a suspect avoids: those with more suspects than others of their role.

    One that is to run alone avoids those with more to do: it waits there until that has ended.
    """
    counts: dict[str, dict[str, int]] = {}
    for each in tracker.serving(model):
        if each.state is WorkerState.ready:
            sequences = (tracker.load((each.worker, rank), now_ns).sequences for rank in range(each.dp_size))
            busy = sum(sequences) if suspect is Standing.alone else tracker.suspects(each.worker)
            counts.setdefault(each.role, {})[each.worker] = busy
    return frozenset(worker for role in counts.values() for worker, count in role.items() if count > min(role.values()))


def build_job(
    pending: PendingRequest,
    decision: RoutingDecision,
    *,
    mode: str,
    router: str,
    revision: str,
    prompt_blocks: int,
    positions: Positions,
    now_ns: int,
    inputs: DecisionInputs,
) -> Job:
    """The job, with the record of the decision. ``decision.route`` must not be empty."""
    route, first = decision.route, decision.route[0]
    record = Decision(
        mode=mode,
        chosen=first.worker,
        router=router,
        at_ns=now_ns,
        prompt_blocks=prompt_blocks,
        waited_ns=now_ns - pending.since_ns,
        kv_seq=positions.kv,
        work_seq=positions.work,
        done_seq=positions.done,
        rank=first.rank,
        reason=pending.reason,
        route=route if len(route) > 1 or first.move is not None else (),
        how=decision.how,
        revision=revision,
    )
    return Job(
        request=msgspec.Raw(pending.raw),
        attempt=pending.attempt,
        decision=record,
        resume=pending.resume,
        finished=pending.finished,
        endings=pending.endings,
        route=route[1:],
        scored=pending.scored,
        logprobs=pending.logprobs,
        scores=pending.scores,
        inputs=msgspec.structs.replace(
            inputs, earlier_workers=pending.earlier_workers, table=score_table(decision.candidates)
        ),
        streamed_ns=pending.streamed_ns,
        suspect=pending.suspect.value,
    )


def build_load(pending: PendingRequest, decision: RoutingDecision, prefill: Registration | None = None) -> LoadHeader:
    """What other routers fold of the job without reading its body.

    Args:
        prefill: the worker that computes the prompt; None: it is in another cell.
    """
    request, route = pending.request, decision.route
    return LoadHeader(
        request.prompt_tokens,
        decision.present_blocks * prefill.block_size if prefill is not None else 0,
        request.token_address,
        request.deadline_ns,
        request.priority.value,
        request.n,
        route if len(route) > 1 or route[0].rank else (),
    )
