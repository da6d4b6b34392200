"""The message that sends a request to its first worker. Pure."""

import msgspec

from penstock.router.placement.pending import PendingRequest
from penstock.router.placement.routing import RoutingDecision
from penstock.router.state.sent import Positions
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Decision, DecisionInputs, Job, LoadHeader

# Shorter prompts are computed before it matters to other routers which blocks they have.
KEYS_FROM_TOKENS = 256
MOST_KEYS = 4096  # the server takes headers of 64 KiB in all
KEY_BYTES = 11  # as text (``penstock.schemas.blocks.keys_text``)


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
        candidates=decision.candidates,
        prompt_blocks=prompt_blocks,
        waited_ns=now_ns - pending.since_ns,
        kv_seq=positions.kv,
        work_seq=positions.work,
        done_seq=positions.done,
        rank=first.rank,
        reason=pending.reason,
        route=route if len(route) > 1 else (),
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
        inputs=inputs,
        streamed_ns=pending.streamed_ns,
        suspect=pending.suspect.value,
        lost=pending.lost,
    )


def build_load(pending: PendingRequest, decision: RoutingDecision, prefill: Registration) -> LoadHeader:
    """What other routers fold of the job without reading its body; ``prefill``: the worker that computes the prompt."""
    request, route = pending.request, decision.route
    return LoadHeader(
        request.prompt_tokens,
        decision.overlap_blocks * prefill.block_size,
        request.token_address,
        request.deadline_ns,
        request.priority.value,
        request.n,
        route if len(route) > 1 or route[0].rank else (),
    )


def sends_keys(load: LoadHeader, blocks: int, room: int = MOST_KEYS * KEY_BYTES) -> bool:
    """Whether other routers that place requests of the model need the keys of this prompt's blocks.

    With them a router does not take the blocks that two prompts have in common for twice as many, and knows what a
    worker is about to compute. In overload with long prompts that have much in common, the mean time to the first token
    is several times as long without.

    Args:
        blocks: full ones of the prompt.
        room: bytes that the message may still grow by.
    """
    fits = blocks <= MOST_KEYS and blocks * KEY_BYTES <= room
    return fits and load.prompt_tokens - load.cached_tokens >= KEYS_FROM_TOKENS
