"""The profile of a mock worker, computed from its timing model instead of measured: no process, no clock.

Prompts run through the simulated engine, so that chunked prefill is what it is there. HTTP, NATS and Python add to it
on a real deployment; ``penstock profile endpoint`` measures them.
"""

import msgspec

from penstock.measure.profile import grid
from penstock.measure.profile.data import Decode, DecodePoint, Profile, Setup
from penstock.measure.simulation.engine import MAX_SEQUENCES, EngineSequence, SimulatedEngine, decode_ns

BLOCKS, BLOCK_SIZE = 16_384, 32  # as a mock worker's
_POINTS = 12


def mock_profile(
    *,
    blocks: int = BLOCKS,
    block_size: int = BLOCK_SIZE,
    max_sequences: int = MAX_SEQUENCES,
    gpus: int = 1,
    slowness: float = 1.0,
    max_context: int = 131_072,
    osl: int = 500,
    model: str = "mock",
) -> Profile:
    """
    Args:
        slowness: factor on the duration of every step; 0.5 is a ``--mock-speedup`` of 2.
    """
    pool = blocks * block_size
    max_context = min(max_context, pool)
    setup = Setup(
        model=model,
        api="chat",
        gpus=gpus,
        attention_dp=1,
        osl=osl,
        max_context=max_context,
        max_kv_tokens=pool,
        max_batch=max_sequences,
    )
    profile = Profile(setup=setup, url="timing model of the mock engine")
    prefill = profile.prefill
    lengths = (100, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 32_000, 64_000, 128_000)
    for isl in (each for each in lengths if each <= max_context - grid.RESERVE):
        ttft = prompt_ms(isl, blocks, block_size) * slowness
        prefill = prefill.added(isl, round(ttft, 4), round(grid.prefill_throughput(isl, ttft, gpus), 3))
    decode = Decode(max_kv_tokens=pool)
    for isl in (each for each in lengths if each <= max_context - osl):
        for level in grid.concurrencies(isl + osl, pool, max_sequences, _POINTS):
            context = isl + osl / 2
            itl = decode_ns(round(context * level), pool) / 1e6 * slowness
            point = DecodePoint(
                isl=isl,
                concurrency=level,
                kv_usage=round(grid.kv_usage(context, level, pool), 5),
                context=context,
                itl_ms=round(itl, 4),
                throughput=round(level / itl * 1e3 / gpus, 3),
            )
            decode = decode.added(point)
    return msgspec.structs.replace(profile, prefill=prefill, decode=decode)


def prompt_ms(tokens: int, blocks: int, block_size: int) -> float:
    """TTFT of a prompt that has the worker to itself, ms."""
    engine = SimulatedEngine(blocks, block_size)
    engine.add(EngineSequence(0, tokens, 1, range(tokens // block_size)))
    spent = 0
    while engine.has_work:
        spent += sum(durations := engine.form())
        engine.finish(len(durations))
    return spent / 1e6
