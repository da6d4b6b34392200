"""From our request to the fields of ``tensorrt_llm.SamplingParams``, 1.2.1. Pure: names and values, no engine types.

The worker handles stop strings and detokenization; the engine sees token ids only. Every request names its end tokens:
an engine without a tokenizer knows none, and one with a tokenizer adds none once ``end_id`` is set. ``ignore_eos`` is
not used together with stop tokens: it would disable those as well.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.external.sampling import seed_of, shape, stop_ids


class OutputPart(NamedTuple):
    """The part of a choice's output that one call generates.

    Attributes:
        max_tokens, min_tokens: of this part.
        counted_prompt: tokens of the prompt that the engine's ``min_tokens`` counts as well.
        prompt_len: tokens of the client's prompt, which presence and frequency penalties do not count.
        choice: number of the choice in its request.
        position: output position at which the part starts.
    """

    max_tokens: int
    min_tokens: int = 0
    prompt_len: int = 0
    choice: int = 0
    position: int = 0
    counted_prompt: int = 0


def end_id(stop: Stop, eos: Seq[int]) -> int:
    """The single end token that the engine takes; -1: none."""
    return -1 if stop.ignore_eos or not eos else eos[0]


def arguments(
    sampling: Sampling,
    stop: Stop,
    *,
    eos: Seq[int],
    part: OutputPart,
    perf_metrics: bool = False,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    ``embedding_bias`` is a mapping from token id to bias here; the caller makes the tensor.

    Args:
        eos: end tokens of the model.
        perf_metrics: have the engine measure the request.
        prompt_logprobs: alternatives per prompt token; None: no log-probabilities of the prompt.
    """
    max_tokens, min_tokens, prompt_len, choice, position, counted_prompt = part
    ends = stop_ids(stop, eos)
    end = end_id(stop, eos)
    parameters: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": end,
        "pad_id": eos[0] if eos else 0,
        "detokenize": False,
        "add_special_tokens": False,
        "include_stop_str_in_output": True,  # otherwise the list of tokens shrinks at its end
        "n": 1,
        "best_of": 1,
        "seed": seed_of(sampling.seed, choice, position),
    }
    other_ends = sorted(ends - {end})
    if other_ends and min_tokens <= 0:  # min_tokens protects only end_id: the cursor stops the output instead
        parameters["stop_token_ids"] = other_ends
    if min_tokens > 0 and end >= 0:  # with -1, TorchSampler bars the last token of the vocabulary
        parameters["min_tokens"] = min_tokens + counted_prompt
    parameters |= shape(sampling)
    if prompt_len and "presence_penalty" in parameters:
        parameters["prompt_ignore_length"] = prompt_len
    if sampling.logit_bias:
        parameters["embedding_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs is not None:
        parameters["logprobs"] = max(1, sampling.logprobs)  # 0 would switch them off
    if prompt_logprobs is not None:
        parameters["prompt_logprobs"] = max(1, prompt_logprobs)
    if perf_metrics:
        parameters["return_perf_metrics"] = True
    return parameters
