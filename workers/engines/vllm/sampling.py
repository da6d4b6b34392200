"""From our request to the fields of ``vllm.SamplingParams``, 0.33. Pure: names and values, no engine types.

All token ids that end an output are passed as stop ids, with ``ignore_eos``: an engine without a tokenizer knows no end
token, and this way it always names the one that ended an output. The worker handles stop strings.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.requests import Constraint, Sampling, Stop
from penstock.workers.engines.external.constrained import ends, grammar_text
from penstock.workers.engines.external.sampling import greedy, seed_of, shape, stop_ids


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
    constraint: Constraint | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    Args:
        max_tokens, min_tokens: of the tokens that are still to be generated.
        earlier: generated tokens that the engine sees as prompt. It counts them for ``repetition_penalty`` only, so the
            other penalties are passed as a bias: exact for ``frequency_penalty``, and for ``presence_penalty`` until
            one of the tokens is drawn again.
        score: return the prompt's log-probabilities; the engine then ignores cached blocks.

    Raises:
        RequestError: the constraint cannot be compiled.
    """
    stop = ends(stop, constraint)
    parameters: dict[str, Any] = {
        "n": 1,
        "max_tokens": max_tokens,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": sorted(stop_ids(stop, eos)),
        "seed": seed_of(sampling.seed, choice, len(earlier)),
    }
    if constraint is not None:
        parameters["structured_outputs"] = {"grammar": grammar_text(constraint)}
    elif min_tokens > 0:
        parameters["min_tokens"] = min(min_tokens, max_tokens)  # vLLM refuses more
    if greedy(sampling):
        parameters["temperature"] = 0.0
    parameters |= shape(sampling)
    if bias := _bias(sampling, earlier):
        parameters["logit_bias"] = bias
    if sampling.logprobs is not None:
        parameters["logprobs"] = sampling.logprobs  # 0: the chosen token's only
    if score:
        parameters["prompt_logprobs"] = sampling.prompt_logprobs or 0
    return parameters


def _bias(sampling: Sampling, earlier: Seq[int]) -> dict[int, float]:
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(earlier).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            bias[token] = bias.get(token, 0.0) - penalty
    return bias
