"""What an engine does with sampling options, found by a few short requests at its start.

Releases differ, and so do their samplers: TorchSampler of 1.2 reads temperature, top_k and top_p, and drops the others
in silence. No signature says so. Each question therefore biases two tokens far above all others, or flattens the
distribution, so that the answer shows whether the option counts, whatever the model.
"""

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

from penstock.workers.engines.served import Served

TOKENS = 4  # of each answer
_FLAT = 50.0  # temperature at which any token may come
_FIRST, _SECOND, _PENALTY = 400.0, 200.0, 500.0  # far above the logits, and exact in bfloat16


class Answer(NamedTuple):
    """``logprobs``: of the first token, by token id."""

    tokens: Seq[int] = ()
    logprobs: Mapping[int, Any] = {}


Ask = Callable[[Mapping[str, Any]], Awaitable[Answer]]


async def find(ask: Ask, prompt_len: int, eos: Seq[int]) -> Served:
    """
    Args:
        ask: one request with these arguments of SamplingParams beside ``max_tokens``; an empty answer: it was refused.
            ``embedding_bias`` is a mapping from token id to bias. The prompt has neither of the tokens 2 to 9.
        prompt_len: tokens of its prompt.
    """
    first, second = [token for token in range(2, 10) if token not in eos][:2]
    bias = {"temperature": 0.0, "embedding_bias": {first: _FIRST, second: _SECOND}}
    flat = {"temperature": _FLAT, "top_p": 1.0, "top_k": 0}

    async def drawn(**arguments: Any) -> list[int]:
        return list((await ask(arguments)).tokens)

    async def barred(minimum: int) -> int:
        """Tokens before an end token that wins unless it is barred."""
        answer = await drawn(**{**bias, "embedding_bias": {end: _FIRST}}, end_id=end, min_tokens=minimum)
        return sum(token != end for token in answer) if answer else -1

    plain = await drawn(**bias)
    penalties = plain[:2] == [first, first] and (await drawn(**bias, frequency_penalty=_PENALTY))[:2] == [first, second]
    greedy = await drawn(temperature=0.0)
    min_p = bool(greedy) and await drawn(**flat, min_p=1.0) == greedy
    seeds = [await drawn(**flat, seed=seed) for seed in (1, 1, 2)]
    seed = bool(seeds[0]) and seeds[0] == seeds[1] != seeds[2]
    alternatives = len((await ask({"temperature": 0.0, "logprobs": 2})).logprobs) > 1
    minimum: Literal["output", "all", ""] = ""
    if eos:
        end = eos[0]
        if await barred(2) == 2:
            minimum = "output"
        elif await barred(prompt_len + 2) == 2:
            minimum = "all"
    return Served(penalties, min_p, seed, alternatives, minimum)
