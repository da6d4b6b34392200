"""``penstock bench http``: closed-loop load on any OpenAI-compatible URL, and what it costs each process.

In a clone only: it measures Penstock itself. ``penstock bench sweep`` measures deployments.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from rich.progress import Progress
from rich.table import Table

from penstock.cli.figures import quantile
from penstock.cli.terminal import progress_bar, stdout
from penstock.launch.state import read_state
from penstock.measure.load_generator import (
    WORDS,
    BadTarget,
    ClosedLoop,
    ConnectionPool,
    Exchange,
    HttpTarget,
    ask,
    loop_factory,
    own_seconds,
    parse_target,
)
from penstock.measure.sweep.figures import FEW, BadSlo, Slo, itl_s, slo_of
from penstock.measure.sweep.report import MARK
from tests.perf.cpu import cpu_of

_MOST_REASONS = 20


@dataclass(slots=True)
class Tally:
    """What one stage of a benchmark saw; times in seconds."""

    first_s: "array[float]" = field(default_factory=lambda: array("d"))  # to the first text
    itl_s: "array[float]" = field(default_factory=lambda: array("d"))  # of each request, between its tokens
    between_s: "array[float]" = field(default_factory=lambda: array("d"))  # between reads that carried text
    total_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = -1  # -1: no answer has said
    good: int = 0  # kept the limits
    tokens: int = 0
    events: int = 0  # server-sent events but [DONE]
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """Answered as they should be."""
        return len(self.total_s)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def clear(self) -> None:
        for series in (self.first_s, self.itl_s, self.between_s, self.total_s):
            del series[:]
        self.tokens = self.events = self.prompt_tokens = self.good = 0
        self.cached_tokens = -1
        self.errors.clear()

    def copy(self) -> "Tally":
        return replace(
            self,
            first_s=self.first_s[:],
            itl_s=self.itl_s[:],
            between_s=self.between_s[:],
            total_s=self.total_s[:],
            errors=self.errors.copy(),
        )

    def fail(self, reason: str) -> None:
        counted = reason in self.errors or len(self.errors) < _MOST_REASONS
        self.errors[reason if counted else "other"] += 1

    def count(self, exchange: Exchange, expected_tokens: int, slo: Slo | None = None) -> None:
        """Count a finished request. An answer with an unexpected number of tokens is an error."""
        if exchange.error:
            self.fail(exchange.error)
        elif exchange.output_tokens < 0:
            self.fail("answer without usage")
        elif exchange.output_tokens != expected_tokens:
            self.fail(f"{exchange.output_tokens} tokens instead of {expected_tokens}")
        else:
            self.tokens += exchange.output_tokens
            self.events += exchange.events
            self.total_s.append(exchange.ended - exchange.sent)
            self.between_s.extend(exchange.gaps_s)
            self.prompt_tokens += max(0, exchange.prompt_tokens)
            if exchange.cached_tokens >= 0:
                self.cached_tokens = max(0, self.cached_tokens) + exchange.cached_tokens
            ttft, itl = -1.0, -1.0
            if exchange.first:
                ttft = exchange.first - exchange.sent
                self.first_s.append(ttft)
                itl = itl_s(exchange.first, exchange.last, exchange.output_tokens)
                if itl >= 0:
                    self.itl_s.append(itl)
            took = exchange.ended - exchange.sent
            if slo is not None:
                self.good += slo.kept(ttft * 1e3, itl * 1e3, took * 1e3, tokens=exchange.output_tokens)


_BUSY = 0.85  # share of a core from which the generator is itself the limit


class Stage(Struct, frozen=True):
    """Figures of one stage. ``cpu_us_per_token`` is by process name; the generator's own is in a field of its own."""

    concurrency: int
    seconds: float
    requests: int
    failed: int
    errors: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    gap_p99_ms: float  # between two reads that carried text; several tokens may come in one
    latency_p50_ms: float
    latency_p99_ms: float
    tokens_per_event: float
    cpu_us_per_token: dict[str, float]
    total_cpu_us_per_token: float
    cpu_ms_per_request: float
    own_cpu_us_per_token: float
    own_cpu_share: float
    hit_rate: float | None = None  # share of the prompts' tokens that came from the cache; None: answers do not say
    slo: str = ""
    good_share: float | None = None
    good_per_s: float | None = None


def figures(
    concurrency: int, seconds: float, tally: Tally, spent: Mapping[str, float], own_s: float, slo: Slo | None = None
) -> Stage:
    """Compute a stage's figures from its counters, and from the CPU seconds of each process."""
    tokens = max(1, tally.tokens)
    first, between, total = sorted(tally.first_s), sorted(tally.between_s), sorted(tally.total_s)
    itl, asked = sorted(tally.itl_s), tally.requests + tally.failed
    return Stage(
        concurrency=concurrency,
        seconds=round(seconds, 3),
        requests=tally.requests,
        failed=tally.failed,
        errors=dict(tally.errors),
        requests_per_s=round(tally.requests / seconds, 1),
        tokens_per_s=round(tally.tokens / seconds, 1),
        ttft_p50_ms=quantile(first, 0.5, 0.0) * 1e3,
        ttft_p99_ms=quantile(first, 0.99, 0.0) * 1e3,
        itl_p50_ms=quantile(itl, 0.5, 0.0) * 1e3,
        itl_p99_ms=quantile(itl, 0.99, 0.0) * 1e3,
        gap_p99_ms=quantile(between, 0.99, 0.0) * 1e3,
        latency_p50_ms=quantile(total, 0.5, 0.0) * 1e3,
        latency_p99_ms=quantile(total, 0.99, 0.0) * 1e3,
        tokens_per_event=round(tally.tokens / max(1, tally.events), 3),
        cpu_us_per_token={name: round(cpu / tokens * 1e6, 2) for name, cpu in spent.items()},
        total_cpu_us_per_token=round(sum(spent.values()) / tokens * 1e6, 2),
        cpu_ms_per_request=round(sum(spent.values()) / max(1, tally.requests) * 1e3, 3),
        own_cpu_us_per_token=round(own_s / tokens * 1e6, 2),
        own_cpu_share=round(own_s / seconds, 3),
        hit_rate=tally.cached_tokens / max(1, tally.prompt_tokens) if tally.cached_tokens >= 0 else None,
        slo=str(slo) if slo is not None else "",
        good_share=tally.good / max(1, asked) if slo is not None else None,
        good_per_s=round(tally.good / seconds, 1) if slo is not None else None,
    )


def report(stages: list[Stage], processes: Mapping[str, int], shared_prefix: float) -> None:
    """Print a table of all stages, then the errors.

    Args:
        shared_prefix: the share of each prompt that is common to all.
    """
    console = stdout()
    table = Table(title=f"closed loop, times in ms; {shared_prefix:.0%} of each prompt is common to all")
    slo = next((stage.slo for stage in stages if stage.slo), "")
    names = ["conns", "req/s", "tokens/s", *(["good/s"] if slo else []), "TTFT p50", "p99", "ITL p50", "p99", "gap p99"]
    names += ["latency p50", "tok/event", "hit", "failed"]
    for name in (*names, *(("CPU µs/token", "CPU ms/req") if processes else ()), "own CPU"):
        table.add_column(name, justify="right")
    for stage in stages:
        mark = MARK if stage.requests < FEW else ""
        times = (stage.ttft_p50_ms, stage.ttft_p99_ms, stage.itl_p50_ms, stage.itl_p99_ms, stage.gap_p99_ms)
        cells = [
            *(str(stage.concurrency), f"{stage.requests_per_s:.0f}", f"{stage.tokens_per_s:.0f}"),
            *([f"{stage.good_per_s or 0.0:.1f} ({stage.good_share or 0.0:.0%})"] if slo else []),
            *(f"{value:.2f}{mark}" for value in times),
            f"{stage.latency_p50_ms:.1f}{mark}",
            f"{stage.tokens_per_event:.2f}",
            "–" if stage.hit_rate is None else f"{stage.hit_rate:.0%}",
            str(stage.failed),
        ]
        if processes:
            cells += [f"{stage.total_cpu_us_per_token:.1f}", f"{stage.cpu_ms_per_request:.2f}"]
        table.add_row(*cells, f"{stage.own_cpu_share:.0%}")
    console.print(table)
    if slo:
        console.print(f"good: within {slo} (ms)", highlight=False)
    if any(stage.requests < FEW for stage in stages):
        text = f"{MARK} percentiles of fewer than {FEW} requests: a p99 is then one of the slowest (--duration-s)"
        console.print(text, highlight=False)
    for stage in stages if processes else ():
        parts = ", ".join(f"{name} {cpu:.1f}" for name, cpu in stage.cpu_us_per_token.items())
        console.print(f"{stage.concurrency} connections, CPU µs/token: {parts}", highlight=False)
    for stage in stages:
        for reason, count in stage.errors.items():
            console.print(f"{stage.concurrency} connections: {count} × {reason}", style="red", markup=False)
        if stage.own_cpu_share > _BUSY:
            console.print(
                f"{stage.concurrency} connections: the load generator itself used {stage.own_cpu_share:.0%} of a core; "
                "the server may be faster than shown",
                style="yellow",
            )


_STUCK_S = 60.0
_SHOW_S = 0.25


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench http``."""

    url: Annotated[str, Meta(description="server, with or without /v1; default: the one in --state")] = ""
    model: Annotated[str, Meta(description="model to ask; default: the first of /v1/models")] = ""
    api_key: Annotated[str, Meta(description="bearer token, if the server requires one")] = ""
    insecure: Annotated[bool, Meta(description="accept any certificate of an https server")] = False
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="connections, one stage for each number")
    ] = (1, 16, 64)
    requests: Annotated[int, Meta(ge=0, description="requests per stage; 0: as many as --duration-s allows")] = 0
    duration_s: Annotated[float, Meta(gt=0, description="seconds per stage")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, description="seconds before each stage that are not measured")] = 1.0
    prompt_words: Annotated[int, Meta(ge=1, description="words per prompt")] = 200
    shared_prefix: Annotated[float, Meta(ge=0, le=1, description="share of each prompt common to all")] = 0.5
    output_tokens: Annotated[int, Meta(ge=1, description="tokens per answer; fewer or more count as an error")] = 64
    stream: Annotated[bool, Meta(description="stream answers as server-sent events")] = True
    ignore_eos: Annotated[bool, Meta(description="ask for exactly --output-tokens (an extension)")] = True
    slo: Annotated[str, Meta(description="limits in ms of good requests, as in ttft=500,itl=50: goodput")] = ""
    seed: Annotated[int, Meta(description="seed of the words")] = 1
    state: Annotated[str, Meta(description="state.json of the deployment to load and measure")] = ""
    pids: Annotated[tuple[int, ...], Meta(description="process ids to measure as well")] = ()
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class BenchFailed(Exception):
    """The benchmark cannot run as asked."""


def run(settings: Settings) -> int:
    """Measure all stages and print a table. Returns 1 if a request failed."""
    try:
        target, processes = _target(settings)
        _slo(settings)
        with contextlib.ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
            stages = runner.run(_measure(settings, target, processes))
    except BenchFailed as error:
        print(f"penstock bench http: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report(stages, processes, settings.shared_prefix)
    if settings.json:
        figures = {"settings": settings, "stages": stages}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return 1 if any(stage.failed for stage in stages) else 0


def _target(settings: Settings) -> tuple[HttpTarget, dict[str, int]]:
    """The server to load, and the processes to measure (name -> pid)."""
    url, processes = settings.url, {f"pid {pid}": pid for pid in settings.pids}
    if settings.state:
        try:
            state = read_state(Path(settings.state))
        except FileNotFoundError:
            raise BenchFailed(
                f"--state {settings.state}: no deployment runs there; start one with `penstock up`, or name a --url"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise BenchFailed(f"--state {settings.state}: {error}") from None
        url = url or state.http_url
        processes = {process.name: process.pid for process in state.processes if process.pid} | processes
    if not url:
        raise BenchFailed("name the server: --url http://127.0.0.1:8000 or --state .penstock/state.json")
    try:
        return parse_target(url, api_key=settings.api_key, insecure=settings.insecure), processes
    except BadTarget as error:
        raise BenchFailed(f"--url {error}") from None


def _slo(settings: Settings) -> Slo | None:
    try:
        return slo_of(settings.slo)
    except BadSlo as error:
        raise BenchFailed(str(error)) from None


class Requests:
    """Makes the bytes of requests; equal seeds make equal requests."""

    def __init__(self, settings: Settings, target: HttpTarget, model: str) -> None:
        self._random = random.Random(settings.seed)
        shared = round(settings.prompt_words * settings.shared_prefix)
        self._shared = " ".join(self._random.choices(WORDS, k=shared))
        self._own = settings.prompt_words - shared
        body: dict[str, Any] = {"model": model, "max_tokens": settings.output_tokens, "temperature": 0}
        if settings.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if settings.ignore_eos:
            body["ignore_eos"] = True
        body["messages"] = [{"role": "user", "content": "\0"}]
        self._before, self._after = json.dumps(body, separators=(",", ":")).split("\\u0000")
        self._head = target.head("/v1/chat/completions")

    def make(self) -> bytes:
        prompt = " ".join([self._shared, *self._random.choices(WORDS, k=self._own)])
        body = f"{self._before}{prompt}{self._after}"
        return f"{self._head}{len(body)}\r\n\r\n{body}".encode()


@dataclass(slots=True)
class Load:
    """One running stage."""

    requests: Requests
    settings: Settings
    slo: Slo | None = None
    tally: Tally = field(default_factory=Tally)
    warming: Tally = field(default_factory=Tally)
    counting: bool = False
    sent: int = 0

    def following(self) -> Exchange | None:
        """The next request to send, with the counter of its result."""
        if self.counting and self.settings.requests and self.sent >= self.settings.requests:
            return None
        tally = self.warming
        if self.counting or not self.settings.requests:
            self.sent += 1
            tally = self.tally
        return Exchange(
            self.requests.make(), partial(tally.count, expected_tokens=self.settings.output_tokens, slo=self.slo)
        )

    def count(self) -> None:
        """End the warm-up. In a stage with a duration, every later answer counts, whenever its request was sent."""
        self.counting = True
        self.sent = 0
        self.tally.clear()


async def _measure(settings: Settings, target: HttpTarget, processes: Mapping[str, int]) -> list[Stage]:
    model = settings.model or await _first_model(target)
    requests = Requests(settings, target, model)
    stages = []
    with progress_bar() as bar:
        for concurrency in settings.concurrency:
            stages.append(await _stage(requests, target, settings, concurrency, processes, bar))
    return stages


async def _stage(
    requests: Requests,
    target: HttpTarget,
    settings: Settings,
    concurrency: int,
    processes: Mapping[str, int],
    bar: Progress,
) -> Stage:
    line = bar.add_task(f"{concurrency} connections", total=1.0, state="warming up")
    bar.refresh()
    load = Load(requests, settings, _slo(settings))
    async with ConnectionPool(target, timeout_s=_STUCK_S) as pool:
        loop = ClosedLoop(pool, concurrency, load.following)
        await asyncio.sleep(settings.warm_up_s)
        load.count()
        cpu, own, began = cpu_of(processes.values()), own_seconds(), time.perf_counter()

        def show(done: float, rate: float) -> None:
            bar.update(line, completed=done, state=f"{rate:.0f} req/s", refresh=True)

        await _watch(load, loop, began, show)
        # For a duration, what is still under way would be measured under falling load: it does not count.
        seconds, counted = time.perf_counter() - began, load.tally.copy()
        after = cpu_of(processes.values())
        spent = {name: after[pid] - cpu[pid] for name, pid in processes.items()}
        own = own_seconds() - own
        loop.stop()
        await loop.ended(_STUCK_S)
    if not counted.requests and not counted.failed:
        counted.fail("no request was answered in time")
    return figures(concurrency, seconds, counted, spent, own, load.slo)


async def _watch(load: Load, loop: ClosedLoop, began: float, show: Callable[[float, float], None]) -> None:
    """Wait for the end of the stage (its time, or its last answer), and show the progress."""
    settings = load.settings
    while True:
        took, count = time.perf_counter() - began, load.tally.requests + load.tally.failed
        done = count / settings.requests if settings.requests else took / settings.duration_s
        show(min(1.0, done), count / max(took, 1e-9))
        if done >= 1.0:
            return
        left = _SHOW_S if settings.requests else min(_SHOW_S, settings.duration_s - took)
        if await loop.ended(left):
            return


async def _first_model(target: HttpTarget) -> str:
    status, body = await ask(target, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        if not status:
            raise BenchFailed(f"no server answers at {target.url}: start one, or correct --url") from None
        said = body[:200].decode(errors="replace")
        if status in (401, 403):
            raise BenchFailed(f"{target.url} answered {status}: {said}; give a key with --api-key") from None
        raise BenchFailed(f"{target.url}/v1/models names no model: {said}; name it with --model") from None
