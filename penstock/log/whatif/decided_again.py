"""Decides a recorded decision again, from its record in the job alone. Pure.

The score table has the inputs of the formula (``placement.cost``) for the cheapest targets, ``Job.inputs`` what else
the decision depended on. With the router's own weights the outcome is what it chose, with others what those lead to.
"""

from collections.abc import Collection
from typing import NamedTuple

from penstock.log.whatif.pairs_decided_again import RecordedPools
from penstock.log.whatif.recorded_costs import recorded_cost, recorded_size
from penstock.router.placement.routing import TIE, Weights
from penstock.router.state.depths import TargetId
from penstock.router.state.load import ENCODE
from penstock.schemas.jobs import Candidate, Job
from penstock.schemas.requests import decode

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
