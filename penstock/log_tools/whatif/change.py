"""Decides recorded routing decisions again, with a change such as other weights or fewer workers. Pure.

A job records the inputs of its decision: the score table with what the formula (``placement.cost``) takes for the
cheapest targets, their loads, which of them can hand KV to each other, the seed, and the weights' terms. So a decision
is made again from the record alone, by the rules of ``penstock.router.placement.decide``. With the router's own weights
the outcome is what it chose. Loads stay as recorded: the effect of an earlier changed decision on them is not
simulated; ``penstock bench router`` does that.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.cli.figures import quantile
from penstock.configs.settings import RouterMode
from penstock.router.placement.cost import (
    ADAPTER_TOKENS,
    RequestSize,
    Scalars,
    TargetCost,
    favour_tokens,
    favoured,
    reusable,
    target_cost,
)
from penstock.router.placement.decide import FAR, MEDIUM, NEAR, queue_tokens
from penstock.router.placement.routing import TIE, Weights, draw
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import ENCODE, TargetColumns
from penstock.schemas.jobs import Candidate, DecisionInputs, Job, Link
from penstock.schemas.requests import GenerateRequest, decode, decode_head

_ANY_NUMBER = 1 << 60  # whether there was room is in the table


def recorded_size(job: Job, request: GenerateRequest) -> RequestSize:
    """
    Args:
        request: of the job, which has ``inputs``.
    """
    resumed = sum(len(tokens) // 4 for tokens in job.resume)
    shared = job.inputs.shared_blocks if job.inputs is not None else 0
    return RequestSize(request.prompt_tokens + resumed, job.decision.prompt_blocks, request.n, shared)


def recorded_cost(size: RequestSize, at: Candidate, inputs: DecisionInputs, weights: Weights) -> TargetCost:
    columns = TargetColumns(
        block_size=inputs.block_size,
        total_blocks=_ANY_NUMBER,
        slots=at.slots,
        limit=_ANY_NUMBER,
        sequences=at.running,
        active_blocks=at.active_blocks,
        context_blocks=at.context_blocks,
        prefill_tokens=at.prefill_tokens,
        computing=at.computing,
        slowness=at.slowness,
        decode_slowness=at.decode_slowness,
        served_tokens=at.served_tokens,
    )
    held, cached = at.overlap_blocks, float(at.overlap_blocks)
    for each in inputs.lower_tiers:
        if (each.worker, each.rank) == (at.worker, at.rank):
            below = each.host_blocks + each.disk_blocks
            held -= below
            tiers = (held, held + each.host_blocks, held + below)
            cached = reusable(tiers, (each.host_cost, each.disk_cost), 0, size.blocks, Scalars)
    cost = target_cost(size, cached, held, columns, overlap_weight=weights.overlap, prefill_weight=weights.prefill)
    if at.worker in inputs.unloaded:
        cost = favoured(cost, -ADAPTER_TOKENS)
    return favoured(cost, favour_tokens(size)) if (at.worker, at.rank) in inputs.session else cost


class _Option(NamedTuple):
    """A target, and what the request costs there. With ``partners``, one of them computes the prompt."""

    target: Candidate
    cost: float
    partners: Sequence["_Option"] = ()

    @property
    def id(self) -> TargetId:
        return (self.target.worker, self.target.rank)


class _Line(NamedTuple):
    at: Candidate
    link: Link
    pair_only: bool
    on_gpu: bool


class RecordedPools:
    """
    Args:
        job: its ``inputs`` have ``links``.
        without: workers that are not there.
    """

    def __init__(self, job: Job, request: GenerateRequest, weights: Weights, without: Collection[str]) -> None:
        assert job.inputs is not None
        self._weights = weights
        self._inputs = job.inputs
        self._block_size = job.inputs.block_size
        self._blocks = job.decision.prompt_blocks
        self._size = recorded_size(job, request)
        self._seed = job.inputs.seed
        alone, on_gpu = set(job.inputs.pair_only), set(job.inputs.on_gpu)
        lines = [
            _Line(at, link, number in alone, number in on_gpu)
            for number, (at, link) in enumerate(zip(job.decision.candidates, job.inputs.links, strict=False))
        ]
        self._lines = [each for each in lines if each.link.role != ENCODE and each.at.worker not in without]
        has_decode = self._exists("decode")
        targets = self._open("aggregated") + (self._open("decode") if has_decode else [])
        if request.worker or not has_decode:
            targets += self._open("prefill")
        pairs = has_decode and not request.worker and self._exists("prefill")
        if not pairs:
            targets = [each for each in targets if not each.pair_only]
        full = [each for each in self._lines if (each.link.role, each.at.excluded) == ("prefill", "full")]
        self._prefills = self._computing(self._open("prefill")) if pairs else []
        self._full = self._computing(full) if pairs else []
        self._options = [option for each in targets if (option := self._option(each, pairs)) is not None]

    def decide(self, recorded: tuple[TargetId, ...], mode: RouterMode = "kv", number: int = 0) -> tuple[TargetId, ...]:
        """The target, or the prefill and the decode target; empty: there is none.

        Args:
            recorded: what is taken of equal ones.
            number: number of the decision, for round robin.
        """
        if not self._options:
            return ()
        chosen = self._pick(self._options, recorded[-1], mode, number, 0)
        if not chosen.partners:
            return (chosen.id,)
        return (self._pick(chosen.partners, recorded[0], mode, number, 1).id, chosen.id)

    def scores(self, candidates: Sequence[Candidate]) -> tuple[float | None, ...]:
        """Of each candidate; None: it was excluded, or only computes prompts."""
        costs = {each.id: each.cost for each in self._options}
        return tuple(costs.get((each.worker, each.rank)) for each in candidates)

    def _pick(
        self, options: Sequence[_Option], recorded: TargetId, mode: RouterMode, number: int, stage: int
    ) -> _Option:
        order = sorted(options, key=lambda each: each.id)  # as routers number their targets
        if mode == "round_robin":
            return order[number % len(order)]
        if mode == "random":
            return order[draw(self._seed, stage) % len(order)]
        if mode == "least_loaded":
            order = [_Option(each.target, each.target.running / max(1, each.target.slots), each.partners)
                     for each in order]  # fmt: skip
        best = min(each.cost for each in order)
        equal = [each for each in order if each.cost - best <= TIE]
        return next((each for each in equal if each.id == recorded), equal[0])

    def _option(self, line: _Line, pairs: bool) -> _Option | None:
        """None: it cannot compute the prompt now, and has no partner that can."""
        at, link, pair_only, on_gpu = line
        cost = self._cost(at)
        cached = min(at.overlap_blocks, self._blocks)
        uncached = self._size.tokens - cached * self._block_size
        limit = self._weights.local_tokens(gpu=on_gpu)
        if pairs and link.role == "decode" and (pair_only or uncached > limit):
            partners, full = (self._partners(link, among, cached) for among in (self._prefills, self._full))
            best = min((each.cost for each in partners or full), default=0.0)
            behind = not pair_only and self._queue(partners + full) > 0
            if not (behind and cost.fits and cost.whole < best + cost.decode):
                if partners:
                    return _Option(at, best + cost.decode, partners)
                if pair_only or full:
                    return None
        return _Option(at, cost.whole) if link.role != "decode" or cost.fits else None

    def _partners(self, decode: Link, among: Sequence[tuple[Link, _Option]], cached: int) -> list[_Option]:
        """The partners of a decode worker that has ``cached`` blocks, each with its cost including the transfer."""
        step = self._weights.transfer * (self._blocks - cached) * self._block_size
        return [
            _Option(partner.target, partner.cost + _distance(own, decode) * step)
            for own, partner in among
            if decode.kind and own.kind == decode.kind
        ]

    def _queue(self, partners: Sequence[_Option]) -> float:
        """As of ``PrefillPool``."""
        return min(
            (
                queue_tokens(
                    each.target.prefill_tokens,
                    self._cost(each.target).absent_tokens,
                    self._weights.prefill_queue_tokens,
                )
                for each in partners
            ),
            default=0.0,
        )

    def _computing(self, lines: Sequence[_Line]) -> list[tuple[Link, _Option]]:
        return [(each.link, _Option(each.at, self._cost(each.at).prefill)) for each in lines]

    def _cost(self, at: Candidate) -> TargetCost:
        return recorded_cost(self._size, at, self._inputs, self._weights)

    def _open(self, role: str) -> list[_Line]:
        return [each for each in self._lines if each.link.role == role and each.at.excluded in ("", "prefill_full")]

    def _exists(self, role: str) -> bool:
        """Whether such a worker takes the request, now or once it is no longer full."""
        return any(each.link.role == role and each.at.excluded in ("", "full", "prefill_full") for each in self._lines)


def _distance(one: Link, other: Link) -> float:
    """As ``pairs.distance``."""
    if one.host and one.host == other.host:
        return NEAR
    return MEDIUM if one.rdma and other.rdma else FAR


UNRECORDED = "without the inputs of its decision"


class DecidedAgain(NamedTuple):
    """
    Attributes:
        route: the target, or the prefill and the decode target. Of equal ones the recorded one, since some of them may
            not be in the table.
        scores: by candidate of the record; None: it was excluded, or only computes prompts.
    """

    route: tuple[TargetId, ...]
    scores: tuple[float | None, ...]

    @property
    def chosen(self) -> TargetId:
        """The target that computes the prompt."""
        return self.route[0]


def insufficient(job: Job) -> str:
    """Why the record does not suffice to decide again; "": it does."""
    decision, inputs = job.decision, job.inputs
    if inputs is None or not inputs.block_size:
        return UNRECORDED
    if decision.mode != "kv":
        return f"in mode {decision.mode}"
    return ""


def decide_again(
    job: Job,
    weights: Weights = Weights(),  # noqa: B008  # frozen
    without: Collection[str] = (),
) -> DecidedAgain | None:
    """
    Args:
        without: workers that are not there.
    Returns:
        None: ``insufficient``, no candidate is left, or the weights have a temperature.
    """
    if insufficient(job) or weights.temperature > 0 or job.inputs is None:
        return None
    pools = recorded_pools(job, weights, without)
    if pools is not None:
        route = pools.decide(recorded_route(job))
        return DecidedAgain(route, pools.scores(job.decision.candidates)) if route else None
    eligible = {each for each in candidates_of(job) if each.worker not in without}
    size = recorded_size(job, decode(job.request))
    scores = tuple(
        recorded_cost(size, each, job.inputs, weights).whole if each in eligible else None
        for each in job.decision.candidates
    )
    open_scores = [score for score in scores if score is not None]
    if not open_scores:
        return None
    best = min(open_scores)
    equal = [
        (each.worker, each.rank)
        for each, score in zip(job.decision.candidates, scores, strict=True)
        if score is not None and score - best <= TIE
    ]
    (recorded,) = recorded_route(job)
    return DecidedAgain((recorded if recorded in equal else min(equal),), scores)


def recorded_route(job: Job) -> tuple[TargetId, ...]:
    """The targets of the stages that compute prompt and tokens, in order."""
    decision = job.decision
    stages = tuple((stage.worker, stage.rank) for stage in decision.route if stage.role != ENCODE)
    return stages or ((decision.chosen, decision.rank),)


def recorded_pools(job: Job, weights: Weights, without: Collection[str]) -> RecordedPools | None:
    """The pools of prefill and decode workers among which was decided; None: there were none, or are not recorded."""
    if job.inputs is None or not job.inputs.links:
        return None
    return RecordedPools(job, decode(job.request), weights, without)


def candidates_of(job: Job) -> tuple[Candidate, ...]:
    """The candidates that this request could have gone to: those of the chosen one's role, if it is in the table.

    Where a decode worker computes a prompt itself, the table lists prefill workers as well: they take no whole request.
    """
    decision = job.decision
    recorded = (decision.chosen, decision.rank)
    roles = {each.role for each in decision.candidates if (each.worker, each.rank) == recorded}
    return tuple(each for each in decision.candidates if not each.excluded and (each.role in roles or not roles))


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
        None: the record does not suffice (``penstock.log_tools.whatif.change.insufficient`` says why).
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
