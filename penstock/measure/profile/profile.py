"""The profile of an engine that was only estimated, with the same arrays as one that was measured."""

import msgspec

from penstock.measure.profile import grid
from penstock.measure.profile.data import Decode, DecodePoint, Profile, Setup
from penstock.measure.profile.roofline import Engine, most

_POINTS = 10


def roofline_profile(engine: Engine, *, isl: int, osl: int, up: str = "") -> Profile:
    """Around prompts of ``isl`` and answers of ``osl`` tokens. The engine holds at least one such context."""
    length = isl + osl
    mapping = engine.mapping
    limit = min(engine.shape.max_len or 4 * length, max(4 * length, 8192))
    # Pipeline stages compute as many prompts at once as there are stages.
    ranks = mapping.ranks * mapping.pp
    setup = Setup(
        model=engine.shape.model,
        api="chat",
        gpus=mapping.gpus,
        attention_dp=ranks,
        osl=osl,
        max_context=limit,
        max_kv_tokens=engine.sequences(length) * length,
        max_batch=most(engine, length),
        up=up,
    )
    profile = Profile(setup=setup, url="roofline estimate")
    prefill, decode = profile.prefill, Decode(max_kv_tokens=setup.max_kv_tokens)
    for tokens in sorted({*grid.spaced(grid.SHORTEST, limit, _POINTS), isl}):
        ttft = engine.prefill_ms(tokens)
        prefill = prefill.added(
            tokens, round(ttft, 4), round(grid.prefill_throughput(tokens, ttft, mapping.gpus, ranks), 3)
        )
    for tokens in sorted({*grid.spaced(grid.SHORTEST, limit - osl, 5), isl}):
        context = tokens + osl / 2
        top = min(setup.max_batch, max(1, int(setup.max_kv_tokens / (tokens + osl))))
        for level in grid.spaced(1, top, _POINTS):
            itl = engine.step_ms(level / mapping.ranks, context)
            point = DecodePoint(
                isl=tokens,
                concurrency=level,
                kv_usage=round(grid.kv_usage(context, level, setup.max_kv_tokens), 5),
                context=context,
                itl_ms=round(itl, 4),
                throughput=round(level / itl * 1e3 / mapping.gpus, 3),
            )
            decode = decode.added(point)
    return msgspec.structs.replace(profile, prefill=prefill, decode=decode)
