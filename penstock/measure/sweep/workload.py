"""What a sweep sends: lengths in tokens, what prompts share, images, and at which levels of load."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

LEVELS = (1, 2, 5, 10, 50, 100, 250)
_REQUESTS_PER_CONNECTION = 3
_FEWEST_REQUESTS = 10

Preset = Literal["none", "shared-prefix", "long-context", "multimodal"]
Kind = Literal["concurrency", "rate", "speed"]
_LETTERS: dict[Kind, str] = {"concurrency": "c", "rate": "r", "speed": "x"}


class Workload(Struct, frozen=True, kw_only=True):
    """Lengths are in tokens: means and standard deviations of normal distributions.

    Attributes:
        isl: of the prompt as the server counts it, chat template included and images not.
        shared_prefix: share of the mean prompt that is one of ``prefixes`` common texts.
        images: per request; each is different and ``image_size`` pixels high and wide.
    """

    isl: int = 2000
    isl_stddev: float = 10.0
    osl: int = 256
    osl_stddev: float = 0.0
    shared_prefix: float = 0.0
    prefixes: int = 1
    images: int = 0
    image_size: int = 512


class PresetValues(Struct, frozen=True):
    """A workload, its levels, and how to start a deployment for it."""

    workload: Workload
    concurrency: tuple[int, ...]
    up: str  # flags of `penstock up`


PRESETS: dict[Preset, PresetValues] = {
    "none": PresetValues(Workload(), LEVELS, ""),
    "shared-prefix": PresetValues(
        Workload(isl=4000, isl_stddev=200.0, osl=128, shared_prefix=0.8, prefixes=8),
        (10, 50, 100, 250, 500),
        "--router-mode kv --max-running 512",
    ),
    "long-context": PresetValues(
        Workload(isl=32_000, isl_stddev=2000.0, osl=256),
        (1, 2, 4, 8, 16),
        "--prefill 1 --decode 1 --max-model-len 40000",
    ),
    "multimodal": PresetValues(
        Workload(isl=200, isl_stddev=20.0, osl=128, images=1),
        (1, 2, 5, 10, 20, 50),
        "--model VISION_MODEL --encode 1 --prefill 1 --decode 1",
    ),
}


class Level(Struct, frozen=True):
    """One level of load.

    Attributes:
        kind: ``value`` is the requests under way, the requests per second, or the speed-up of a trace.
        requests: how many are sent and measured.
    """

    kind: Kind
    value: float
    requests: int

    @property
    def folder(self) -> str:
        """Name of its folder of a result tree, such as "c10", "r2.5", "x4"."""
        return f"{_LETTERS[self.kind]}{self.value:g}"

    @property
    def title(self) -> str:
        return {"concurrency": f"concurrency {self.value:g}", "rate": f"{self.value:g} req/s"}.get(
            self.kind, f"trace ×{self.value:g}"
        )


def concurrency_level(concurrency: int, requests: int = 0) -> Level:
    """Three requests per connection and at least ten, unless a number is given."""
    return Level("concurrency", concurrency, requests or max(_REQUESTS_PER_CONNECTION * concurrency, _FEWEST_REQUESTS))


class WorkloadFlags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags that describe the requests; those not given come from the preset."""

    preset: Annotated[Preset, Meta(description="workload and levels to start from; other flags win")] = "none"
    isl: Annotated[
        int, Meta(ge=0, description="mean prompt tokens, chat template included; default: the preset's, else 2000")
    ] = 0
    isl_stddev: Annotated[
        float, Meta(ge=-1, description="standard deviation of --isl; -1: the preset's, else 10")
    ] = -1.0
    osl: Annotated[int, Meta(ge=0, description="mean tokens per answer; default: the preset's, else 256")] = 0
    osl_stddev: Annotated[
        float, Meta(ge=-1, description="standard deviation of --osl; -1: the preset's, else 0")
    ] = -1.0
    shared_prefix: Annotated[
        float, Meta(ge=-1, le=1, description="share of the mean prompt that is common; -1: the preset's, else 0")
    ] = -1.0
    prefixes: Annotated[int, Meta(ge=0, description="different common texts; default: the preset's, else 1")] = 0
    images: Annotated[int, Meta(ge=-1, description="images per request; -1: the preset's, else 0")] = -1
    image_size: Annotated[int, Meta(ge=8, le=4096, description="height and width of an image, pixels")] = 512
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=8192)], ...],
        Meta(description="requests under way, a level each; default: the preset's, else 1,2,5,10,50,100,250"),
    ] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(description="requests per second with Poisson arrivals, instead of --concurrency"),
    ] = ()
    trace: Annotated[str, Meta(description="file in Mooncake's format: its arrivals, lengths and prefixes")] = ""
    speed: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...], Meta(description="how many times faster than recorded a --trace is")
    ] = (1.0,)
    prefix_multiplier: Annotated[float, Meta(gt=0, description="of a trace: length of shared prefixes")] = 1.0
    root_multiplier: Annotated[int, Meta(ge=1, description="of a trace: copies of the tree of prefixes")] = 1
    prompt_multiplier: Annotated[float, Meta(gt=0, description="of a trace: length behind shared prefixes")] = 1.0
    max_prompt_tokens: Annotated[int, Meta(ge=0, description="of a trace: leave longer prompts out; 0: none")] = 0
    requests: Annotated[
        int, Meta(ge=0, description="requests per level; 0: 3 per connection, 60 s of a rate, or the whole trace")
    ] = 0


def workload_of(flags: WorkloadFlags) -> Workload:
    base = PRESETS[flags.preset].workload
    return Workload(
        isl=flags.isl or base.isl,
        isl_stddev=base.isl_stddev if flags.isl_stddev < 0 else flags.isl_stddev,
        osl=flags.osl or base.osl,
        osl_stddev=base.osl_stddev if flags.osl_stddev < 0 else flags.osl_stddev,
        shared_prefix=base.shared_prefix if flags.shared_prefix < 0 else flags.shared_prefix,
        prefixes=flags.prefixes or base.prefixes,
        images=base.images if flags.images < 0 else flags.images,
        image_size=flags.image_size,
    )


def levels_of(flags: WorkloadFlags, trace_rows: int = 0) -> list[Level]:
    """The levels in ascending order, each once."""
    if flags.trace:
        return [Level("speed", speed, trace_rows) for speed in sorted(set(flags.speed))]
    if flags.rate:
        return [
            Level("rate", rate, flags.requests or max(_FEWEST_REQUESTS, math.ceil(60 * rate)))
            for rate in sorted(set(flags.rate))
        ]
    concurrency = flags.concurrency or PRESETS[flags.preset].concurrency
    return [concurrency_level(each, flags.requests) for each in sorted(set(concurrency))]
