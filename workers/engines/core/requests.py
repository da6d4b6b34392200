"""From a request to a sequence: validation against the engine's limits, block names, ends. Pure."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from schemas.errors import Code
from schemas.requests import Sampling
from workers.engines.base import RequestError, SequenceRequest
from workers.engines.core.naming import block_digests
from workers.engines.core.sequence import Sequence

if TYPE_CHECKING:
    from workers.engines.logits.apply import Chain


def check_sizes(**sizes: int) -> None:
    """
    Raises:
        ValueError: one of them is below 1.
    """
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


class Limits:
    """What a sequence may be on one engine.

    Args:
        max_model_len: prompt + output of one sequence, tokens.
        total_blocks: of the KV pool, ``block_size`` tokens each.
        eos_token_ids: end a sequence, unless it ignores them.
    """

    def __init__(self, *, block_size: int, total_blocks: int, max_model_len: int, eos_token_ids: Iterable[int]) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.pool_tokens = total_blocks * block_size
        self.eos = frozenset(eos_token_ids)
        self.pool_limit = (
            f"this worker's KV pool holds {self.pool_tokens} tokens ({total_blocks} blocks of {block_size})"
        )

    def check(self, request: SequenceRequest, prompt_len: int, known: int) -> None:
        """
        Args:
            known: tokens of the prompt and of earlier attempts.
        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        if not prompt_len:
            raise RequestError(Code.invalid_request, "the prompt has no tokens; give at least one")
        generated, wanted = known - prompt_len, request.stop.max_tokens
        if wanted <= generated:
            raise RequestError(
                Code.invalid_request, f"max_tokens is {wanted} and {generated} are generated already: nothing to do"
            )
        if known >= self.max_model_len:
            raise RequestError(
                Code.context_length_exceeded,
                f"{known} tokens leave no room for a new one: this model takes {self.max_model_len}, output included",
            )
        if known >= self.pool_tokens:
            raise RequestError(
                Code.out_of_blocks, f"{known} tokens leave no room for a new one: {self.pool_limit}, output included"
            )


def new_sequence(
    request: SequenceRequest, limits: Limits, processors: "Chain | None" = None, *, prefix_cache: bool = True
) -> Sequence:
    """
    Args:
        prefix_cache: name the blocks.
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    prompt = _tokens(request.prompt)
    tokens = prompt.tolist()
    if request.generated:
        tokens += _tokens(request.generated)
    limits.check(request, len(prompt), len(tokens))
    stop = request.stop
    stops = frozenset() if stop.ignore_eos else limits.eos
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
        stoppable=len(prompt) + stop.min_tokens,
        limit=min(len(prompt) + stop.max_tokens, limits.max_model_len, limits.pool_tokens + 1),
        extra=request.extra,
        media=request.media,
        hold=request.hold,
        reservation=request.reservation,
        processors=processors,
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
