"""How long a draft should be, given how many of its tokens are accepted.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv:2211.17192: if each token
is accepted with probability a, a draft of k tokens yields (1 - a^(k+1)) / (1 - a) tokens per step, and a step costs
1 + k c, c being the cost of one draft token relative to one step of the target.
"""

from infra.engine_args.schema import Mtp, NGram, Speculation

ENOUGH_TOKENS = 1000  # proposed, before the ratio means anything
LONGEST = 16
_COSTS: dict[type[Speculation], float] = {NGram: 0.01}  # plus what verifying one more token costs
DRAFT_COST, MTP_COST = 0.06, 0.04


def acceptance(ratio: float, length: int) -> float:
    """Probability that one token is accepted, from the share of a draft of ``length`` that is.

    The share is (a + a^2 + ... + a^k) / k, which grows with a: found by halving.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(1, length + 1)) / length < ratio:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def speed_up(rate: float, length: int, cost: float) -> float:
    """Tokens per unit of time, against decoding without a draft."""
    return sum(rate**place for place in range(length + 1)) / (1 + length * cost)


def best_length(rate: float, cost: float) -> int:
    """The draft length with the highest speed-up; 0: speculation does not pay."""
    return max(range(LONGEST + 1), key=lambda length: speed_up(rate, length, cost))


def cost_of(speculation: Speculation) -> float:
    """Cost of one draft token against a step of the target: a rule of thumb per kind."""
    if isinstance(speculation, Mtp):
        return MTP_COST
    return _COSTS.get(type(speculation), DRAFT_COST)
