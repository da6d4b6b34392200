"""``penstock bench sweep``: load endpoints at several levels, and keep the figures of each as files."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve
from penstock.measure.generator.event_loop import loop_factory
from penstock.measure.generator.target import BadTarget
from penstock.measure.simulation.trace import TraceError, read_multiplied
from penstock.measure.sweep.bodies import TooLarge
from penstock.measure.sweep.endpoints import BadEndpoint, parse_endpoints
from penstock.measure.sweep.level_run import Limits
from penstock.measure.sweep.report import print_report
from penstock.measure.sweep.results import BadResults, read_series
from penstock.measure.sweep.smoke import Api, Unhealthy
from penstock.measure.sweep.sweep import Plan, Sweep, SweepFailed
from penstock.measure.sweep.token_text import NoShortWord, TokenText
from penstock.measure.sweep.workload import PRESETS, WorkloadFlags, levels_of, workload_of


class Settings(WorkloadFlags, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench sweep``."""

    endpoint: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="servers, each NAME=URL, or NAME=FILE with the state.json of `penstock up`"),
    ] = ("penstock=.penstock/state.json",)
    metrics: Annotated[
        tuple[str, ...], Meta(description="further Prometheus pages of servers, each NAME=URL; /metrics is always read")
    ] = ()
    gpus: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="GPUs of each endpoint, or of all: figures per GPU")
    ] = ()
    model: Annotated[str, Meta(description="model to ask; default: the first that the server lists")] = ""
    tokenizer: Annotated[
        str, Meta(description="model directory or Hugging Face id that counts tokens; default: the model's name")
    ] = ""
    api: Annotated[Api, Meta(description="chat completions, or completions of text")] = "chat"
    api_key: Annotated[str, Meta(description="bearer token, if the servers require one")] = ""
    insecure: Annotated[bool, Meta(description="accept any certificate of https servers")] = False
    stream: Annotated[bool, Meta(description="stream answers; without it there are no TTFT and ITL")] = True
    extra_body: Annotated[str, Meta(description="further fields of each request, a JSON object; they win")] = ""
    search: Annotated[
        bool, Meta(description="look for the knee: double the concurrency while throughput grows, then bisect")
    ] = False
    max_concurrency: Annotated[int, Meta(ge=1, le=8192, description="of --search")] = 1024
    repeat: Annotated[
        int, Meta(ge=1, le=100, description="runs per level, each with other prompts; 5 give `compare` its intervals")
    ] = 1
    warm_up: Annotated[int, Meta(ge=0, description="requests to each endpoint before its first level, unmeasured")] = 10
    max_failed: Annotated[int, Meta(ge=0, description="failed requests in a run, beyond which it ends")] = 10
    timeout_s: Annotated[float, Meta(gt=0, description="a request without a whole answer by then has failed")] = 600.0
    scrape_s: Annotated[float, Meta(gt=0, description="seconds between two reads of the servers' metrics")] = 1.0
    seed: Annotated[int, Meta(description="of prompts, lengths and arrivals")] = 1
    out: Annotated[str, Meta(description="folder for the results; what is there and finished is not run again")] = (
        "bench-results"
    )
    overwrite: Annotated[bool, Meta(description="run levels again that are finished")] = False


class BadSettings(ValueError):
    """Flags that do not fit together."""


_REFUSED = (BadSettings, BadEndpoint, BadTarget, BadResults, TraceError, ModelError, NoShortWord, TooLarge)


def run(settings: Settings) -> int:
    """Run the unfinished levels and print a table. Returns 1 if an endpoint or a request failed, 2 for bad flags."""
    sweep = None
    try:
        plan = plan_of(settings)
        sweep = Sweep(plan, lambda model: text_of(settings.tokenizer or model))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            healthy = runner.run(sweep.run())
        print_report(read_series([plan.out / each.name for each in sweep.measured]))
    except (*_REFUSED, Unhealthy, SweepFailed) as error:
        print(f"penstock bench sweep: {error}", file=sys.stderr)
        return 2 if isinstance(error, (BadSettings, BadEndpoint, BadTarget)) else 1
    except KeyboardInterrupt:
        kept = f"finished levels are in {settings.out}, and the same command goes on"
        print(f"stopped; {kept if sweep and sweep.measured else 'no level was finished'}", file=sys.stderr)
        return 130
    print(f"\nresults in {settings.out}; plots: penstock bench plot {settings.out}")
    return 0 if healthy else 1


def plan_of(settings: Settings) -> Plan:
    """
    Raises:
        BadSettings: flags that do not fit together.
        BadEndpoint: an endpoint that cannot be used.
        TraceError: the trace cannot be read.
    """
    loads = [flag for flag, given in (("--rate", settings.rate), ("--trace", settings.trace)) if given]
    if settings.concurrency and loads:
        raise BadSettings(f"--concurrency and {loads[0]} exclude each other")
    if len(loads) > 1:
        raise BadSettings("--rate and --trace exclude each other")
    if settings.search and loads:
        raise BadSettings(f"--search changes the concurrency; it cannot be combined with {loads[0]}")
    workload = workload_of(settings)
    if workload.images and settings.api != "chat":
        raise BadSettings("images need --api chat")
    trace = read_multiplied(settings) if settings.trace else None
    endpoints = parse_endpoints(
        settings.endpoint, settings.metrics, settings.gpus, api_key=settings.api_key, insecure=settings.insecure
    )
    if settings.preset != "none" and PRESETS[settings.preset].up:
        print(f"preset {settings.preset}; a deployment for it: penstock up {PRESETS[settings.preset].up}")
    return Plan(
        endpoints=tuple(endpoints),
        model=settings.model,
        api=settings.api,
        stream=settings.stream,
        extra=_extra(settings.extra_body),
        workload=workload,
        levels=tuple(levels_of(settings, len(trace.rows) if trace else 0)),
        trace=trace,
        search_up_to=settings.max_concurrency if settings.search else 0,
        requests=settings.requests,
        repeat=settings.repeat,
        warm_up=settings.warm_up,
        seed=settings.seed,
        out=Path(settings.out),
        overwrite=settings.overwrite,
        limits=Limits(settings.max_failed, settings.timeout_s, settings.scrape_s),
    )


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise BadSettings(f"--extra-body: {error}") from None
    if not isinstance(extra, dict):
        raise BadSettings("--extra-body: expected a JSON object")
    return extra


def text_of(tokenizer: str) -> TokenText:
    """
    Raises:
        ModelError: it is no directory, no bundled model and no model of the hub.
        NoShortWord: its tokenizer cannot meet lengths.
    """
    try:
        return TokenText(load_tokenizer(resolve(tokenizer)))
    except ModelError as error:
        raise ModelError(f"{error}; name the model's tokenizer with --tokenizer") from None
