"""Engines with known times, for planners under test."""

from penstock.measure.profile.data import Decode, Prefill, Profile, Setup
from penstock.planner.capacity import EngineTiming

OSL = 200


def engine(
    *,
    prefill_ms: float = 100.0,
    step_ms: float = 10.0,
    growth_ms: float = 0.1,
    kv_tokens: int = 400_000,
    max_batch: int = 256,
    gpus: int = 1,
) -> EngineTiming:
    """A prompt takes ``prefill_ms`` per 1,000 tokens, a step ``step_ms`` and ``growth_ms`` per 1,000 of context."""
    prefill, decode = Prefill(), Decode(max_kv_tokens=kv_tokens)
    for isl in (100, 8000):
        prefill = prefill.added(isl, prefill_ms * isl / 1e3, 1e6 / prefill_ms / gpus)
    setup = Setup(
        model="m", api="chat", gpus=gpus, attention_dp=1, osl=OSL, max_context=8200, max_kv_tokens=kv_tokens,
        max_batch=max_batch,
    )  # fmt: skip
    for isl in (100, 8000):
        for concurrency in (1, 24, 48):
            itl = step_ms + growth_ms * (isl + OSL / 2) * concurrency / 1e3
            decode = decode.added(setup.decode_point(isl, concurrency, itl))
    return EngineTiming(Profile(setup=setup, url="", prefill=prefill, decode=decode))
