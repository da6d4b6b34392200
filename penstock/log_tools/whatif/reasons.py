"""Why requests went where they did: the reasons of all decisions, summed by worker. Pure.

A candidate's cost is split into the terms of ``penstock.router.placement.cost``, in a fixed order: each is what the
cost falls by when its cause is taken away, after those before it. So they add up. What decided against a candidate is
the term that it had most more of than the chosen one; what decided at all is that of the second cheapest.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.log_tools.whatif.change import (
    PlacementChange,
    candidates_of,
    decide_again,
    recorded_cost,
    recorded_route,
    recorded_size,
    redecide,
)
from penstock.router.placement.cost import RequestSize
from penstock.router.placement.routing import TIE, Weights
from penstock.router.state.holders import TargetId
from penstock.schemas.jobs import Candidate, DecisionInputs, Job
from penstock.schemas.requests import decode
from penstock.schemas.wire import encode

MOST = 5_000  # decisions that are explained, evenly chosen: each takes some 0.5 ms
FACTORS = (0.5, 2.0)
WEIGHTS = ("overlap", "prefill", "transfer")

PROMPT, BROUGHT, AHEAD, HELD_UP, CONTEXT, SLOTS, SERVED, SLOWER, SESSION, LOADING = TERMS = (
    "prompt to compute",
    "blocks to bring back",
    "prompts ahead",
    "answers held up",
    "contexts to read",
    "beyond its slots",
    "served lately",
    "slower",
    "not its session's",
    "adapter to load",
)
ALONE, EQUAL = "no other could", "nothing: they cost the same"
UNLISTED = "not in the table"

Part = Literal["whole", "prefill", "decode"]  # of a request, whose cost is asked for
_MANY = 1 << 40


def terms(
    size: RequestSize,
    at: Candidate,
    inputs: DecisionInputs,
    weights: Weights,
    *,
    stage: Part,
) -> dict[str, float]:
    """The cost at a candidate by term, in prompt tokens of work."""

    def cost(candidate: Candidate, given: DecisionInputs) -> float:
        value: float = getattr(recorded_cost(size, candidate, given, weights), stage)
        return value

    found: dict[str, float] = {LOADING: 0.0}
    before, unfavoured = cost(at, inputs), msgspec.structs.replace(inputs, session=(), unloaded=())
    if inputs.unloaded:
        after = cost(at, msgspec.structs.replace(inputs, unloaded=()))
        found[LOADING], before = before - after, after
    for term, without in (
        (SESSION, {}),
        (SLOWER, {"slowness": 1.0, "decode_slowness": 1.0}),
        (SERVED, {"served_tokens": 0}),
        (SLOTS, {"slots": _MANY}),
        (CONTEXT, {"context_blocks": 0}),
        (HELD_UP, {"running": 0, "computing": 0}),
        (AHEAD, {"prefill_tokens": 0}),
    ):
        at = msgspec.structs.replace(at, **without)
        after = cost(at, unfavoured)
        found[term] = before - after
        before = after
    found[PROMPT] = cost(at, msgspec.structs.replace(unfavoured, lower_tiers=())) if inputs.lower_tiers else before
    return found | {BROUGHT: before - found[PROMPT]}


class WorkerReasons(msgspec.Struct, frozen=True):
    """What became of a worker (or rank of one) in all decisions.

    Attributes:
        chosen: decisions in which it computes the prompt, or generates after a prefill worker.
        behind: by term, decisions that another one won, since this one had more of it.
        excluded: by reason, decisions in which it could not be chosen.
        unlisted: decisions whose table, of the cheapest, it is not in.
        then: by change, decisions in which it would have been chosen.
    """

    worker: str
    chosen: int
    behind: dict[str, int]
    excluded: dict[str, int]
    unlisted: int
    then: dict[str, int]


class DecisionReasons(msgspec.Struct, frozen=True):
    """
    Attributes:
        decisions: that are summed.
        of: from which they were evenly chosen.
        decided_by: by term, decisions; ``ALONE`` and ``EQUAL`` for those without one.
        moved: by change of a weight, decisions that would have gone elsewhere.
    """

    decisions: int
    of: int
    decided_by: dict[str, int]
    moved: dict[str, int]
    workers: tuple[WorkerReasons, ...]


class Sample:
    """Keeps some of any number of jobs, evenly chosen: at most ``MOST``, and half as many at least."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._step = 1
        self._seen = 0

    def add(self, job: Job) -> None:
        if self._seen % self._step == 0:
            self.jobs.append(_without_content(job))
            if len(self.jobs) > MOST:
                self.jobs, self._step = self.jobs[::2], 2 * self._step
        self._seen += 1


def _without_content(job: Job) -> Job:
    request = decode(job.request)
    request = msgspec.structs.replace(request, prompt=b"", digests=b"", prompt_length=request.prompt_tokens)
    return msgspec.structs.replace(job, request=msgspec.Raw(encode(request)), logprobs=(), scores=())


def reasons(recorded: Sequence[Job], of: int, weights: Weights = Weights()) -> DecisionReasons:  # noqa: B008  # frozen
    """Sum up decisions that can be decided again.

    Args:
        of: number of decisions from which these were chosen.
        weights: of the router; the changes are ``FACTORS`` of these.
    """
    explained = [job for job in recorded if decide_again(job) is not None]
    changes = changes_of(weights)
    names: set[str] = set()
    listed: Counter[str] = Counter()
    chosen: Counter[str] = Counter()
    decided_by: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    behind: defaultdict[str, Counter[str]] = defaultdict(Counter)
    excluded: defaultdict[str, Counter[str]] = defaultdict(Counter)
    then: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number, job in enumerate(explained):
        for target in recorded_route(job):
            chosen[_name(*target)] += 1
        for each in job.decision.candidates:
            names.add(_name(each.worker, each.rank))
            listed[_name(each.worker, each.rank)] += 1
            if each.excluded:
                excluded[_name(each.worker, each.rank)][each.excluded] += 1
        lost = against(job, weights)
        for name, (term, _) in lost.items():
            behind[name][term] += 1
        decided_by[min(lost.values(), key=lambda each: each[1])[0] if lost else ALONE] += 1
        for what, change in changes.items():
            again = redecide(job, change, number)
            if again is not None and again.then is not None:
                for target in again.then.route:
                    then[_name(*target)][what] += 1
                moved[what] += again.then.route != again.recorded.route
    return DecisionReasons(
        len(explained),
        of,
        dict(decided_by.most_common()),
        {what: moved[what] for what in changes},
        tuple(
            WorkerReasons(
                name,
                chosen[name],
                dict(behind[name].most_common()),
                dict(excluded[name].most_common()),
                len(explained) - listed[name],
                {what: then[name][what] for what in changes},
            )
            for name in sorted(names)
        ),
    )


def changes_of(weights: Weights) -> dict[str, PlacementChange]:
    """Other weights, one at a time, by how they are called."""
    return {
        f"{name} ×{factor:g}": PlacementChange(
            msgspec.structs.replace(weights, **{name: factor * getattr(weights, name)})
        )
        for name in WEIGHTS
        for factor in FACTORS
    }


def against(job: Job, weights: Weights) -> dict[str, tuple[str, float]]:
    """For each candidate that lost: by which term, and how much more it would have cost than the one of its stage.

    What moving the KV costs is left out: it is between two targets.
    """
    if job.inputs is None:
        return {}
    route = recorded_route(job)
    if len(route) == 1:
        return _against(job, job.inputs, route[0], candidates_of(job), weights, "whole")
    table = tuple(each for each in job.decision.candidates if each.excluded in ("", "prefill_full"))
    computing = _against(job, job.inputs, route[0], table, weights, "prefill")
    return computing | _against(job, job.inputs, route[-1], table, weights, "decode")


def _against(
    job: Job, inputs: DecisionInputs, chosen: TargetId, table: Sequence[Candidate], weights: Weights, stage: Part
) -> dict[str, tuple[str, float]]:
    winner = next((each for each in table if (each.worker, each.rank) == chosen), None)
    if winner is None:
        return {}
    size = recorded_size(job, decode(job.request))
    own = terms(size, winner, inputs, weights, stage=stage)
    lost = {}
    for each in table:
        if each is winner or each.role != winner.role:
            continue
        other = terms(size, each, inputs, weights, stage=stage)
        more = {term: other[term] - own[term] for term in TERMS}
        cost = sum(more.values())
        term = max(TERMS, key=lambda term: more[term]) if cost > TIE else EQUAL
        lost[_name(each.worker, each.rank)] = (term, cost)
    return lost


def _name(worker: str, rank: int) -> str:
    return f"{worker}/{rank}" if rank else worker
