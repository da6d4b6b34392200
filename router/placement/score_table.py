"""The score table that is stored with a job: the chosen targets, the best others, and those that were rejected."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.router.placement.filters import common_reason, error_code
from penstock.router.placement.pairs import PrefillPool
from penstock.router.placement.routing import RoutingContext, RoutingDecision
from penstock.router.placement.scoring import columns_of
from penstock.router.state.depths import TargetId
from penstock.router.state.load import RoutingTarget
from penstock.router.state.target_loads import BACKLOG
from penstock.schemas.jobs import Candidate

STORED_CANDIDATES = 16

Rejected = list[tuple[RoutingTarget, str]]  # with the reason


class ScoredTargets(NamedTuple):
    """Targets that can decode the request, column by column.

    ``transfer_blocks`` come from a prefill worker; -1: the target computes the prompt itself. The column is empty where
    no prefill worker takes part.
    """

    targets: list[RoutingTarget]
    scores: list[float]
    transfer_blocks: list[int]


def candidate(
    context: RoutingContext, target: RoutingTarget, score: float, rejection: str = "", role: str = ""
) -> Candidate:
    columns = columns_of(target)
    columns[BACKLOG] = int(columns[BACKLOG])
    return candidate_of(target.id, context.overlap(target), columns, score, rejection, role)


def candidate_of(
    target_id: TargetId, overlap: int, columns: Sequence[Any], score: float, rejection: str, role: str = ""
) -> Candidate:
    """
    Args:
        columns: of ``TargetLoads``.
    """
    worker, rank = target_id
    _, _, slots, _, running, active, context, backlog, computing, slowness, decode_slowness, served = columns
    return Candidate(
        worker,
        overlap,
        active,
        backlog,
        running,
        slots,
        score,
        rejection,
        rank,
        role,
        context,
        computing,
        slowness,
        decode_slowness,
        served,
    )


def table(
    context: RoutingContext,
    lines: list[Candidate],
    at: int,
    scored: ScoredTargets,
    prefills: PrefillPool | None,
    rejected: Rejected,
) -> tuple[Candidate, ...]:
    """
    Args:
        lines: of the chosen targets.
        at: position of the chosen one in ``scored``.
    """
    targets, scores, transfer_blocks = scored
    others = []
    if prefills is not None:
        chosen = (lines[0].worker, lines[0].rank)
        others = sorted([each for each in prefills.scored if each.target.id != chosen], key=lambda each: each.cost)
    order = sorted(range(len(targets)), key=scores.__getitem__)
    order.remove(at)
    room = STORED_CANDIDATES - len(lines)
    for i in order[: max(room - len(others), (room + 1) // 2)]:
        role = "decode" if transfer_blocks and transfer_blocks[i] >= 0 else ""
        lines.append(candidate(context, targets[i], scores[i], "", role))
    for each in others[: STORED_CANDIDATES - len(lines)]:
        lines.append(candidate(context, each.target, each.cost, "", "prefill"))
    for target, reason in rejected[: STORED_CANDIDATES - len(lines)]:
        role = target.registration.role
        lines.append(candidate(context, target, 0.0, reason, "" if role == "aggregated" else role))
    return tuple(lines)


def no_target(context: RoutingContext, rejected: Rejected) -> RoutingDecision:
    """The decision when every target was rejected."""
    lines = tuple(candidate(context, target, 0.0, reason) for target, reason in rejected[:STORED_CANDIDATES])
    request = context.request
    if request.worker and not any(request.names(target.registration) for target in context.targets):
        return refusal("unknown_worker", lines)
    return refusal(common_reason(reason for _, reason in rejected), lines)


def refusal(reason: str, lines: tuple[Candidate, ...] = ()) -> RoutingDecision:
    """No route: the request waits or ends, as the reason says."""
    return RoutingDecision((), lines[:STORED_CANDIDATES], 0, reason, error_code(reason))
