"""Decides recorded routing decisions again, with a change such as other weights or fewer workers. Pure.

A job records the inputs of its decision: the score table with the loads of the cheapest targets, which of them can hand
KV to each other, the seed, and the weights' terms. So a decision can be repeated without the index or the loads of
that time. Loads stay as recorded: the effect of an earlier changed decision on them is not simulated; ``penstock bench
router`` does that.

The effect of a change on recorded decisions, in figures. Pure.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from penstock.cli.figures import quantile
from penstock.log_tools.whatif.decided_again import candidates_of, decide_again, recorded_pools, recorded_route
from penstock.router.placement.routing import Weights, draw
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import ENCODE
from penstock.schemas.jobs import Job
from penstock.schemas.requests import decode_head

Mode = Literal["kv", "round_robin", "random", "least_loaded"]


class PlacementChange(msgspec.Struct, frozen=True):
    """
    Attributes:
        without: workers, by id or name, that are missing.
        killed: workers that are missing from ``at_ns`` on (Unix time).
    """

    weights: Weights = Weights()
    mode: Mode = "kv"
    without: frozenset[str] = frozenset()
    killed: frozenset[str] = frozenset()
    at_ns: int = 0

    def removes(self, worker: str, at_ns: int) -> bool:
        """Whether a worker is missing at a time. Its id is its name and eight hexadecimal digits."""
        gone = self.without | self.killed if at_ns >= self.at_ns else self.without
        return worker in gone or worker.rpartition("-")[0] in gone

    def unknown(self, workers: Collection[str]) -> list[str]:
        """Names in the change that match none of ``workers``, so that the change would have no effect."""
        names = {*workers, *(worker.rpartition("-")[0] for worker in workers)}
        return sorted((self.without | self.killed) - names)


class ChosenTargets(msgspec.Struct, frozen=True):
    """The target of one request, or its prefill and its decode target. Counts are prompt tokens.

    Attributes:
        cached: held by the computing target, or about to be computed there for another request.
        ahead: to be computed there before the first token of this request, relative to a worker of usual speed.
    """

    route: tuple[TargetId, ...]
    cached: int
    ahead: float

    @property
    def worker(self) -> str:
        """The worker that computes the prompt."""
        return self.route[0][0]


class Redecided(msgspec.Struct, frozen=True):
    """A recorded decision and its repetition. ``then`` None: no target is left, so the request would wait."""

    at_ns: int
    prompt_tokens: int
    recorded: ChosenTargets
    reproduced: bool  # without the change, this build decides as recorded
    then: ChosenTargets | None


def redecide(job: Job, change: PlacementChange, number: int) -> Redecided | None:
    """Decide a job's decision again.

    Args:
        number: number of the decision, for round robin.
    Returns:
        None: the record does not suffice (``penstock.log_tools.whatif.decided_again.insufficient`` says why).
    """
    again = decide_again(job)
    if again is None or job.inputs is None:
        return None
    decision = job.decision
    tokens = decode_head(job.request).prompt_tokens
    recorded = recorded_route(job)
    without = {each.worker for each in decision.candidates if change.removes(each.worker, decision.at_ns)}
    then = () if _without_encoder(job, without) else _choose(job, without, change, number)
    return Redecided(
        decision.at_ns,
        tokens,
        _choice(job, recorded, tokens),
        again.route == recorded,
        _choice(job, then, tokens) if then else None,
    )


def _choose(job: Job, without: Collection[str], change: PlacementChange, number: int) -> tuple[TargetId, ...]:
    """Choose the targets for prompt and tokens. Empty: none is left."""
    pools = recorded_pools(job, change.weights, without)
    if pools is not None:
        return pools.decide(recorded_route(job), change.mode, number)
    if change.mode == "kv":
        again = decide_again(job, change.weights, without)
        return again.route if again is not None else ()
    left = [each for each in candidates_of(job) if each.worker not in without]
    if not left or job.inputs is None:
        return ()
    order = sorted(left, key=lambda each: (each.worker, each.rank))  # as routers number their targets
    match change.mode:
        case "round_robin":
            chosen = order[number % len(order)]
        case "random":
            chosen = order[draw(job.inputs.seed) % len(order)]
        case _:
            chosen = min(order, key=lambda each: each.running / max(1, each.slots))
    return ((chosen.worker, chosen.rank),)


def _without_encoder(job: Job, without: Collection[str]) -> bool:
    """Whether the request has media and no encode worker is left."""
    route = job.decision.route
    if not route or route[0].role != ENCODE:
        return False
    return all(each.worker in without for each in job.decision.candidates if each.role == ENCODE and not each.excluded)


def _choice(job: Job, route: tuple[TargetId, ...], prompt_tokens: int) -> ChosenTargets:
    at = next(each for each in job.decision.candidates if (each.worker, each.rank) == route[0])
    block_size = job.inputs.block_size if job.inputs is not None else 0
    cached = min(at.overlap_blocks * block_size, prompt_tokens)
    return ChosenTargets(route, cached, at.slowness * (at.prefill_tokens + max(1, prompt_tokens - cached)))


class RequestDistribution(msgspec.Struct, frozen=True):
    """The distribution of requests. ``ahead``: prompt tokens computed before the first token, queued ones included.

    Attributes:
        cached_share: of all prompt tokens, those that came from a cache.
        ahead_p50, ahead_p95: None: no request was placed.
        balance: prompt tokens to compute at the busiest worker, relative to the mean; 1 is even.
        by_worker: number of requests whose prompt the worker computes.
        decoded_by: number of requests that the worker decodes after another one computed the prompt.
    """

    requests: int
    cached_share: float
    ahead_p50: float | None
    ahead_p95: float | None
    balance: float
    by_worker: dict[str, int]
    decoded_by: dict[str, int] = {}


class WhatIfReport(msgspec.Struct, frozen=True):
    """
    Attributes:
        decisions: number in the log, within the times.
        usable: decisions whose record suffices to repeat them.
        left_out: the others, by the reason.
        reproduced: decisions that this build repeats as recorded.
        moved: requests that go to another worker with the change.
        waiting: requests for which no worker is left.
    """

    decisions: int
    usable: int
    reproduced: int
    moved: int
    waiting: int
    first_ns: int
    last_ns: int
    recorded: RequestDistribution
    then: RequestDistribution
    ms_per_token: float | None  # from work ahead to the first token, as measured; None: unknown
    left_out: dict[str, int] = {}


def report(
    decisions: int,
    redecided: Sequence[Redecided],
    ms_per_token: float | None = None,
    left_out: Mapping[str, int] = {},  # only read
) -> WhatIfReport:
    """Compute the figures of all repeated decisions."""
    return WhatIfReport(
        decisions,
        len(redecided),
        sum(each.reproduced for each in redecided),
        sum(each.then is not None and each.then.route != each.recorded.route for each in redecided),
        sum(each.then is None for each in redecided),
        min((each.at_ns for each in redecided), default=0),
        max((each.at_ns for each in redecided), default=0),
        _placement((each.recorded, each.prompt_tokens) for each in redecided),
        _placement((each.then, each.prompt_tokens) for each in redecided if each.then is not None),
        ms_per_token,
        dict(left_out),
    )


def _placement(choices: Iterable[tuple[ChosenTargets, int]]) -> RequestDistribution:
    requests: Counter[str] = Counter()
    work: Counter[str] = Counter()
    decoded: Counter[str] = Counter()
    prompt = cached = 0
    ahead = []
    for choice, tokens in choices:
        requests[choice.worker] += 1
        work[choice.worker] += tokens - choice.cached
        if len(choice.route) > 1:
            decoded[choice.route[-1][0]] += 1
        prompt += tokens
        cached += choice.cached
        ahead.append(choice.ahead)
    ahead.sort()
    mean = sum(work.values()) / len(work) if work else 0.0
    return RequestDistribution(
        len(ahead),
        cached / prompt if prompt else 0.0,
        quantile(ahead, 0.5, None),
        quantile(ahead, 0.95, None),
        max(work.values()) / mean if mean else 1.0,
        dict(sorted(requests.items())),
        dict(sorted(decoded.items())),
    )


def ms_per_token(measured: Iterable[tuple[float, float]]) -> float | None:
    """The median ratio of time to first token and work ahead.

    Args:
        measured: (ms from the decision to the first token, tokens of work ahead).
    """
    return quantile(sorted(ms / ahead for ms, ahead in measured if ahead > 0), 0.5, None)
