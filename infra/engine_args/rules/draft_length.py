"""The best draft length for speculative decoding, given the share of draft tokens that is accepted.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv:2211.17192: if each token
is accepted with probability a, a draft of k tokens yields (1 - a^(k+1)) / (1 - a) tokens per step, and a step costs
1 + k c, c being the cost of one draft token relative to one step of the target.
"""

from penstock.infra.engine_args.schema import Mtp, NGram, Speculation

MIN_TOKENS = 1000  # proposed; with fewer, the ratio is not reliable
MAX_LENGTH = 16
_COSTS: dict[type[Speculation], float] = {NGram: 0.01}  # plus what verifying one more token costs
DRAFT_COST, MTP_COST = 0.06, 0.04


def acceptance(ratio: float, length: int) -> float:
    """Probability a that one token is accepted, from the accepted share of drafts of ``length`` tokens.

    The share is (a + a^2 + ... + a^k) / k, which grows with a; solved by bisection.
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
    """Tokens per unit of time, relative to decoding without a draft."""
    return sum(rate**place for place in range(length + 1)) / (1 + length * cost)


def best_length(rate: float, cost: float) -> int:
    """The draft length with the highest speed-up; 0: speculation does not pay."""
    return max(range(MAX_LENGTH + 1), key=lambda length: speed_up(rate, length, cost))


def cost_of(speculation: Speculation) -> float:
    """Cost of one draft token relative to a step of the target: an estimate per kind of speculation."""
    if isinstance(speculation, Mtp):
        return MTP_COST
    return _COSTS.get(type(speculation), DRAFT_COST)
