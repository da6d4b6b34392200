"""``penstock profile endpoint``: measure prefill and decode of a live engine, each alone, and keep the figures.

Plots of a profile: prefill by length, decode by KV usage and context. matplotlib comes with ``penstock[bench]``.
"""

import asyncio
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.cli.terminal import fail
from penstock.configs.flags import BadSettings
from penstock.infra.model.modeldir import ModelError
from penstock.measure.generator.lag import loop_factory
from penstock.measure.generator.target import BadTarget
from penstock.measure.plots import PlotsMissing, drawn
from penstock.measure.profile import grid
from penstock.measure.profile.data import FILE, BadProfile, Decode, Prefill, Profile, Setup, load
from penstock.measure.profile.endpoint import Capacity, Grid, ProfileFailed, Profiler, capacity_of
from penstock.measure.sweep.bodies import Bodies, LevelTooLarge
from penstock.measure.sweep.endpoints import BadEndpoint, SweptEndpoint, parse_endpoints
from penstock.measure.sweep.smoke import Api, Smoke, Unhealthy, smoke
from penstock.measure.sweep.sweep_command import text_of
from penstock.measure.sweep.workload import NoShortWord, TokenText

_LINE = "#0f766e"


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write the plots for which there is data, and return their paths.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    painters: dict[str, Callable[[Any], None]] = {}
    if profile.prefill.prefill_isl:
        painters["prefill.png"] = partial(_prefill, data=profile.prefill)
    if profile.decode.decode_isl:
        painters["decode.png"] = partial(_decode, data=profile.decode)
    for name, paint in painters.items():
        with drawn(folder / name, 11, 4.8, dpi=120, layout=None) as figure:
            paint(figure)
    return [folder / name for name in painters]


def _prefill(figure: Any, data: Prefill) -> None:
    columns = (data.prefill_ttft, data.prefill_thpt_per_gpu)
    titles = (("Time to first token", "ms"), ("Prompt throughput", "tokens/s per GPU"))
    for axis, values, (title, unit) in zip(figure.subplots(1, 2), columns, titles, strict=True):
        axis.plot(data.prefill_isl, values, marker="o", markersize=4, color=_LINE)
        axis.set_title(title)
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(unit)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()


def _decode(figure: Any, data: Decode) -> None:
    columns = (data.z_itl, data.z_thpt_per_gpu)
    contexts = [tokens / 1e3 for tokens in data.y_context_length]
    titles = (("Inter-token latency", "ms"), ("Output throughput", "tokens/s per GPU"))
    for place, values, (title, unit) in zip((121, 122), columns, titles, strict=True):
        axis = figure.add_subplot(place, projection="3d")
        usage = [100 * share for share in data.x_kv_usage]
        axis.scatter(usage, contexts, values, c=values, cmap="viridis", depthshade=False)
        for context in dict.fromkeys(contexts):
            own = [row for row in zip(usage, contexts, values, strict=True) if row[1] == context]
            axis.plot(*zip(*own, strict=True), color=_LINE, linewidth=0.8, alpha=0.6)
        axis.set_title(f"{title} ({unit})")
        axis.set_xlabel("KV cache in use (%)", labelpad=8)
        axis.set_ylabel("context (thousand tokens)", labelpad=8)
        axis.set_zlim(bottom=0)
        axis.view_init(elev=22, azim=-128)
    figure.subplots_adjust(left=0.0, right=0.97, bottom=0.06, top=0.94, wspace=0.05)  # 3-D labels have no layout engine


_CONTEXT = 16_384  # of the largest grid, unless a flag says otherwise


class EndpointProfileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock profile endpoint``."""

    endpoint: Annotated[str, Meta(description="server: a URL, or the state.json of `penstock up`")] = (
        ".penstock/state.json"
    )
    mode: Annotated[Literal["both", "prefill", "decode"], Meta(description="what to measure")] = "both"
    out: Annotated[str, Meta(description="folder for profile.json and plots; points that it has are kept")] = "profile"
    gpus: Annotated[int, Meta(ge=1, description="GPUs of the endpoint: figures are per GPU")] = 1
    attention_dp: Annotated[int, Meta(ge=1, description="ranks of the endpoint with attention data parallelism")] = 1
    max_context: Annotated[
        int, Meta(ge=0, description="tokens of the longest prompt and answer; 0: the server's limit, at most 16384")
    ] = 0
    granularity: Annotated[int, Meta(ge=2, le=64, description="prompt lengths, and levels of concurrency of each")] = 8
    osl: Annotated[int, Meta(ge=8, description="tokens per answer while decode is measured")] = 500
    max_concurrency: Annotated[int, Meta(ge=1, le=8192, description="requests at once, at most")] = 256
    max_kv_tokens: Annotated[
        int, Meta(ge=0, description="tokens that the KV caches hold; 0: as the server's metrics say")
    ] = 0
    max_batch: Annotated[
        int, Meta(ge=0, description="sequences that decode at once; 0: as the server's metrics say")
    ] = 0
    requests: Annotated[int, Meta(ge=1, description="prompts per length whose TTFT is measured; the median counts")] = 3
    max_s: Annotated[float, Meta(gt=0, description="seconds after which no further point is begun")] = 1800.0
    up: Annotated[
        str, Meta(description="flags of `penstock up` that start such an engine, for `penstock profile sla`")
    ] = ""
    model: Annotated[str, Meta(description="model to ask; default: the first that the server lists")] = ""
    tokenizer: Annotated[
        str, Meta(description="model directory or Hugging Face id that counts tokens; default: the model's name")
    ] = ""
    api: Annotated[Api, Meta(description="chat completions, or completions of text")] = "chat"
    api_key: Annotated[str, Meta(description="bearer token, if the server requires one")] = ""
    insecure: Annotated[bool, Meta(description="accept any certificate of an https server")] = False
    metrics: Annotated[
        tuple[str, ...], Meta(description="URLs of further Prometheus pages; /metrics of the server is always read")
    ] = ()
    timeout_s: Annotated[float, Meta(gt=0, description="a request without a whole answer by then has failed")] = 600.0
    seed: Annotated[int, Meta(ge=0, description="of the prompts; 0: another one each time")] = 0
    overwrite: Annotated[bool, Meta(description="measure points again that the folder has")] = False


_USAGE = (BadSettings, BadEndpoint, BadTarget)
_FAILED = (Unhealthy, ProfileFailed, BadProfile, ModelError, NoShortWord, LevelTooLarge)


def run(settings: EndpointProfileSettings) -> int:
    """Measure, save and plot. Returns 1 if the endpoint fails or points remain to be measured, 2 for bad flags."""
    folder = Path(settings.out)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            profile, left = runner.run(_measure(settings, folder))
    except (*_USAGE, *_FAILED) as error:
        return fail("profile endpoint", error, status=2 if isinstance(error, _USAGE) else 1)
    except KeyboardInterrupt:
        print(f"stopped; finished points are in {folder}, and the same command goes on", file=sys.stderr)
        return 130
    try:
        plots = [path.name for path in draw(profile, folder)]
    except PlotsMissing as error:
        plots = []
        print(f"no plots: {error}", file=sys.stderr)
    print(f"\n{', '.join([FILE, *plots])} in {folder}")
    if profile.warnings:
        print(f"warnings: {len(profile.warnings)}, listed in {folder / FILE}", file=sys.stderr)
    if left:
        print(f"{left} points were not begun within {settings.max_s:g} s; the same command goes on", file=sys.stderr)
    return 1 if left else 0


async def _measure(settings: EndpointProfileSettings, folder: Path) -> tuple[Profile, int]:
    endpoint = endpoint_of(settings)
    loaded, texts = await _smoke(settings, endpoint)
    setup = setup_of(settings, loaded.model, await capacity_of(endpoint, loaded.model))
    grid = grid_of(settings, setup)
    profile = begun(folder, setup, endpoint.target.url, loaded.warnings, overwrite=settings.overwrite)
    limits = f"{setup.max_kv_tokens or 'unknown':,} KV tokens, largest batch {setup.max_batch or 'unknown'}"
    print(f"{setup.model} at {profile.url}: context {setup.max_context:,}, {limits}")
    profiler = Profiler(
        endpoint,
        Bodies(endpoint.target, loaded.model, settings.api, loaded.abilities, texts),
        profile,
        folder,
        seed=settings.seed or secrets.randbits(32),
        timeout_s=settings.timeout_s,
        say=print,
    )
    left = await profiler.run(grid)
    return profiler.profile, left


def endpoint_of(settings: EndpointProfileSettings) -> SweptEndpoint:
    """
    Raises:
        BadEndpoint: it cannot be used.
    """
    name = "endpoint"
    metrics = [f"{name}={url}" for url in settings.metrics]
    (endpoint,) = parse_endpoints(
        [f"{name}={settings.endpoint}"],
        metrics,
        (settings.gpus,),
        api_key=settings.api_key,
        insecure=settings.insecure,
    )
    return endpoint


async def _smoke(settings: EndpointProfileSettings, endpoint: SweptEndpoint) -> tuple[Smoke, TokenText]:
    first = await smoke(endpoint.target, settings.api, settings.model, None)
    texts = text_of(settings.tokenizer or first.model)
    return await smoke(endpoint.target, settings.api, first.model, texts), texts


def setup_of(settings: EndpointProfileSettings, model: str, capacity: Capacity) -> Setup:
    """The setup by flags and by the server's own metrics. Flags win.

    Raises:
        BadSettings: decode needs the size of the KV cache, which neither the flags nor the server report.
    """
    context = settings.max_context or min(capacity.max_context or _CONTEXT, _CONTEXT)
    if capacity.max_context and context > capacity.max_context:
        raise BadSettings(f"--max-context {context}: the server takes {capacity.max_context} tokens")
    batch = settings.max_batch or capacity.max_batch
    tokens = settings.max_kv_tokens or capacity.max_kv_tokens
    if not tokens and batch:
        tokens = grid.kv_tokens(batch, context - settings.osl, settings.osl)
    if settings.mode != "prefill" and not tokens:
        raise BadSettings(
            "no metrics page says how many tokens the KV cache holds; name a deployment of Penstock by its state.json, "
            "or give --max-kv-tokens, --max-batch, or the page with --metrics"
        )
    return Setup(
        model=model,
        api=settings.api,
        gpus=settings.gpus,
        attention_dp=settings.attention_dp,
        osl=settings.osl,
        max_context=context,
        max_kv_tokens=tokens,
        max_batch=batch,
        up=settings.up,
    )


def grid_of(settings: EndpointProfileSettings, setup: Setup) -> Grid:
    """
    Raises:
        BadSettings: the context is too short, or not even one request for each rank fits into the KV cache.
    """
    prefill = grid.prefill_lengths(setup.max_context, settings.granularity)
    most = min(settings.max_concurrency, setup.max_batch or settings.max_concurrency)
    decode = {
        isl: grid.concurrencies(isl + setup.osl, setup.max_kv_tokens, most, settings.granularity, setup.attention_dp)
        for isl in grid.decode_lengths(setup.max_context, setup.osl, settings.granularity)
    }
    if settings.mode != "decode" and not prefill:
        raise BadSettings(
            f"--max-context {setup.max_context}: prefill needs at least {grid.SHORTEST + grid.RESERVE} tokens"
        )
    if settings.mode != "prefill" and not any(decode.values()):
        raise BadSettings(
            f"no prompt of {grid.SHORTEST} tokens and an answer of --osl {setup.osl} fits: "
            f"context {setup.max_context}, KV cache {setup.max_kv_tokens} tokens, --max-concurrency {most}, "
            f"--attention-dp {setup.attention_dp}"
        )
    return Grid(
        prefill=tuple(prefill) if settings.mode != "decode" else (),
        decode=tuple((isl, tuple(levels)) for isl, levels in decode.items()) if settings.mode != "prefill" else (),
        requests=settings.requests,
        seconds=settings.max_s,
    )


def begun(folder: Path, setup: Setup, url: str, warnings: tuple[str, ...], *, overwrite: bool) -> Profile:
    """Load the profile that the folder has, to continue it, or begin an empty one.

    Raises:
        BadProfile: the folder's is of another setup.
    """
    fresh = Profile(setup=setup, url=url, decode=Decode(max_kv_tokens=setup.max_kv_tokens), warnings=warnings)
    if overwrite or not (folder / FILE).exists():
        return fresh
    stored = load(folder)
    if stored.setup != setup:
        differ = [name for name in Setup.__struct_fields__ if getattr(stored.setup, name) != getattr(setup, name)]
        raise BadProfile(
            f"{folder / FILE} is of another setup ({', '.join(differ)}); choose another --out, or --overwrite"
        )
    return stored
