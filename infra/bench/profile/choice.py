"""Which configuration serves most per GPU within given latencies, for prefill and for decode, and how many of each."""

import math
from collections.abc import Mapping

from msgspec import Struct

from infra.bench.profile.data import Profile
from infra.bench.profile.grid import prefill_throughput
from infra.bench.profile.interpolate import DecodeSurface, ttft_at


class Sla(Struct, frozen=True, kw_only=True):
    """Latencies that must not be exceeded, for prompts of ``isl`` and answers of ``osl`` tokens."""

    ttft_ms: float
    itl_ms: float
    isl: int
    osl: int


class Option(Struct, frozen=True, kw_only=True):
    """The performance of one worker of a configuration within the SLA.

    Attributes:
        latency_ms: TTFT of prefill, ITL of decode.
        throughput_per_gpu: prompt tokens per second of prefill, output tokens of decode.
        concurrency: requests at once.
        requests_per_s: of one worker, without a pause.
    """

    name: str
    gpus: int
    latency_ms: float
    throughput_per_gpu: float
    concurrency: int
    requests_per_s: float


class Choice(Struct, frozen=True):
    """
    Attributes:
        options: configurations that meet the SLA, the best first.
        rejected: for each other configuration, why it does not.
    """

    options: tuple[Option, ...]
    rejected: dict[str, str]

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options else None


def choose_prefill(profiles: Mapping[str, Profile], sla: Sla) -> Choice:
    """Rank configurations by their prompt throughput per GPU."""
    return _chosen({name: _prefill(name, profile, sla) for name, profile in profiles.items()})


def choose_decode(profiles: Mapping[str, Profile], sla: Sla) -> Choice:
    """Rank configurations by their output throughput per GPU, each at its best concurrency."""
    return _chosen({name: _decode(name, profile, sla) for name, profile in profiles.items()})


def _chosen(by_name: Mapping[str, Option | str]) -> Choice:
    options = [each for each in by_name.values() if isinstance(each, Option)]
    options.sort(key=lambda each: (-each.throughput_per_gpu, each.gpus, each.name))
    return Choice(tuple(options), {name: each for name, each in by_name.items() if isinstance(each, str)})


def _prefill(name: str, profile: Profile, sla: Sla) -> Option | str:
    data, setup = profile.prefill, profile.setup
    ttft = ttft_at(data, sla.isl)
    if ttft is None:
        if not data.prefill_isl:
            return "prefill was not measured"
        return f"prompts from {data.prefill_isl[0]} to {data.prefill_isl[-1]} tokens were measured, not {sla.isl}"
    if ttft > sla.ttft_ms:
        return f"TTFT {ttft:.1f} ms"
    throughput = prefill_throughput(sla.isl, ttft, setup.gpus, setup.attention_dp)
    return Option(
        name=name,
        gpus=setup.gpus,
        latency_ms=ttft,
        throughput_per_gpu=throughput,
        concurrency=setup.attention_dp,
        requests_per_s=throughput * setup.gpus / sla.isl,
    )


def _decode(name: str, profile: Profile, sla: Sla) -> Option | str:
    setup, surface = profile.setup, DecodeSurface(profile.decode)
    context = sla.isl + sla.osl / 2
    low, high = surface.levels(context)
    if not high:
        if not surface.contexts:
            return "decode was not measured"
        return (
            f"contexts from {surface.contexts[0]:g} to {surface.contexts[-1]:g} tokens were measured, not {context:g} "
            "(prompt and half the answer)"
        )
    high = min(high, setup.max_kv_tokens // (sla.isl + sla.osl))
    if high < low:
        return f"{low} requests of {sla.isl + sla.osl} tokens do not fit into the KV cache of {setup.max_kv_tokens}"
    levels = range(low, high + 1, setup.attention_dp)
    figures = [(level, itl) for level in levels if (itl := surface.itl(context, level)) is not None]
    within = [(level / itl, -level, itl) for level, itl in figures if itl <= sla.itl_ms]
    if not within:
        return f"ITL {min(itl for _, itl in figures):.2f} ms or more"
    pace, negative, itl = max(within)
    return Option(
        name=name,
        gpus=setup.gpus,
        latency_ms=itl,
        throughput_per_gpu=pace * 1e3 / setup.gpus,
        concurrency=-negative,
        requests_per_s=pace * 1e3 / sla.osl,
    )


def workers(option: Option, requests_per_s: float, utilization: float) -> int:
    """How many workers serve a rate if each is busy for at most a share of its time, 0 to 1; at least one."""
    return max(1, math.ceil(requests_per_s / (option.requests_per_s * utilization) - 1e-9))
