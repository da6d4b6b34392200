"""``penstock bench replay``: a trace, or prompts that share prefixes, on running deployments, over NATS.

Each deployment gets the same requests. To compare router modes, start one deployment per mode, on mock workers with
realistic timing: ``penstock up --engine mock --mock-speedup 1 --router-mode kv``.
"""

import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from rich.table import Table

from penstock.cli.figures import quantile
from penstock.cli.terminal import fail, stdout
from penstock.client import Client, PenstockError
from penstock.launch.state import DeploymentState, read_state
from penstock.measure.plots import PlotsMissing
from penstock.measure.simulation.trace import Multipliers, RequestTrace, TraceError, TraceRow, multiplied, read
from tests.perf.comparison import plot_prefix_ratios
from tests.perf.workloads import WORKLOADS, generate

_FIRST_TOKEN = 16  # ids below may be special
_CACHED_UNITS = 50_000

Ratio = Annotated[float, Meta(ge=0, le=1)]


class ReplayBenchSettings(Multipliers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench replay``."""

    state: Annotated[tuple[str, ...], Meta(min_length=1, description="state.json of each deployment to measure")] = (
        ".penstock/state.json",
    )
    trace: Annotated[str, Meta(description="file in Mooncake's format; default: the prefix sweep")] = ""
    workload: Annotated[str, Meta(description="shape of requests to generate, instead of --trace")] = ""
    rate: Annotated[float, Meta(gt=0, description="of a workload: requests per second")] = 5.0
    speed: Annotated[float, Meta(gt=0, description="of a trace: how many times faster")] = 1.0
    prefix_ratios: Annotated[tuple[Ratio, ...], Meta(description="shares of the prompt that are common")] = (
        0.1,
        0.3,
        0.5,
        0.7,
        0.9,
    )
    requests: Annotated[int, Meta(ge=1, description="requests, of the sweep for each ratio")] = 200
    concurrency: Annotated[int, Meta(ge=1, description="of the sweep: requests at once")] = 20
    prefixes: Annotated[int, Meta(ge=1, description="of the sweep: different prefixes")] = 20
    prompt_tokens: Annotated[int, Meta(ge=1, description="of the sweep: mean length of a prompt")] = 14000
    output_tokens: Annotated[int, Meta(ge=2, description="of the sweep: tokens per answer")] = 200
    vocabulary: Annotated[int, Meta(ge=32, description="token ids are drawn below this")] = 1000
    timeout_s: Annotated[float, Meta(gt=0, description="a request without an answer has failed")] = 600.0
    seed: Annotated[int, Meta(description="of the prompts; each ratio adds one")] = 0
    json: Annotated[str, Meta(description="file for the figures")] = ""
    plot: Annotated[str, Meta(description="PNG file for the sweep; needs penstock[bench]")] = ""


class ReplayFailed(Exception):
    """The measurement cannot run as asked."""


class ReplayBenchFigures(Struct, frozen=True):
    """Of the answered requests; times in ms. ``label``: the prefix ratio, or the trace's name."""

    deployment: str
    label: str
    requests: int
    failed: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    e2e_mean: float
    itl_mean: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ReplayedPrompt:
    """A request to send; ``at_s`` after the first one, None: as soon as a slot is free."""

    tokens: Sequence[int]
    output_tokens: int
    at_s: float | None = None


@dataclass(slots=True)
class Answered:
    """Times in seconds."""

    sent: float
    first: float
    last: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int


def run(settings: ReplayBenchSettings) -> int:
    """Measure the deployments one after the other. Returns 1 if a request failed."""
    try:
        figures = asyncio.run(_measure(settings))
        _report(settings, figures)
        if settings.json:
            document = {
                "config": settings,
                "figures": figures,
                **(_sweep(settings, figures) if _sweeps(settings) else {}),
            }
            Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        if settings.plot and _sweeps(settings):
            lines = _sweep(settings, figures)
            plot_prefix_ratios(
                settings.prefix_ratios, lines["ttft_values"], lines["throughput_values"], Path(settings.plot)
            )
    except (ReplayFailed, TraceError, PlotsMissing) as error:
        return fail("bench replay", error)
    except KeyboardInterrupt:
        return 130
    return 1 if any(each.failed for each in figures) else 0


def _sweeps(settings: ReplayBenchSettings) -> bool:
    return not settings.trace and not settings.workload


async def _measure(settings: ReplayBenchSettings) -> list[ReplayBenchFigures]:
    loads = list(_loads(settings))
    measured = []
    for path in settings.state:
        state = _state(path)
        async with Client(state.client_nats_url, namespace=state.namespace) as client:
            for label, prompts in loads:
                answers, failed, seconds = await _send(client, state.model, prompts, settings)
                measured.append(figures(path, label, answers, failed, seconds))
    return measured


def _state(path: str) -> DeploymentState:
    try:
        return read_state(Path(path))
    except FileNotFoundError:
        raise ReplayFailed(f"--state {path}: no deployment runs there; start one with `penstock up`") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayFailed(f"--state {path}: {error}") from None


def _loads(settings: ReplayBenchSettings) -> list[tuple[str, list[ReplayedPrompt]]]:
    if _sweeps(settings):
        return [
            (f"{ratio:g}", sweep_prompts(settings, ratio, settings.seed + turn))
            for turn, ratio in enumerate(settings.prefix_ratios)
        ]
    if settings.workload:
        if settings.workload not in WORKLOADS:
            raise ReplayFailed(f"--workload {settings.workload}: one of {', '.join(WORKLOADS)}")
        trace, speed = generate(settings.workload, settings.seed, settings.requests, settings.rate), 1.0
    else:
        trace, speed = read(Path(settings.trace)).limited(settings.requests), settings.speed
    return [(trace.name, replay_prompts(multiplied(trace, settings), speed, settings.vocabulary))]


def sweep_prompts(settings: ReplayBenchSettings, ratio: float, seed: int) -> list[ReplayedPrompt]:
    """Prompts that begin with a shared prefix. The length of the remainder is normal, with σ of a quarter."""
    rng = random.Random(seed)
    shared = round(settings.prompt_tokens * ratio)
    own = settings.prompt_tokens - shared

    def tokens(count: int) -> list[int]:
        return rng.choices(range(_FIRST_TOKEN, settings.vocabulary), k=count)

    prefixes = [tokens(shared) for _ in range(settings.prefixes)]
    return [
        ReplayedPrompt([*rng.choice(prefixes), *tokens(max(1, round(rng.gauss(own, own / 4))))], settings.output_tokens)
        for _ in range(settings.requests)
    ]


def replay_prompts(trace: RequestTrace, speed: float, vocabulary: int) -> list[ReplayedPrompt]:
    """The prompts of a trace: the same tokens for the same unit."""

    @lru_cache(_CACHED_UNITS)
    def unit(number: int) -> list[int]:
        return random.Random(number).choices(range(_FIRST_TOKEN, vocabulary), k=trace.block_tokens)

    def tokens(row: TraceRow) -> list[int]:
        tokens = [token for number in row.hash_ids for token in unit(number)][: row.input_length]
        return tokens + [_FIRST_TOKEN] * (row.input_length - len(tokens))

    start = trace.rows[0].timestamp
    return [ReplayedPrompt(tokens(row), row.output_length, (row.timestamp - start) / 1e3 / speed) for row in trace.rows]


async def _send(
    client: Client, model: str, prompts: Sequence[ReplayedPrompt], settings: ReplayBenchSettings
) -> tuple[list[Answered], int, float]:
    """Send all prompts, and return the answers, the number of failures, and the seconds it took."""
    answers: list[Answered] = []
    errors: list[str] = []
    began = time.perf_counter()

    async def one(prompt: ReplayedPrompt) -> None:
        try:
            answers.append(await _ask(client, model, prompt, settings.timeout_s))
        except (PenstockError, TimeoutError) as error:
            errors.append(str(error))

    if prompts[0].at_s is None:
        left = iter(prompts)

        async def slot() -> None:
            for prompt in left:
                await one(prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(settings.concurrency):
                group.create_task(slot())
    else:
        async with asyncio.TaskGroup() as group:
            async for prompt in _in_time(prompts, began):
                group.create_task(one(prompt))
    if errors:
        print(f"{len(errors)} requests failed: {errors[0]}", file=sys.stderr)
    return answers, len(errors), time.perf_counter() - began


async def _in_time(prompts: Sequence[ReplayedPrompt], began: float) -> AsyncIterator[ReplayedPrompt]:
    for prompt in prompts:
        await asyncio.sleep(max(0.0, began + (prompt.at_s or 0.0) - time.perf_counter()))
        yield prompt


async def _ask(client: Client, model: str, prompt: ReplayedPrompt, timeout_s: float) -> Answered:
    sent = time.perf_counter()
    first = last = 0.0
    usage = None
    stream = client.complete(
        model=model,
        prompt=prompt.tokens,
        stream=True,
        max_tokens=prompt.output_tokens,
        ignore_eos=True,
        temperature=0,
        stream_options={"include_usage": True},
        timeout=timeout_s,
    )
    async for chunk in stream:
        if chunk.choices and (chunk.choices[0].text or chunk.choices[0].finish_reason):
            last = time.perf_counter()
            first = first or last
        usage = chunk.usage or usage
    if usage is None or not first:
        raise TimeoutError("the answer ended without tokens or usage")
    details = usage.prompt_tokens_details or {}
    cached = int(details.get("cached_tokens", 0))
    return Answered(sent, first, last, usage.completion_tokens, usage.prompt_tokens, cached)


def figures(
    deployment: str, label: str, answers: Sequence[Answered], failed: int, seconds: float
) -> ReplayBenchFigures:
    """
    Raises:
        ReplayFailed: nothing was answered.
    """
    if not answers:
        raise ReplayFailed(f"{deployment}: none of {failed} requests was answered")
    ttft = sorted((each.first - each.sent) * 1e3 for each in answers)
    count = len(answers)
    gaps = sum(each.tokens - 1 for each in answers)
    return ReplayBenchFigures(
        deployment,
        label,
        count,
        failed,
        sum(each.cached_tokens for each in answers) / sum(each.prompt_tokens for each in answers),
        sum(ttft) / count,
        quantile(ttft, 0.5, math.nan),
        quantile(ttft, 0.99, math.nan),
        ttft[-1],
        sum(each.last - each.sent for each in answers) * 1e3 / count,
        sum(each.last - each.first for each in answers) * 1e3 / max(1, gaps),
        sum(each.tokens for each in answers) / seconds,
    )


def _sweep(settings: ReplayBenchSettings, figures: Sequence[ReplayBenchFigures]) -> dict[str, Any]:
    """The sweep as series by deployment."""
    by_state = {path: [each for each in figures if each.deployment == path] for path in settings.state}
    return {
        "prefix_ratios": settings.prefix_ratios,
        "ttft_values": {path: [each.ttft_mean for each in group] for path, group in by_state.items()},
        "throughput_values": {path: [each.tokens_per_s for each in group] for path, group in by_state.items()},
    }


def _report(settings: ReplayBenchSettings, figures: Sequence[ReplayBenchFigures]) -> None:
    table = Table(title="shared prefixes" if _sweeps(settings) else figures[0].label, title_justify="left")
    table.add_column("deployment")
    for head in ("ratio" if _sweeps(settings) else "trace", "hit", "TTFT mean", "p50", "p99", "max", "E2E mean", "ITL"):
        table.add_column(head, justify="right")
    for head in ("tokens/s", "failed"):
        table.add_column(head, justify="right")
    for each in figures:
        times = (each.ttft_mean, each.ttft_p50, each.ttft_p99, each.ttft_max, each.e2e_mean)
        table.add_row(
            each.deployment,
            each.label,
            f"{each.hit_rate:.3f}",
            *(f"{value:.0f} ms" for value in times),
            f"{each.itl_mean:.1f} ms",
            f"{each.tokens_per_s:.0f}",
            str(each.failed),
        )
    stdout().print(table)
