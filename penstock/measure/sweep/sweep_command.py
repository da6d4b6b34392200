"""``penstock bench sweep``: load endpoints at several levels, and keep the figures of each as files."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cli.terminal import fail, progress_bar
from penstock.configs.flags import BadSettings
from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve
from penstock.measure.load_generator import BadTarget, loop_factory
from penstock.measure.simulation.trace import RequestTrace, TraceError, multiplied, read
from penstock.measure.sweep import results
from penstock.measure.sweep.bodies import Bodies, LevelTooLarge, PlannedRequest
from penstock.measure.sweep.endpoints import BadEndpoint, SweptEndpoint, parse_endpoints
from penstock.measure.sweep.figures import BadSlo, Slo, slo_of
from penstock.measure.sweep.level_run import RunLimits, run_level, warm_up
from penstock.measure.sweep.report import print_report
from penstock.measure.sweep.results import BadResults, LevelResult, LevelRun, read_series
from penstock.measure.sweep.smoke import Api, Smoke, Unhealthy, smoke
from penstock.measure.sweep.workload import (
    PRESETS,
    BadDataset,
    LoadLevel,
    NoShortWord,
    RecordedConversation,
    TokenText,
    Workload,
    WorkloadFlags,
    concurrency_level,
    described,
    levels_of,
    read_conversations,
    workload_of,
)

_OFF = 0.02  # share by which the prompts' mean may differ from what was asked for


class SweepFailed(Exception):
    """No endpoint could be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a sweep, and what they come to.

    Attributes:
        levels: that are run; with ``--search`` the sweep chooses its own.
        extra: further fields of each body.
    """

    settings: "SweepSettings"
    endpoints: tuple[SweptEndpoint, ...]
    workload: Workload
    levels: tuple[LoadLevel, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    trace: RequestTrace | None = None
    conversations: tuple[RecordedConversation, ...] = ()
    slo: Slo | None = None

    @property
    def source(self) -> str:
        """Name of what is sent instead of the workload; "": nothing."""
        return Path(self.settings.dataset).name if self.conversations else self.trace.name if self.trace else ""


@dataclass(slots=True)
class SmokedEndpoint:
    """An endpoint that passed its smoke request."""

    endpoint: SweptEndpoint
    smoke: Smoke
    texts: TokenText
    levels: list[LoadLevel] = field(default_factory=list)  # that were run, or were finished
    warm: bool = False
    healthy: bool = True


class Sweep:
    """
    Args:
        texts: makes the texts of a model by its name.
    """

    def __init__(self, plan: Plan, texts: Callable[[str], TokenText]) -> None:
        self._plan = plan
        self._settings = settings = plan.settings
        self._limits = RunLimits(settings.max_failed, settings.timeout_s, settings.scrape_s, plan.slo)
        self._texts = texts
        self._loaded: list[SmokedEndpoint] = []
        self._failed = False
        self._bar = progress_bar()

    @property
    def measured(self) -> list[SweptEndpoint]:
        """The endpoints that have results."""
        return [each.endpoint for each in self._loaded if each.levels]

    async def run(self) -> bool:
        """Run all that is not finished; False: an endpoint was left, or a request failed.

        Runs of one number alternate between the endpoints, so that what changes on the machine meets all of them.

        Raises:
            Unhealthy: an endpoint does not pass its smoke request. Nothing was loaded then.
            SweepFailed: every level of every endpoint was aborted.
            BadResults: the folder has results of another load.
        """
        for endpoint in self._plan.endpoints:
            self._loaded.append(await self._smoke(endpoint))
        with self._bar:
            for number in range(1, self._settings.repeat + 1):
                if self._settings.search:
                    for each in self._loaded:
                        await self._search(each, number)
                else:
                    for level in self._plan.levels:
                        for each in self._loaded:
                            await self._level(each, level, number)
        if not self.measured:
            raise SweepFailed("every endpoint was left before a level was finished")
        return not self._failed

    async def _smoke(self, endpoint: SweptEndpoint) -> SmokedEndpoint:
        plan, settings = self._plan, self._settings
        try:
            first = await smoke(
                endpoint.target, settings.api, settings.model, None, stream=settings.stream, extra=plan.extra
            )
            texts = self._texts(first.model)
            loaded = await smoke(
                endpoint.target, settings.api, first.model, texts, stream=settings.stream, extra=plan.extra
            )
        except Unhealthy as error:
            raise Unhealthy(f"{endpoint.name}: {error}") from None
        loaded = msgspec.structs.replace(loaded, warnings=(*loaded.warnings, *_raised(plan, loaded)))
        for warning in loaded.warnings:
            self._say(f"{endpoint.name}: {warning}")
        return SmokedEndpoint(endpoint, loaded, texts)

    async def _search(self, loaded: SmokedEndpoint, number: int) -> None:
        """Find the knee in the first run; later ones repeat its levels."""
        if number > 1:
            for level in sorted(loaded.levels, key=lambda level: level.value):
                await self._level(loaded, level, number)
            return
        points: list[results.MeasuredPoint] = []
        while (value := results.next_level(points, self._settings.max_concurrency)) is not None and loaded.healthy:
            level = concurrency_level(value, self._settings.requests)
            result = await self._level(loaded, level, number)
            if result is not None and result.complete:
                points.append(results.point(result))

    async def _level(self, loaded: SmokedEndpoint, level: LoadLevel, number: int) -> LevelResult | None:
        """One run of a level, unless it is finished or the endpoint was left; its result so far."""
        if not loaded.healthy:
            return None
        settings = self._settings
        folder = results.level_folder(Path(settings.out), loaded.endpoint.name, level)
        result = self._begun(loaded, level)
        stored = None if settings.overwrite and number == 1 else results.load(folder)
        if stored is not None and not stored.same_load(result):
            raise results.BadResults(
                f"{folder}/result.json is of another load (model, lengths, requests or seed); "
                "choose another --out, or --overwrite"
            )
        if stored is not None:
            result = msgspec.structs.replace(result, runs=stored.runs)
        if any(run.number == number for run in result.complete):
            loaded.levels += [level] if level not in loaded.levels else []
            return result
        bodies = self._bodies(loaded)
        if not loaded.warm:
            await self._warm_up(loaded, bodies)
        planned = self._planned(bodies, level, number)
        run = await self._run(loaded, level, planned, number, folder)
        kept = tuple(each for each in result.runs if each.number != number)
        result = msgspec.structs.replace(result, runs=(*kept, run))
        results.save(folder, result)
        if run.aborted:
            loaded.healthy = False
            self._say(
                f"{loaded.endpoint.name}, {level.title}: aborted, and its further levels are left out: {run.aborted}"
            )
        else:
            loaded.levels += [level] if level not in loaded.levels else []
        self._failed = self._failed or bool(run.figures.failed)
        return result

    async def _run(
        self, loaded: SmokedEndpoint, level: LoadLevel, planned: Sequence[PlannedRequest], number: int, folder: Path
    ) -> LevelRun:
        title = f"{loaded.endpoint.name}, {level.title}" + (f", run {number}" if self._settings.repeat > 1 else "")
        line = self._bar.add_task(title, total=len(planned), state="")

        def show(done: int, failed: int) -> None:
            state = f"{done}/{len(planned)}" + (f", {failed} failed" if failed else "")
            self._bar.update(line, completed=done, state=state, refresh=True)

        run, records = await run_level(loaded.endpoint, level, planned, self._limits, number=number, show=show)
        results.save_records(folder, number, records)
        counted = self._plan.workload.images or bool(self._plan.conversations)  # templates add to each turn
        for warning in (*run.client.warnings, *_lengths(run, uncertain=bool(counted))):
            self._say(f"{title}: {warning}")
        return run

    async def _warm_up(self, loaded: SmokedEndpoint, bodies: Bodies) -> None:
        plan, settings = self._plan, self._settings
        if settings.warm_up:
            level = LoadLevel("concurrency", 0, settings.warm_up)
            planned = bodies.synthetic(plan.workload, level, settings.seed, 0)
            error = await warm_up(loaded.endpoint, planned, min(settings.warm_up, 4), settings.timeout_s)
            if error:
                raise Unhealthy(f"{loaded.endpoint.name}: warm-up failed: {error}")
        loaded.warm = True

    def _begun(self, loaded: SmokedEndpoint, level: LoadLevel) -> LevelResult:
        plan, settings = self._plan, self._settings
        return LevelResult(
            endpoint=loaded.endpoint.name,
            url=loaded.endpoint.target.url,
            model=loaded.smoke.model,
            api=settings.api,
            level=level,
            workload=plan.workload,
            seed=settings.seed,
            gpus=loaded.endpoint.gpus,
            trace=plan.source,
            stream=settings.stream,
            warnings=loaded.smoke.warnings,
            fingerprint=loaded.smoke.fingerprint,
        )

    def _bodies(self, loaded: SmokedEndpoint) -> Bodies:
        plan, settings = self._plan, self._settings
        return Bodies(
            loaded.endpoint.target,
            loaded.smoke.model,
            settings.api,
            loaded.smoke.abilities,
            loaded.texts,
            stream=settings.stream,
            extra=plan.extra,
        )

    def _planned(self, bodies: Bodies, level: LoadLevel, number: int) -> list[PlannedRequest]:
        if self._plan.conversations:
            return bodies.of_dataset(self._plan.conversations, level, self._settings.seed, number)
        if self._plan.trace is not None:
            return bodies.of_trace(self._plan.trace, level, self._settings.seed, number)
        return bodies.synthetic(self._plan.workload, level, self._settings.seed, number)

    def _say(self, text: str) -> None:
        self._bar.console.print(text, style="yellow", markup=False, highlight=False)


def _raised(plan: Plan, loaded: Smoke) -> list[str]:
    """Says that prompts are longer than asked for because the chat template alone is."""
    least, asked = loaded.abilities.overhead_tokens + 1, plan.workload.isl
    if plan.source or asked >= least:
        return []
    return [f"prompts have at least {least} tokens instead of {asked}: the server's chat template adds {least - 1}"]


def _lengths(run: LevelRun, *, uncertain: bool) -> list[str]:
    """Notes about lengths that differ from the requested ones, by the server's count.

    Args:
        uncertain: what the server counts for a prompt is not known: images, and templates of several turns, add to it.
    """
    notes = []
    figures = run.figures
    for what, seen, asked in (
        ("prompts", figures.isl, figures.isl_asked),
        ("answers", figures.osl, figures.osl_asked),
    ):
        if uncertain and what == "prompts":
            continue
        if seen is not None and asked is not None and abs(seen.mean - asked.mean) > _OFF * asked.mean:
            notes.append(f"{what} had {seen.mean:.0f} tokens on average instead of {asked.mean:.0f}")
    return notes


class SweepSettings(WorkloadFlags, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    slo: Annotated[
        str, Meta(description="limits in ms of good requests, as in ttft=500,itl=50: goodput; also latency")
    ] = ""
    repeat: Annotated[
        int, Meta(ge=1, le=100, description="runs per level, each with other prompts; 5 give `compare` its intervals")
    ] = 1
    warm_up: Annotated[int, Meta(ge=0, description="requests to each endpoint before its first level, unmeasured")] = 10
    max_failed: Annotated[int, Meta(ge=0, description="failed requests in a run, beyond which it ends")] = 10
    timeout_s: Annotated[float, Meta(gt=0, description="seconds until an unfinished request fails")] = 600.0
    scrape_s: Annotated[float, Meta(gt=0, description="seconds between two reads of the servers' metrics")] = 1.0
    seed: Annotated[int, Meta(description="of prompts, lengths and arrivals")] = 1
    out: Annotated[str, Meta(description="folder for the results; finished levels in it are not run again")] = (
        "bench-results"
    )
    overwrite: Annotated[bool, Meta(description="run levels again that are finished")] = False


_REFUSED = (
    BadSettings, BadEndpoint, BadTarget, BadResults, BadDataset, TraceError, ModelError, NoShortWord, LevelTooLarge
)  # fmt: skip
_OF_DYNAMO = "CONCURRENCIES"  # the variable that its sweep reads


def run(settings: SweepSettings) -> int:
    """Run the unfinished levels and print a table. Returns 1 if an endpoint or a request failed, 2 for bad flags."""
    sweep = None
    try:
        plan = plan_of(settings)
        sweep = Sweep(plan, lambda model: text_of(settings.tokenizer or model))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            healthy = runner.run(sweep.run())
        print_report(read_series([Path(settings.out) / each.name for each in sweep.measured]))
    except (*_REFUSED, Unhealthy, SweepFailed) as error:
        return fail("bench sweep", error, status=2 if isinstance(error, (BadSettings, BadEndpoint, BadTarget)) else 1)
    except KeyboardInterrupt:
        kept = f"finished levels are in {settings.out}, and the same command continues"
        print(f"stopped; {kept if sweep and sweep.measured else 'no level was finished'}", file=sys.stderr)
        return 130
    print(f"\nresults in {settings.out}; plots: penstock bench plot {settings.out}")
    return 0 if healthy else 1


def plan_of(settings: SweepSettings) -> Plan:
    """
    Raises:
        BadSettings: flags that do not fit together.
        BadEndpoint: an endpoint that cannot be used.
        TraceError: the trace cannot be read.
    """
    settings = _with_concurrencies(settings)
    loads = [flag for flag, given in (("--rate", settings.rate), ("--trace", settings.trace)) if given]
    if settings.dataset and loads:
        raise BadSettings(f"--dataset and {loads[0]} exclude each other: conversations are sent turn after turn")
    if settings.dataset and settings.api != "chat":
        raise BadSettings("--dataset needs --api chat")
    try:
        slo = slo_of(settings.slo)
    except BadSlo as error:
        raise BadSettings(str(error)) from None
    if slo is not None and not settings.stream and (slo.ttft or slo.itl):
        raise BadSettings("--slo of ttft and itl needs --stream; give latency=… instead")
    if settings.concurrency and loads:
        raise BadSettings(f"--concurrency and {loads[0]} exclude each other")
    if len(loads) > 1:
        raise BadSettings("--rate and --trace exclude each other")
    if settings.search and loads:
        raise BadSettings(f"--search changes the concurrency; it cannot be combined with {loads[0]}")
    workload = workload_of(settings)
    if workload.images and settings.api != "chat":
        raise BadSettings("images need --api chat")
    trace = None
    if settings.trace:
        trace = multiplied(read(Path(settings.trace)).limited(settings.requests), settings)
    endpoints = parse_endpoints(
        settings.endpoint, settings.metrics, settings.gpus, api_key=settings.api_key, insecure=settings.insecure
    )
    conversations = read_conversations(Path(settings.dataset)) if settings.dataset else []
    if settings.preset != "none" and PRESETS[settings.preset].up:
        print(f"preset {settings.preset}; a deployment for it: penstock up {PRESETS[settings.preset].up}")
    if conversations:
        turns = sum(len(each.turns) for each in conversations)
        print(f"asked for: {len(conversations):,} conversations with {turns:,} turns of {settings.dataset}")
    elif trace is None:
        print(f"asked for: {described(workload)}")
    return Plan(
        settings=settings,
        endpoints=tuple(endpoints),
        workload=workload,
        levels=tuple(levels_of(settings, len(trace.rows) if trace else 0)),
        extra=_extra(settings.extra_body),
        trace=trace,
        conversations=tuple(conversations),
        slo=slo,
    )


def _with_concurrencies(settings: SweepSettings) -> SweepSettings:
    """With the levels of the variable that Dynamo's sweep reads, unless a flag or our own variable names some."""
    text = os.environ.get(_OF_DYNAMO, "")
    if not text.strip() or settings.concurrency or settings.rate or settings.trace or settings.search:
        return settings
    parts = text.replace(",", " ").split()
    if not all(part.isdecimal() and 1 <= int(part) <= 8192 for part in parts):
        raise BadSettings(f"{_OF_DYNAMO}={text!r}: give numbers from 1 to 8192, or unset it and use --concurrency")
    print(f"levels from {_OF_DYNAMO}: {', '.join(parts)}")
    return msgspec.structs.replace(settings, concurrency=tuple(map(int, parts)))


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
        ModelError: it is not a directory, a bundled model or a model of the hub.
        NoShortWord: its tokenizer cannot meet lengths.
    """
    try:
        return TokenText(load_tokenizer(resolve(tokenizer)))
    except ModelError as error:
        raise ModelError(f"{error}; name the model's tokenizer with --tokenizer") from None
