"""Sampling parameters and checks of a request that all external engines share. Pure."""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.constraints.compiler import NO_CONSTRAINTS
from penstock.workers.engines.engine_protocol import (
    EngineInfo,
    RequestError,
    SequenceRequest,
    check_length,
    check_vocabulary,
)

_MASK = (1 << 63) - 1
_STRIDE = 0x9E3779B97F4A7C15  # golden ratio: neighbouring positions get unrelated seeds


def stop_ids(stop: Stop, eos: Seq[int]) -> frozenset[int]:
    """Token ids that end an output."""
    return frozenset(stop.token_ids) | (frozenset() if stop.ignore_eos else frozenset(eos))


def seed_of(seed: int, choice: int, position: int) -> int:
    """The seed of a choice that continues at an output position: no two share a random stream."""
    return (seed + (choice * 0x10001 + position) * _STRIDE) & _MASK


def greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_p == 0 or sampling.top_k == 1


def shape(sampling: Sampling) -> dict[str, Any]:
    """Temperature, truncation and penalties by name; greedy sampling has no temperature and no truncation."""
    arguments: dict[str, Any] = {}
    if not greedy(sampling):
        arguments |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        if sampling.min_p > 0:
            arguments["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        arguments["repetition_penalty"] = sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        arguments["presence_penalty"] = sampling.presence_penalty
        arguments["frequency_penalty"] = sampling.frequency_penalty
    return arguments


def bias(sampling: Sampling, earlier: Seq[int]) -> dict[int, float]:
    """The bias of each token, with the penalties for generated tokens that the engine sees as prompt.

    Exact for ``frequency_penalty``, and for ``presence_penalty`` until one of the tokens is drawn again.
    """
    found = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(earlier).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            found[token] = found.get(token, 0.0) - penalty
    return found


def check_sampling(request: SequenceRequest, info: EngineInfo) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    prompt_len, generated = len(request.prompt), len(request.generated)
    check_length(prompt_len, generated, max_tokens=request.stop.max_tokens, max_model_len=info.max_model_len)
    check_vocabulary(request, info.vocab_size)
    if any(not 0 <= token < info.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(Code.invalid_request, f"logit_bias names tokens outside the vocabulary of {info.vocab_size}")
    if request.constraint is not None and not info.constraints:
        raise RequestError(Code.unsupported, NO_CONSTRAINTS)
    if request.reservation is not None:
        raise RequestError(Code.transfer_failed, "this engine fetches KV itself; it cannot adopt transferred blocks")
