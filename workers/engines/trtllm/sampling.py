"""From our request to the fields of ``tensorrt_llm.SamplingParams``, 1.2.1. Pure: names and values, no engine types.

Strings that stop an answer, and turning tokens into text, are the worker's; the engine sees token ids only. End tokens
are given with every request, since an engine without tokenizer knows none and one with a tokenizer adds none once
``end_id`` is set. ``ignore_eos`` is not used together with stop tokens: it would empty those too.
"""

from collections.abc import Sequence as Seq
from typing import Any

from schemas.requests import Sampling, Stop
from workers.engines.external.sampling import seed_of, shape, stop_ids


def end_id(stop: Stop, eos: Seq[int]) -> int:
    """The engine's one end token; -1: there is none."""
    return -1 if stop.ignore_eos or not eos else eos[0]


def arguments(
    sampling: Sampling,
    stop: Stop,
    *,
    eos: Seq[int],
    max_tokens: int,
    min_tokens: int = 0,
    prompt_len: int = 0,
    choice: int = 0,
    position: int = 0,
    perf_metrics: bool = False,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``; what is left out has the engine's default, which means the same.

    ``embedding_bias`` is here a mapping from token id to bias; the caller makes the tensor.

    Args:
        max_tokens, min_tokens: of what is still to be generated.
        prompt_len: tokens of the client's prompt, which penalties for repetition in the answer do not count.
        choice, position: which choice of the request, and the output position at which it goes on.
    """
    ends = stop_ids(stop, eos)
    end = end_id(stop, eos)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": end,
        "pad_id": eos[0] if eos else 0,
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,  # the ending token is part of the answer; else the list shrinks at its end
        "n": 1,
        "best_of": 1,
        "seed": seed_of(sampling.seed, choice, position),
    }
    others = sorted(ends - {end})
    if others and min_tokens <= 0:  # the engine heeds min_tokens for its end id only; else the cursor stops the answer
        given["stop_token_ids"] = others
    if min_tokens > 0:
        given["min_tokens"] = min_tokens
    given |= shape(sampling)
    if prompt_len and "presence_penalty" in given:
        given["prompt_ignore_length"] = prompt_len
    if sampling.logit_bias:
        given["embedding_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs is not None:
        given["logprobs"] = max(1, sampling.logprobs)  # 0 would switch them off
    if prompt_logprobs is not None:
        given["prompt_logprobs"] = max(1, prompt_logprobs)
    if perf_metrics:
        given["return_perf_metrics"] = True
    return given
