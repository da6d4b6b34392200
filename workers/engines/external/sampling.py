"""Sampling parameters that all external engines share. Pure."""

from collections.abc import Sequence as Seq
from typing import Any

from penstock.schemas.requests import Sampling, Stop

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
