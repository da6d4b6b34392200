"""Decides a recorded decision again, from its record in the job alone. Pure.

The score table has the inputs of the formula (``placement.cost``) for the cheapest targets, ``Job.inputs`` what else
the decision depended on. With the router's own weights the outcome is what it chose, with others what those lead to.
"""

from typing import NamedTuple

from router.depths import TargetId
from router.placement.cost import RequestSize, target_cost
from router.routing import TIE, Weights
from schemas.jobs import Candidate, Job
from schemas.requests import decode

_ANY_NUMBER = float(1 << 60)  # whether there was room is in the table


class DecidedAgain(NamedTuple):
    """
    Attributes:
        chosen: of equal targets the recorded one, since some of them may not be in the table.
        scores: by candidate of the record; None: it was excluded, or of another role.
    """

    chosen: TargetId
    scores: tuple[float | None, ...]


def decide_again(job: Job, weights: Weights = Weights()) -> DecidedAgain | None:  # noqa: B008  # frozen
    """
    Returns:
        None: the record does not suffice. It was written by an older build, decided in a mode other than "kv" or at a
        temperature, or has several stages.
    """
    decision, inputs = job.decision, job.inputs
    if inputs is None or not inputs.block_size or decision.mode != "kv" or decision.route or weights.temperature > 0:
        return None
    request = decode(job.request)
    resumed = sum(len(tokens) // 4 for tokens in job.resume)
    size = RequestSize(len(request.prompt) // 4 + resumed, decision.prompt_blocks, request.n, inputs.shared_blocks)
    eligible = set(candidates_of(job))
    scores = tuple(
        _score(size, each, inputs.block_size, weights) if each in eligible else None for each in decision.candidates
    )
    open_scores = [score for score in scores if score is not None]
    if not open_scores:
        return None
    best = min(open_scores)
    equal = [
        (each.worker, each.rank)
        for each, score in zip(decision.candidates, scores, strict=True)
        if score is not None and score - best <= TIE
    ]
    recorded = (decision.chosen, decision.rank)
    return DecidedAgain(recorded if recorded in equal else min(equal), scores)


def candidates_of(job: Job) -> tuple[Candidate, ...]:
    """The candidates that this request could have gone to: those of the chosen one's role, if it is in the table.

    Where a decode worker computes a prompt itself, the table lists prefill workers as well: they take no whole request.
    """
    decision = job.decision
    recorded = (decision.chosen, decision.rank)
    roles = {each.role for each in decision.candidates if (each.worker, each.rank) == recorded}
    return tuple(each for each in decision.candidates if not each.excluded and (each.role in roles or not roles))


def _score(size: RequestSize, at: Candidate, block_size: int, weights: Weights) -> float:
    columns = (
        block_size,
        _ANY_NUMBER,
        at.slots,
        _ANY_NUMBER,
        at.running,
        at.active_blocks,
        at.context_blocks,
        at.prefill_tokens,
        at.computing,
        at.slowness,
        at.decode_slowness,
        at.served_tokens,
    )
    return target_cost(
        size,
        at.overlap_blocks,
        at.overlap_blocks,
        columns,
        overlap_weight=weights.overlap,
        prefill_weight=weights.prefill,
    ).whole
