"""From our request to the fields of SGLang's ``SamplingParams``, 0.5.23. Pure: names and values, no engine types.

An engine without a tokenizer takes no ``min_new_tokens``, and with ``ignore_eos`` it heeds no stop ids either. So the
first tokens of an output with ``min_tokens`` are a call of their own, in which the ending tokens are barred, and stop
ids beside ``ignore_eos`` are watched for by the follower.

Draws are counter-based, (seed, position), but only in engines with ``enable_deterministic_inference``; others ignore
the seed.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.requests import Sampling
from penstock.workers.engines.external.sampling import greedy, seed_of, shape

BARRED = -1e9  # bias of a token that must not be drawn; below any logit, and finite in each data type


def arguments(
    sampling: Sampling,
    *,
    max_tokens: int,
    choice: int = 0,
    earlier: Seq[int] = (),
    ends: Collection[int] = (),
    barred: Collection[int] = (),
    grammar: str = "",
) -> dict[str, Any]:
    """Fields of ``SamplingParams``. Those left out have defaults in the engine that mean the same.

    Args:
        max_tokens: tokens that are still to be generated.
        earlier: generated tokens that the engine sees as prompt. It counts penalties over its own output only, so
            those of ``earlier`` are passed as a bias: exact for ``frequency_penalty``, for ``presence_penalty`` until
            one of the tokens is drawn again, and not at all for ``repetition_penalty``.
        ends: token ids that end the output, besides the model's own; empty: nothing does.
        barred: token ids that are not drawn.
        grammar: what the output matches, in llguidance's dialect of Lark.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "ignore_eos": not ends,
        "sampling_seed": seed_of(sampling.seed, choice, 0),  # positions are part of the engine's own draw
    }
    if ends:
        parameters["stop_token_ids"] = sorted(ends)
    if grammar:
        parameters["ebnf"] = grammar
    if greedy(sampling):
        parameters["temperature"] = 0.0
    shaped = shape(sampling)
    if shaped.get("top_k", 1) <= 0:
        del shaped["top_k"]  # all tokens
    parameters |= shaped
    if bias := _bias(sampling, earlier, barred):
        parameters["logit_bias"] = bias
    return parameters


def _bias(sampling: Sampling, earlier: Seq[int], barred: Collection[int]) -> dict[str, float]:
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(earlier).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            bias[token] = bias.get(token, 0.0) - penalty
    bias |= dict.fromkeys(barred, BARRED)
    return {str(token): value for token, value in bias.items()}
