"""``penstock profile sla``: the configuration that serves most per GPU within given latencies."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from infra.bench.profile.choice import Choice, Sla, choose_decode, choose_prefill
from infra.bench.profile.data import BadProfile, Profile, load
from infra.bench.profile.suggestion import Pool, Suggestion, suggestion


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock profile sla``."""

    data: Annotated[
        tuple[str, ...], Meta(min_length=1, description="folders of `penstock profile endpoint`, a configuration each")
    ] = ("profile",)
    ttft: Annotated[float, Meta(gt=0, description="longest time to the first token, ms")] = 300.0
    itl: Annotated[float, Meta(gt=0, description="longest time per token behind it, ms")] = 25.0
    isl: Annotated[int, Meta(ge=1, description="tokens per prompt")] = 4000
    osl: Annotated[int, Meta(ge=1, description="tokens per answer")] = 500
    rate: Annotated[
        float, Meta(ge=0, description="requests per second; 0: as many as one worker of the faster kind serves")
    ] = 0.0
    utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of its time that a worker is busy, at most; the rest is for queues")
    ] = 0.8
    out: Annotated[str, Meta(description="YAML file for the suggestion")] = ""


def run(settings: Settings) -> int:
    """Print the suggestion. Returns 1 if no configuration meets the SLA or a profile cannot be read."""
    sla = Sla(ttft_ms=settings.ttft, itl_ms=settings.itl, isl=settings.isl, osl=settings.osl)
    try:
        profiles = profiles_of(settings.data)
    except BadProfile as error:
        print(f"penstock profile sla: {error}", file=sys.stderr)
        return 1
    prefill, decode = choose_prefill(profiles, sla), choose_decode(profiles, sla)
    suggested = suggestion(profiles, sla, prefill, decode, rate=settings.rate, utilization=settings.utilization)
    console = Console(highlight=False)
    for role, latency, choice in (("prefill", "TTFT ms", prefill), ("decode", "ITL ms", decode)):
        console.print(table(role, latency, choice))
        print(*(f"left out: {name} ({reason})" for name, reason in choice.rejected.items()), "", sep="\n")
    if suggested is None:
        missing = " and ".join(role for role, each in (("prefill", prefill), ("decode", decode)) if not each.options)
        print(f"penstock profile sla: no configuration meets the SLA for {missing}", file=sys.stderr)
        return 1
    print("\n".join(lines(suggested)))
    if settings.out:
        path = Path(settings.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(msgspec.to_builtins(suggested), sort_keys=False), encoding="utf-8")
        print(f"\n{path}")
    return 0


def profiles_of(folders: Sequence[str]) -> dict[str, Profile]:
    """Load the profiles, by the names of their folders.

    Raises:
        BadProfile: one cannot be read, two have one name, or they are of different models.
    """
    profiles: dict[str, Profile] = {}
    for each in folders:
        path = Path(each)
        name = path.resolve().name
        if name in profiles:
            raise BadProfile(f"two folders are named {name}: their name is the configuration's; rename one")
        profiles[name] = load(path)
    if len(models := {profile.setup.model for profile in profiles.values()}) > 1:
        raise BadProfile(f"the profiles are of different models: {', '.join(sorted(models))}")
    return profiles


def table(role: str, latency: str, choice: Choice) -> Table:
    """The configurations that meet the SLA, the best first."""
    figures = ("GPUs", latency, "at once", "tokens/s per GPU", "req/s per worker")
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column(role)
    for heading in figures:
        drawn.add_column(heading, justify="right")
    for option in choice.options:
        drawn.add_row(
            option.name,
            str(option.gpus),
            f"{option.latency_ms:.2f}",
            str(option.concurrency),
            f"{option.throughput_per_gpu:,.0f}",
            f"{option.requests_per_s:.3g}",
        )
    return drawn


def lines(suggested: Suggestion) -> list[str]:
    """The suggestion, for a terminal."""
    sla, prefill, decode = suggested.sla, suggested.prefill, suggested.decode
    return [
        f"suggestion for TTFT ≤ {sla.ttft_ms:g} ms and ITL ≤ {sla.itl_ms:g} ms, prompts of {sla.isl} tokens, "
        f"answers of {sla.osl}:",
        f"  prefill  {_pool(prefill)}, TTFT {prefill.figures.latency_ms:.1f} ms, "
        f"{prefill.figures.throughput_per_gpu:,.0f} tokens/s per GPU",
        f"  decode   {_pool(decode)}, ITL {decode.figures.latency_ms:.2f} ms at "
        f"{decode.figures.concurrency} at once, {decode.figures.throughput_per_gpu:,.0f} tokens/s per GPU",
        f"  enough for {suggested.requests_per_s:.3g} requests/s, each worker busy for {suggested.utilization:.0%} of "
        f"its time; one prefill worker feeds {suggested.decode_per_prefill:.3g} decode workers",
        *(f"  {command}" for command in suggested.commands),
    ]


def _pool(pool: Pool) -> str:
    return f"{pool.workers} × {pool.configuration} ({pool.gpus} GPUs)"
