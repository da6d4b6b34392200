"""From our request to the fields of ``vllm.SamplingParams``, 0.33. Pure: names and values, no engine types.

All token ids that end an answer are given as stop ids, with ``ignore_eos``: an engine without tokenizer knows no end
token of its own, and so the one that ended an answer is always named. Stop strings are the worker's.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from schemas.requests import Sampling, Stop
from workers.engines.external.sampling import greedy, seed_of, shape, stop_ids


def arguments(
    sampling: Sampling,
    stop: Stop,
    *,
    eos: Seq[int],
    max_tokens: int,
    min_tokens: int = 0,
    choice: int = 0,
    earlier: Seq[int] = (),
    score: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``; what is left out has the engine's default, which means the same.

    Args:
        max_tokens, min_tokens: of what is still to be generated.
        earlier: generated tokens that are part of the prompt to the engine; it counts them for ``repetition_penalty``
            only, so the others come as a bias: exact for ``frequency_penalty``, and for ``presence_penalty`` until
            one of them is drawn again.
        score: the prompt's log-probabilities are wanted; the engine then reads no cached blocks by itself.
    """
    given: dict[str, Any] = {
        "n": 1,
        "max_tokens": max_tokens,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": sorted(stop_ids(stop, eos)),
        "seed": seed_of(sampling.seed, choice, len(earlier)),
    }
    if min_tokens > 0:
        given["min_tokens"] = min(min_tokens, max_tokens)  # more would be refused
    if greedy(sampling):
        given["temperature"] = 0.0
    given |= shape(sampling)
    if bias := _bias(sampling, earlier):
        given["logit_bias"] = bias
    if sampling.logprobs is not None:
        given["logprobs"] = sampling.logprobs  # 0: the chosen token's only
    if score:
        given["prompt_logprobs"] = sampling.prompt_logprobs or 0
    return given


def _bias(sampling: Sampling, earlier: Seq[int]) -> dict[int, float]:
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(earlier).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            bias[token] = bias.get(token, 0.0) - penalty
    return bias
