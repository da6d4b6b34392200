"""What a recorded request cost at a candidate, from the record in its job alone. Pure."""

from penstock.router.placement.cost import RequestSize, TargetCost, favour_tokens, favoured, target_cost
from penstock.router.placement.routing import Weights
from penstock.schemas.jobs import Candidate, DecisionInputs, Job
from penstock.schemas.requests import GenerateRequest

_ANY_NUMBER = float(1 << 60)  # whether there was room is in the table


def recorded_size(job: Job, request: GenerateRequest) -> RequestSize:
    """
    Args:
        request: of the job, which has ``inputs``.
    """
    resumed = sum(len(tokens) // 4 for tokens in job.resume)
    shared = job.inputs.shared_blocks if job.inputs is not None else 0
    return RequestSize(request.prompt_tokens + resumed, job.decision.prompt_blocks, request.n, shared)


def recorded_cost(size: RequestSize, at: Candidate, inputs: DecisionInputs, weights: Weights) -> TargetCost:
    columns = (
        inputs.block_size,
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
    cost = target_cost(
        size,
        at.overlap_blocks,
        at.overlap_blocks,
        columns,
        overlap_weight=weights.overlap,
        prefill_weight=weights.prefill,
    )
    return favoured(cost, favour_tokens(size)) if (at.worker, at.rank) in inputs.session else cost
