"""Configurations to choose from, by where their times come from: measured profiles, the mock's model, or a roofline."""

from collections.abc import Mapping as Map
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.infra.engine_args.memory_estimate import Shape
from penstock.measure.profile.data import BadProfile, DecodeSurface, Profile, load, ttft_at
from penstock.measure.profile.modelled import mock_profile
from penstock.measure.profile.roofline import GPUS, RooflineEngine, fits, mappings, roofline_profile
from penstock.measure.search.candidates import Configuration, Sla, why_not
from penstock.planner.capacity import EngineTiming


class Choices(Struct, frozen=True):
    """
    Attributes:
        up: flags of `penstock up` for each configuration.
        engines: of those that were estimated.
        left_out: why each other configuration cannot be used.
    """

    configurations: tuple[Configuration, ...]
    up: dict[str, str]
    engines: dict[str, RooflineEngine]
    left_out: dict[str, str]


def measured(folders: Sequence[str], sla: Sla) -> Choices:
    """Profiles of `penstock profile endpoint`, named after their folders. Nothing beyond their points is guessed.

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
    left_out = {name: reason for name, profile in profiles.items() if (reason := unmeasured(profile, sla))}
    usable = {name: _capped(profile, sla) for name, profile in profiles.items() if name not in left_out}
    return _choices(usable, sla, left_out)


def mock(speedups: Sequence[float], sla: Sla) -> Choices:
    """Mock workers by their speed-up, from the timing model."""
    longest = max(131_072, 2 * (sla.isl + sla.osl))
    profiles = {
        f"mock x{speedup:g}": mock_profile(slowness=1 / speedup, max_context=longest, osl=sla.osl)
        for speedup in speedups
    }
    for name, speedup in zip(profiles, speedups, strict=True):
        flags = "--engine mock" + (f" --mock-speedup {speedup:g}" if speedup != 1 else "")
        profiles[name] = _with_flags(profiles[name], flags)
    return _choices(profiles, sla, {})


def roofline(shape: Shape, gpu: str, sla: Sla, *, most_gpus: int, stages: int) -> Choices:
    """Mappings of a model onto up to ``most_gpus`` GPUs of a kind each, estimated.

    Raises:
        UnknownShape: config.json lacks what the estimate needs.
    """
    length = sla.isl + sla.osl
    if shape.max_len and length > shape.max_len:
        return Choices((), {}, {}, {"all": f"prompt and answer have {length} tokens, the model takes {shape.max_len}"})
    engines = {each.name: RooflineEngine(shape, GPUS[gpu], each) for each in mappings(shape, most_gpus, stages=stages)}
    left_out = {name: reason for name, engine in engines.items() if (reason := fits(engine, length))}
    profiles = {
        name: roofline_profile(engine, isl=sla.isl, osl=sla.osl)
        for name, engine in engines.items()
        if name not in left_out
    }
    handoffs = {name: engines[name].handoff_ms(sla.isl) for name in profiles}
    found = _choices(profiles, sla, left_out, handoffs)
    return msgspec.structs.replace(found, engines=engines)


def unmeasured(profile: Profile, sla: Sla) -> str:
    """What of the SLA lies outside of a profile's points; "": nothing."""
    setup, surface = profile.setup, DecodeSurface(profile.decode)
    lengths = profile.prefill.prefill_isl
    context = sla.isl + sla.osl / 2
    if not lengths:
        return "prefill was not measured"
    if not surface.contexts:
        return "decode was not measured"
    if ttft_at(profile.prefill, sla.isl) is None:
        return f"prompts from {lengths[0]} to {lengths[-1]} tokens were measured, not {sla.isl}"
    low, high = surface.levels(context)
    if not high:
        return (
            f"contexts from {surface.contexts[0]:g} to {surface.contexts[-1]:g} tokens were measured, not {context:g} "
            "(prompt and half the answer)"
        )
    if setup.max_kv_tokens < low * (sla.isl + sla.osl):
        return f"{low} requests of {sla.isl + sla.osl} tokens do not fit into the KV cache of {setup.max_kv_tokens}"
    return ""


def _capped(profile: Profile, sla: Sla) -> Profile:
    """With no more requests at once than were measured."""
    _, high = DecodeSurface(profile.decode).levels(sla.isl + sla.osl / 2)
    most = min(high, profile.setup.max_batch or high)
    return msgspec.structs.replace(profile, setup=msgspec.structs.replace(profile.setup, max_batch=most))


def _with_flags(profile: Profile, up: str) -> Profile:
    return msgspec.structs.replace(profile, setup=msgspec.structs.replace(profile.setup, up=up))


def _choices(
    profiles: Map[str, Profile], sla: Sla, left_out: dict[str, str], handoffs: Map[str, float] | None = None
) -> Choices:
    found = []
    for name, profile in profiles.items():
        configuration = Configuration(name, EngineTiming(profile), (handoffs or {}).get(name, 0.0))
        reason = why_not(configuration, sla)
        if reason:
            left_out[name] = reason
        else:
            found.append(configuration)
    return Choices(tuple(found), {name: each.setup.up for name, each in profiles.items()}, {}, left_out)
