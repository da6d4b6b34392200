"""Jobs and the decisions behind them: router (or the previous stage) → worker."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.schemas.errors import FALLS_BACK, Code
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_LOAD, HEADER_NO_STORE, HEADER_PART, HEADER_SUSPECT
from penstock.schemas.tokens import Finish, Logprob
from penstock.schemas.transfer import Encoded, Prefilled
from penstock.schemas.wire import content_type, decoder

FAILED = "failed"  # prefix of the reason of a failed attempt that may fall back; code and message follow
WAITED = "waited"  # prefix of the reason of an attempt that was not started in time and may fall back
FELL_BACK = "fallback"  # prefix of the reason of an attempt that moved a request to another model
WORKER_LOST = "worker_lost"  # prefix of the reason of an attempt after the previous worker was lost
JOB_LOST = "job_lost"  # prefix of the reason of an attempt after the broker lost the previous one's job
SUSPECT = "suspect"  # a worker that ran it crashed
ENDED = "ended"  # an attempt of it ended for an unknown reason
ALONE = "alone"  # two attempts did: its worker runs nothing else meanwhile


def failed(code: Code, message: str) -> str:
    """The reason of an attempt that failed before its first token, and may fall back to another model."""
    return f"{FAILED} {code.value} {message}"


def waited(earlier: Iterable["EarlierWorker"], since: int) -> int:
    """The reason of attempts, from number ``since`` on, that no worker started in time."""
    return len(
        {each.attempt for each in earlier if each.attempt >= since and each.ended.startswith(f"returned: {WAITED}")}
    )


def failure_in(reason: str) -> tuple[Code, str] | None:
    """Inverse of ``failed``, in the reason of the next attempt; None: the attempt before ended otherwise."""
    kind, _, failure = reason.removeprefix("returned: ").partition(" ")
    code, _, message = failure.partition(" ")
    return (Code(code), message) if kind == FAILED and code in FALLS_BACK else None


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a decision's score table. Blocks and tokens are counts; the lowest score wins."""

    worker: str
    overlap_blocks: int = 0  # leading prompt blocks it holds, on any tier of its cache
    active_blocks: int = 0  # of its unfinished requests
    prefill_tokens: int = 0  # still to be computed for them
    running: int = 0
    slots: int = 0
    score: float = 0.0
    excluded: str = ""  # why it was not scored: "full", "draining", "too_small", ...
    rank: int = 0  # attention data-parallel rank
    role: str = ""  # the stage it was scored for; "": the whole request
    context_blocks: int = 0  # prompt blocks of its sequences, shared ones counted for each
    computing: int = 0  # of ``running``, those whose prompt was not computed yet
    slowness: float = 1.0  # learnt: time per prompt token, relative to the model's other targets
    decode_slowness: float = 1.0  # the same per step
    served_tokens: int = 0  # of the prompts that it was sent lately, and more if another router prefers it


class ScoreRow(Candidate, frozen=True, array_like=True, omit_defaults=False, gc=False):
    """A ``Candidate`` as jobs hold it: the same fields, by position."""


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """Leading blocks of a prompt that a worker reads from another one instead of computing them."""

    source: str  # the worker that has them
    blocks: int  # leading ones of the prompt that it has; the reader may have some of them, too
    path: str = ""  # between the two, for people


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stage of a route."""

    role: str  # of the worker: "encode", "prefill", "decode", "aggregated"
    worker: str
    rank: int = 0
    move: Move | None = None  # what it may read before it computes the prompt; what it cannot read, it computes


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The routing decision: stored in the job, printed by ``penstock inspect``."""

    mode: str
    chosen: str
    router: str
    at_ns: int
    candidates: tuple[Candidate, ...] = ()  # no longer written: ``DecisionInputs.table`` has them
    prompt_blocks: int = 0
    waited_ns: int = 0
    kv_seq: int = 0  # position of the index in the KV stream
    work_seq: int = 0
    done_seq: int = 0
    rank: int = 0
    reason: str = ""  # "new", "worker_lost", "returned", ...
    route: tuple[Stage, ...] = ()  # all stages, the chosen one first; empty: one worker does all by itself
    how: str = ""  # why the stages were split or not, as text
    revision: str = ""  # of the model; a worker that continues the job must serve the same


class Link(msgspec.Struct, frozen=True, array_like=True):
    """The abilities of a worker in a score table besides running whole requests. Numbers are valid in this table only.

    It is encoded as an array with all its fields: a field added here would change the bytes of recorded jobs.

    Attributes:
        kind: workers with the same kind can hand KV to each other; 0: to none.
        host: workers with the same number are on one host; 0: unknown.
    """

    role: str
    kind: int = 0
    host: int = 0
    rdma: bool = False


class EarlierWorker(NamedTuple):
    """An earlier worker of a request. ``ended``: the reason why its attempt ended; "": it was handed off."""

    attempt: int
    worker: str
    ended: str = ""

    @property
    def lost(self) -> bool:
        """Whether the attempt ended with its worker."""
        return self.ended.startswith(WORKER_LOST)


class LowerTiers(msgspec.Struct, frozen=True, array_like=True):
    """The ``overlap_blocks`` of a candidate that are on lower cache tiers, and the cost of loading one."""

    worker: str
    rank: int
    host_blocks: int
    disk_blocks: int
    host_cost: float  # where computing a block is 1
    disk_cost: float


class DecisionInputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Inputs of a decision besides the request, the clock and the logs that the router had folded."""

    seed: int = 0  # of its random choices, such as ties
    number: int = 0  # of decisions that this router had made, this one included
    held: int = 0  # requests held at that time
    learnt: int = 0  # computed prompts that the learnt costs came from
    shared_blocks: int = 0  # leading blocks of the prompt that many prompts begin with
    block_size: int = 0  # tokens
    links: tuple[Link, ...] = ()  # of each candidate; empty: all run whole requests
    pair_only: tuple[int, ...] = ()  # positions of the candidates that run a request only as one of a pair
    session: tuple[tuple[str, int], ...] = ()  # worker and rank of each stage of its session's last request
    on_gpu: tuple[int, ...] = ()  # positions of the candidates whose KV is in the memory of a GPU
    earlier_workers: tuple[EarlierWorker, ...] = ()  # that had the request in earlier attempts
    weight: float = 1.0  # of its tenant, when it was placed: its share of the queue at its worker, too
    unloaded: tuple[str, ...] = ()  # candidates that have its adapter in host memory only: they would load it first
    table: tuple[ScoreRow, ...] = ()  # the candidates, at most 16
    lower_tiers: tuple[LowerTiers, ...] = ()  # of the candidates that have some of the prompt there


class Job(msgspec.Struct, frozen=True, omit_defaults=True, tag="job"):
    """Run this request. ``resume`` has the tokens that earlier attempts streamed, packed u32 per choice.

    ``request`` is an encoded GenerateRequest, carried as it was stored: routers never re-encode prompts.
    """

    request: msgspec.Raw
    attempt: int
    decision: Decision
    resume: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()  # choices that earlier attempts ended
    route: tuple[Stage, ...] = ()  # disaggregated: the stages after this one
    endings: tuple[Finish, ...] = ()  # of the choices in ``finished``, in the same order
    scored: int = 0  # leading prompt tokens whose log-probabilities were streamed; 0: none
    logprobs: tuple[tuple[Logprob, ...], ...] = ()  # of the tokens in ``resume``, for the record; may be left out
    scores: tuple[Logprob, ...] = ()  # of the prompt's tokens 1 .. ``scored``, for the record; may be left out
    inputs: DecisionInputs | None = None  # of ``decision``; None: a later stage
    streamed_ns: int = 0  # when the first token in ``resume`` was stored, Unix time
    suspect: str = ""  # SUSPECT or ALONE: it may be what ended the workers of earlier attempts; "": it is not suspected
    lost: tuple[tuple[int, str], ...] = ()  # no longer written: ``inputs.earlier_workers`` has them


def score_table(candidates: Iterable[Candidate]) -> tuple[ScoreRow, ...]:
    """Candidates as jobs hold them."""
    return tuple(ScoreRow(*msgspec.structs.astuple(each)) for each in candidates)


def with_candidates(job: Job) -> Job:
    """The job with its decision's candidates in the field that earlier builds used, for readers of the log."""
    if job.inputs is None or not job.inputs.table:
        return job
    candidates = tuple(Candidate(*msgspec.structs.astuple(row)) for row in job.inputs.table)
    return msgspec.structs.replace(
        job,
        decision=msgspec.structs.replace(job.decision, candidates=candidates),
        inputs=msgspec.structs.replace(job.inputs, table=()),
    )


def earlier_workers(job: Job) -> tuple[EarlierWorker, ...]:
    """The workers of earlier attempts. Older builds name only those that were lost."""
    if job.inputs is not None and job.inputs.earlier_workers:
        return job.inputs.earlier_workers
    return tuple(EarlierWorker(attempt, worker, WORKER_LOST) for attempt, worker in job.lost)


def unexplained_losses(earlier: Iterable[EarlierWorker]) -> list[tuple[int, str]]:
    """Attempts that were lost with their worker, and the worker, if the reason of its end was not reported yet."""
    return [(each.attempt, each.worker) for each in earlier if each.ended == WORKER_LOST]


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Attempts up to this one were moved: stop them, and publish no more about them."""

    request: str
    attempt: int


def weight_of(job: Job) -> float:
    """The weight of the job's tenant."""
    return 1.0 if job.inputs is None else job.inputs.weight


def rank_of(job: Job) -> int:
    """The rank on which the worker that has the job now runs it."""
    route = job.decision.route
    return route[-1 - len(job.route)].rank if len(route) > len(job.route) else job.decision.rank


def move_of(job: Job) -> Move | None:
    """The blocks that the job's current worker may read from another worker's cache."""
    route = job.decision.route
    return route[-1 - len(job.route)].move if len(route) > len(job.route) else None


WorkMessage = Job | Encoded | Prefilled | Revoke

decode = decoder(WorkMessage)  # type: ignore[arg-type, var-annotated]
decode_job = decoder(Job)
JOB_TYPE = content_type(Job)
REVOKE_HEADERS = {HEADER_CONTENT_TYPE: content_type(Revoke)}


def load_header(
    prompt_tokens: int,
    cached_tokens: int,
    token_address: str,
    deadline_ns: int,
    priority: str,
    n: int = 1,
    route: tuple[Stage, ...] = (),
) -> str:
    """The ``Penstock-Load`` header of a message in WORK, which routers read instead of the body.

    Args:
        route: the remaining stages, the receiving one first.
    """
    stages = ",".join(f"{stage.role}:{stage.worker}:{stage.rank}" for stage in route) or "-"
    return f"{prompt_tokens} {cached_tokens} {token_address} {deadline_ns} {priority} {n} {stages}"


def headers_of(
    load: str, content_type: str = JOB_TYPE, *, no_store: bool, suspect: str = "", part: str = ""
) -> dict[str, str]:
    """The headers of a message in WORK besides its id.

    Args:
        load: its load header.
        content_type: content type of its kind; "": unknown, as in messages of earlier builds.
        suspect: as in ``Job``.
        part: the part of the request's contents with the whole message; "": this is the whole message.
    """
    headers = {HEADER_LOAD: load}
    if content_type:
        headers[HEADER_CONTENT_TYPE] = content_type
    if no_store:
        headers[HEADER_NO_STORE] = "1"
    if suspect:
        headers[HEADER_SUSPECT] = suspect
    if part:
        headers[HEADER_PART] = part
    return headers


class LoadHeader(NamedTuple):
    """Counts in tokens; ``n`` choices."""

    prompt_tokens: int
    cached_tokens: int
    token_address: str
    deadline_ns: int
    priority: str
    n: int = 1
    route: tuple[Stage, ...] = ()


def read_load_header(text: str) -> LoadHeader:
    """Inverse of ``load_header``. Further words of later versions are ignored.

    Raises:
        ValueError: malformed.
    """
    parts = text.split(" ")
    if len(parts) < 5:
        raise ValueError(f"{text!r} is not a load header")
    n = int(parts[5]) if len(parts) > 5 else 1
    stages = parts[6] if len(parts) > 6 else "-"
    route = () if stages == "-" else tuple(map(_stage, stages.split(",")))
    return LoadHeader(int(parts[0]), int(parts[1]), parts[2], int(parts[3]), parts[4], n, route)


def _stage(text: str) -> Stage:
    role, worker, rank = text.split(":")
    return Stage(role, worker, int(rank))
