"""Profiles that are computed from functions of times instead of measured, and that of a mock worker.

The mock's times are those of its timing model. Its prompts run through the simulated engine, which chunks prefill as a
worker does. HTTP, NATS and Python add to the times of a real deployment; ``penstock profile endpoint`` measures them.
"""

from collections.abc import Callable, Iterable

from penstock.measure.profile.data import RESERVE, Decode, Prefill, Profile, Setup, concurrencies, prefill_throughput
from penstock.measure.simulation.engine import MAX_SEQUENCES, EngineSequence, SimulatedEngine, decode_ns

BLOCKS, BLOCK_SIZE = 16_384, 32  # as a mock worker's
_POINTS = 12


def modelled(
    setup: Setup,
    url: str,
    lengths: Iterable[int],
    ttft_ms: Callable[[int], float],
    levels: Iterable[tuple[int, int]],
    itl_ms: Callable[[int, float], float],
) -> Profile:
    """A profile from functions of times, as if it had been measured.

    Args:
        lengths: of prompts.
        levels: lengths of prompts, each with a number of requests at once.
        itl_ms: of a number of requests at once and the tokens of each one's context.
    """
    prefill, decode = Prefill(), Decode(max_kv_tokens=setup.max_kv_tokens)
    for isl in lengths:
        ttft = ttft_ms(isl)
        throughput = prefill_throughput(isl, ttft, setup.gpus, setup.attention_dp)
        prefill = prefill.added(isl, round(ttft, 4), round(throughput, 3))
    for isl, level in levels:
        decode = decode.added(setup.decode_point(isl, level, itl_ms(level, isl + setup.osl / 2)))
    return Profile(setup=setup, url=url, prefill=prefill, decode=decode)


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
    lengths = (100, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 32_000, 64_000, 128_000)
    return modelled(
        setup,
        "timing model of the mock engine",
        [isl for isl in lengths if isl <= max_context - RESERVE],
        lambda isl: prompt_ms(isl, blocks, block_size) * slowness,
        [
            (isl, level)
            for isl in lengths
            if isl <= max_context - osl
            for level in concurrencies(isl + osl, pool, max_sequences, _POINTS)
        ],
        lambda level, context: decode_ns(round(context * level), pool) / 1e6 * slowness,
    )


def prompt_ms(tokens: int, blocks: int, block_size: int) -> float:
    """TTFT of a prompt that has the worker to itself, ms."""
    engine = SimulatedEngine(blocks, block_size)
    engine.add(EngineSequence(0, tokens, 1, range(tokens // block_size)))
    spent = 0
    while engine.has_work:
        spent += sum(durations := engine.form())
        engine.finish(len(durations))
    return spent / 1e6
