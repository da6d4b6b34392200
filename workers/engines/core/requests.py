"""From a request to a sequence: validated, with the names of its blocks and the conditions that end it. Pure."""

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.workers.engines.base import RequestError, SequenceRequest
from penstock.workers.engines.core.config import SequenceLimits
from penstock.workers.engines.core.naming import block_digests
from penstock.workers.engines.core.sequence import Sequence

if TYPE_CHECKING:
    from penstock.workers.engines.constraints.matcher import Matcher
    from penstock.workers.engines.logits.apply import Chain


NO_HANDOFF = "KV in two pools or in host memory is not handed off; use --hybrid-kv-cache off --kv-offloading-size 0"


def new_sequence(
    request: SequenceRequest,
    limits: SequenceLimits,
    processors: "Chain | None" = None,
    constraint: "Matcher | None" = None,
    *,
    prefix_cache: bool = True,
    handoff: bool = True,
) -> Sequence:
    """
    Args:
        processors: of its logits.
        constraint: on its output. It says where the output may end, so ``ignore_eos`` has no effect.
        prefix_cache: name the blocks.
        handoff: other workers can write and read the blocks.

    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    if not handoff and (request.hold or request.reservation is not None):
        raise RequestError(Code.unsupported, NO_HANDOFF)
    prompt = _tokens(request.prompt)
    tokens = prompt.tolist()
    if request.generated:
        tokens += _tokens(request.generated)
    limits.check(request, len(prompt), len(tokens))
    stop = request.stop
    stops = frozenset() if stop.ignore_eos and constraint is None else limits.eos
    if stop.token_ids:
        stops = stops.union(stop.token_ids)
    return Sequence(
        key=request.key,
        tokens=tokens,
        prompt_len=len(prompt),
        sampling=request.sampling,
        stop=stop,
        choice=request.choice,
        digests=block_digests(request, prompt, tokens, limits.block_size) if prefix_cache else [],
        root=request.root,
        stops=stops,
        stoppable=len(prompt) + (stop.min_tokens if constraint is None else 0),
        limit=min(len(prompt) + stop.max_tokens, limits.max_model_len, limits.pool_tokens + 1),
        extra=request.extra,
        media=request.media,
        client_request_id=request.client_request_id,
        hold=request.hold,
        reservation=request.reservation,
        processors=processors,
        constraint=constraint,
        score=min(request.score or len(prompt), len(prompt)),
        length=len(tokens),
        lockstep=processors is not None or _penalised(request.sampling) or bool(request.score),
    )


def _penalised(sampling: Sampling) -> bool:
    s = sampling
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _tokens(tokens: Seq[int]) -> "array[int]":
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise RequestError(Code.invalid_request, f"token ids are integers from 0 to 2**32 - 1: {error}") from None
