"""``penstock profile endpoint``: measure prefill and decode of a live engine, each alone, and keep the figures.

The points are measured one after the other, and each is saved. The limits of servers come from their metrics: tokens of
KV cache, sequences in a batch, length of the context. Plots need matplotlib (``penstock[bench]``).
"""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.terminal import fail
from penstock.configs.flags import BadSettings
from penstock.infra.model.modeldir import ModelError
from penstock.measure.load_generator import BadTarget, ask, loop_factory
from penstock.measure.plots import PlotsMissing, drawn
from penstock.measure.profile.data import (
    FILE,
    RESERVE,
    SHORTEST,
    BadProfile,
    Decode,
    Prefill,
    Profile,
    Setup,
    cached_share,
    concurrencies,
    decode_lengths,
    kv_tokens,
    load,
    prefill_lengths,
    prefill_throughput,
    save,
    steady_itl,
    ttft_of,
)
from penstock.measure.sweep.bodies import Bodies, LevelTooLarge
from penstock.measure.sweep.endpoints import BadEndpoint, SweptEndpoint, parse_endpoints
from penstock.measure.sweep.figures import RequestRecord
from penstock.measure.sweep.level_run import RunLimits, run_level
from penstock.measure.sweep.smoke import Api, Smoke, Unhealthy, smoke
from penstock.measure.sweep.sweep_command import text_of
from penstock.measure.sweep.workload import LoadLevel, NoShortWord, TokenText, Workload

_CACHED = 0.05  # share of the prompts from which TTFT is not that of a prefill


class ProfileFailed(Exception):
    """A request failed; the text says at which point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    Attributes:
        prefill: prompt lengths.
        decode: prompt lengths and the requests at once of each.
        requests: prompts per rank and length whose TTFT is measured.
        seconds: no further point is begun after this time.
    """

    prefill: tuple[int, ...]
    decode: tuple[tuple[int, tuple[int, ...]], ...]
    requests: int = 3
    seconds: float = 1800.0


class Profiler:
    """
    Args:
        profile: the points measured so far.
        seed: of the prompts; one that the server has seen finds them in its cache.
        say: called with a line about each point.
    """

    def __init__(
        self,
        endpoint: SweptEndpoint,
        bodies: Bodies,
        profile: Profile,
        folder: Path,
        *,
        seed: int,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._bodies = bodies
        self.profile = profile
        self._folder = folder
        self._seed = seed
        self._limits = RunLimits(failed=0, timeout_s=timeout_s)
        self._say = say

    async def run(self, grid: Grid) -> int:
        """Measure the points that the profile lacks, and return how many remain to be measured.

        Raises:
            ProfileFailed: a request failed. The points before are saved.
        """
        left = list(self._missing(grid))
        until = time.monotonic() + grid.seconds
        while left and time.monotonic() < until:
            isl, concurrency = left.pop(0)
            if concurrency:
                if not await self._decode(isl, concurrency):
                    # More requests at once would not all decode at once, either.
                    left = [each for each in left if each[0] != isl]
            else:
                await self._prefill(isl, grid.requests)
            save(self._folder, self.profile)
        return len(left)

    def _missing(self, grid: Grid) -> Iterator[tuple[int, int]]:
        """Prompt length and concurrency of each point; 0: its prefill."""
        decode = self.profile.decode
        measured = {*zip(decode.decode_isl, decode.decode_concurrency, strict=True)}
        yield from ((isl, 0) for isl in grid.prefill if isl not in self.profile.prefill.prefill_isl)
        for isl, levels in grid.decode:
            yield from ((isl, each) for each in levels if (isl, each) not in measured)

    async def _prefill(self, isl: int, requests: int) -> None:
        setup = self.profile.setup
        at_once = setup.attention_dp
        records = await self._answers(isl, 1, at_once, requests * at_once)
        ttft = ttft_of(records)
        if ttft is None:
            raise ProfileFailed(f"prompts of {isl} tokens: no text was streamed, so there is no TTFT")
        if (cached := cached_share(records)) > _CACHED:
            self._warn(f"prompts of {isl} tokens: {cached:.0%} were in the prefix cache, so TTFT is too short")
        throughput = prefill_throughput(isl, ttft, setup.gpus, at_once)
        prefill = self.profile.prefill.added(isl, round(ttft, 3), round(throughput, 3))
        self.profile = msgspec.structs.replace(self.profile, prefill=prefill)
        self._say(f"prefill  {isl:>7,} tokens  TTFT {ttft:9.1f} ms  {throughput:10,.0f} tokens/s per GPU")

    async def _decode(self, isl: int, concurrency: int) -> bool:
        """Measure one decode point. False: the requests did not all decode at the same time."""
        setup = self.profile.setup
        await self._answers(isl, 1, concurrency, concurrency)  # into the prefix cache, so that all begin together
        records = await self._answers(isl, setup.osl, concurrency, concurrency)
        itl = steady_itl(records)
        at = f"decode   {isl:>7,} tokens × {concurrency:<4}"
        if itl is None:
            self._warn(f"{at}: the requests did not all decode at once; no figure, and no higher concurrency")
            return False
        point = setup.decode_point(isl, concurrency, itl)
        self.profile = msgspec.structs.replace(self.profile, decode=self.profile.decode.added(point))
        self._say(f"{at}  KV {point.kv_usage:6.1%}  ITL {itl:7.2f} ms  {point.throughput:10,.0f} tokens/s per GPU")
        return True

    async def _answers(self, isl: int, osl: int, concurrency: int, requests: int) -> list[RequestRecord]:
        level = LoadLevel("concurrency", concurrency, requests)
        workload = Workload(isl=isl, isl_stddev=0.0, osl=osl)
        # The length is in the seed: prompts of two lengths that share a seed would begin alike.
        planned = self._bodies.synthetic(workload, level, self._seed, isl)
        run, records = await run_level(self._endpoint, level, planned, self._limits)
        if run.figures.failed:
            reason = next(iter(run.figures.errors), "")
            raise ProfileFailed(f"prompts of {isl} tokens, {concurrency} at once: {run.aborted or reason}")
        if osl > 1 or concurrency == self.profile.setup.attention_dp:  # not what only fills the prefix cache
            for warning in run.client.warnings:
                self._note(f"{isl} tokens × {concurrency}: {warning}")
        return records

    def _warn(self, text: str) -> None:
        self._note(text)
        self._say(text)

    def _note(self, text: str) -> None:
        """Keep a warning for the reader of the file."""
        if text not in self.profile.warnings:
            self.profile = msgspec.structs.replace(self.profile, warnings=(*self.profile.warnings, text))


_PREFIXES = (
    "penstock_worker_kv_capacity_blocks",
    "penstock_worker_kv_block_size_tokens",
    "penstock_worker_max_sequences",
    "penstock_worker_max_model_len",
    "vllm:cache_config_info",
    "sglang:max_total_num_tokens",
)
_DECODES = ("aggregated", "decode")
_TIMEOUT_S = 5.0


class Capacity(Struct, frozen=True):
    """Limits of an endpoint. 0: not reported."""

    max_kv_tokens: int = 0
    max_batch: int = 0
    max_context: int = 0


def read_capacity(pages: Iterable[str]) -> Capacity:
    """Add up the limits on the servers' Prometheus pages. The context length is that of the shortest."""
    kv_tokens = batch = 0
    contexts = []
    for page in pages:
        values: dict[str, float] = {}
        lines = [line for line in page.splitlines() if line.startswith(_PREFIXES)]
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                if sample.labels.get("role", "decode") not in _DECODES:
                    continue
                if sample.name == "vllm:cache_config_info":
                    kv_tokens += _product(sample.labels.get("num_gpu_blocks"), sample.labels.get("block_size"))
                else:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        blocks, size, sequences, context, tokens = (int(values.get(name, 0)) for name in (*_PREFIXES[:4], _PREFIXES[5]))
        kv_tokens += blocks * size + tokens
        batch += sequences
        contexts += [context] if context else []
    return Capacity(kv_tokens, batch, min(contexts, default=0))


def _product(*numbers: str | None) -> int:
    product = 1
    for number in numbers:
        product *= int(number) if number and number.isdecimal() else 0
    return product


async def capacity_of(endpoint: SweptEndpoint, model: str) -> Capacity:
    """Read the endpoint's metrics pages and its list of models. Pages that do not answer are left out."""
    answers = [await ask(page.target, page.path, timeout_s=_TIMEOUT_S) for page in endpoint.pages]
    capacity = read_capacity([body.decode(errors="replace") for status, body in answers if status == 200])
    if capacity.max_context:
        return capacity
    status, body = await ask(endpoint.target, "/v1/models", timeout_s=_TIMEOUT_S)
    return Capacity(capacity.max_kv_tokens, capacity.max_batch, context_of(body, model) if status == 200 else 0)


def context_of(models: bytes, model: str) -> int:
    """``max_model_len`` of a model in an answer of ``/v1/models``; 0: not reported."""
    try:
        (own,) = [each for each in json.loads(models)["data"] if each["id"] == model]
        return int(own["max_model_len"])
    except (ValueError, LookupError, TypeError):
        return 0


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


_CONTEXT = 16_384  # of the largest data, unless a flag says otherwise


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
    timeout_s: Annotated[float, Meta(gt=0, description="seconds until an unfinished request fails")] = 600.0
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
        print(f"stopped; finished points are in {folder}, and the same command continues", file=sys.stderr)
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
        print(f"{left} points were not begun within {settings.max_s:g} s; the same command continues", file=sys.stderr)
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
        [f"{name}={settings.endpoint}"], metrics, (settings.gpus,), api_key=settings.api_key, insecure=settings.insecure
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
        tokens = kv_tokens(batch, context - settings.osl, settings.osl)
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
    prefill = prefill_lengths(setup.max_context, settings.granularity)
    most = min(settings.max_concurrency, setup.max_batch or settings.max_concurrency)
    decode = {
        isl: concurrencies(isl + setup.osl, setup.max_kv_tokens, most, settings.granularity, setup.attention_dp)
        for isl in decode_lengths(setup.max_context, setup.osl, settings.granularity)
    }
    if settings.mode != "decode" and not prefill:
        raise BadSettings(f"--max-context {setup.max_context}: prefill needs at least {SHORTEST + RESERVE} tokens")
    if settings.mode != "prefill" and not any(decode.values()):
        raise BadSettings(
            f"no prompt of {SHORTEST} tokens and an answer of --osl {setup.osl} fits: "
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
