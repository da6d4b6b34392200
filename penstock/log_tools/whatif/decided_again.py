"""Decides a recorded decision again, from its record in the job alone. Pure.

The score table has the inputs of the formula (``placement.cost``) for the cheapest targets, ``Job.inputs`` what else
the decision depended on. With the router's own weights the outcome is what it chose, with others what those lead to.

A recorded decision among prefill and decode workers, made again from its score table. Pure.

``penstock.router.placement.decide`` decides among registrations and loads, this by the same rules among the candidates
of a record.

What a recorded request cost at a candidate, from the record in its job alone. Pure.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

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
from penstock.router.placement.decide import FAR, MEDIUM, NEAR
from penstock.router.placement.routing import TIE, Weights, draw
from penstock.router.state.holders import TargetId
from penstock.router.state.target_loads import ENCODE, TargetColumns
from penstock.schemas.jobs import Candidate, DecisionInputs, Job, Link
from penstock.schemas.requests import GenerateRequest, decode

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
    cost = target_cost(
        size,
        cached,
        held,
        columns,
        overlap_weight=weights.overlap,
        prefill_weight=weights.prefill,
    )
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
        self._prefills = [(each.link, _Option(each.at, self._cost(each.at).prefill))
                          for each in self._open("prefill")] if pairs else []  # fmt: skip
        self._full = {each.link.kind for each in self._lines
                      if (each.link.role, each.at.excluded) == ("prefill", "full")}  # fmt: skip
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
        """None: only prefill workers that are full, or none at all, could compute its prompts."""
        at, link, pair_only, on_gpu = line
        cost = self._cost(at)
        cached = min(at.overlap_blocks, self._blocks)
        uncached = self._size.tokens - cached * self._block_size
        limit = self._weights.local_tokens(gpu=on_gpu)
        if pairs and link.role == "decode" and (pair_only or uncached > limit):
            step = self._weights.transfer * (self._blocks - cached) * self._block_size
            partners = [
                _Option(partner.target, partner.cost + _distance(own, link) * step)
                for own, partner in self._prefills
                if link.kind and own.kind == link.kind
            ]
            if partners:
                return _Option(at, min(each.cost for each in partners) + cost.decode, partners)
            if pair_only or (link.kind and link.kind in self._full):
                return None
        return _Option(at, cost.whole)

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
