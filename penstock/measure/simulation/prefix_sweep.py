"""Traces whose prompts share a given part of their tokens, for a sweep over that share, and its series."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.measure.simulation.comparison import Summary
from penstock.measure.simulation.trace import Row, Trace
from penstock.measure.simulation.workloads import UNIT_TOKENS


@dataclass(frozen=True, slots=True)
class PrefixSweep:
    """
    Attributes:
        ratios: shares of the mean prompt that are one of ``prefixes`` common prefixes.
        rate: requests per second, Poisson arrivals.
    """

    ratios: Sequence[float]
    requests: int = 200
    prompt_tokens: int = 14000
    output_tokens: int = 200
    prefixes: int = 20
    rate: float = 5.0
    seed: int = 0

    def traces(self) -> dict[float, Trace]:
        """One trace per ratio, each with its own seed. Lengths of unshared parts are normal with σ of a quarter."""
        return {ratio: self._trace(ratio, self.seed + turn) for turn, ratio in enumerate(self.ratios)}

    def _trace(self, ratio: float, seed: int) -> Trace:
        rng = random.Random(seed)
        shared = round(self.prompt_tokens * ratio / UNIT_TOKENS)
        own_tokens = self.prompt_tokens - shared * UNIT_TOKENS
        fresh = self.prefixes * shared  # ids below are of the prefixes
        rows, at_ms = [], 0.0
        for _ in range(self.requests):
            first = rng.randrange(self.prefixes) * shared
            tokens = max(1, round(rng.gauss(own_tokens, own_tokens / 4)))
            own = -(-tokens // UNIT_TOKENS)
            ids = (*range(first, first + shared), *range(fresh, fresh + own))
            fresh += own
            rows.append(Row(at_ms, shared * UNIT_TOKENS + tokens, self.output_tokens, ids))
            at_ms += rng.expovariate(self.rate) * 1e3
        return Trace(name_of(ratio), tuple(rows), UNIT_TOKENS)


def name_of(ratio: float) -> str:
    return f"prefix {ratio:g}"


def series(summaries: Sequence[Summary], ratios: Sequence[float], load: float) -> dict[str, Any]:
    """The results at one load as series by policy: mean TTFT in ms, output tokens per second, hit rates."""
    cells = {(each.workload, each.policy): each.figures for each in summaries if each.load == load}
    policies = list(dict.fromkeys(each.policy for each in summaries))

    def line(figure: str) -> dict[str, list[float]]:
        return {name: [getattr(cells[name_of(ratio), name], figure) for ratio in ratios] for name in policies}

    return {
        "prefix_ratios": list(ratios),
        "ttft_values": line("ttft_mean"),
        "throughput_values": line("tokens_per_s"),
        "hit_rates": line("hit_rate"),
    }
