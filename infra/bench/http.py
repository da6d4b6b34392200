"""``penstock bench http``: closed-loop load on any OpenAI-compatible URL, and what it costs each process."""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from infra.bench.answers import Connection, Tally
from infra.bench.cpu import cpu_of, own_seconds
from infra.bench.http_report import Stage, figures, report
from infra.launch.http import get
from infra.launch.state import read_state

_RECONNECT_S = 0.05
_STUCK_S = 60.0
_SHOW_S = 0.25
WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body information
back parent face others level office door health person art war history party result change morning reason research
girl guy moment air teacher force education""".split()  # noqa: SIM905 - as a list it would be a page


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench http``."""

    url: Annotated[str, Meta(description="server, with or without /v1; default: the one in --state")] = ""
    model: Annotated[str, Meta(description="model to ask; default: the first of /v1/models")] = ""
    api_key: Annotated[str, Meta(description="bearer token, if the server requires one")] = ""
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...], Meta(description="connections, one stage for each number")
    ] = (
        1,
        16,
        64,
    )
    requests: Annotated[int, Meta(ge=0, description="requests per stage; 0: as many as --duration-s allows")] = 0
    duration_s: Annotated[float, Meta(gt=0, description="seconds per stage")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, description="seconds before each stage that are not measured")] = 1.0
    prompt_words: Annotated[int, Meta(ge=1, description="words per prompt")] = 200
    shared_prefix: Annotated[float, Meta(ge=0, le=1, description="share of each prompt common to all")] = 0.5
    output_tokens: Annotated[int, Meta(ge=1, description="tokens per answer; fewer or more count as an error")] = 64
    stream: Annotated[bool, Meta(description="stream answers as server-sent events")] = True
    ignore_eos: Annotated[bool, Meta(description="ask for exactly --output-tokens (an extension)")] = True
    seed: Annotated[int, Meta(description="seed of the words")] = 1
    state: Annotated[str, Meta(description="state.json of the deployment to load and measure")] = ""
    pids: Annotated[tuple[int, ...], Meta(description="process ids to measure as well")] = ()
    json: Annotated[str, Meta(description="file to write the figures to")] = ""


class BenchFailed(Exception):
    """The benchmark cannot run as asked."""


def run(settings: Settings) -> int:
    """Measure all stages, print a table; 1 if a request failed."""
    try:
        target, processes = _target(settings)
        with contextlib.ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner(loop_factory=_loop_factory()))
            stages = runner.run(_measure(settings, target, processes))
    except BenchFailed as error:
        print(f"penstock bench http: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report(stages, processes)
    if settings.json:
        figures = {"settings": settings, "stages": stages}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return 1 if any(stage.failed for stage in stages) else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    prefix: str  # of the path, without /v1


def _target(settings: Settings) -> tuple[Target, dict[str, int]]:
    """Where to send, and the processes to measure (name -> pid)."""
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
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    if not parts.hostname:
        raise BenchFailed("name the server: --url http://127.0.0.1:8000 or --state .penstock/state.json")
    if parts.scheme != "http":
        raise BenchFailed(f"--url {url}: only http")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or 80, prefix), processes


class Requests:
    """Makes request bytes: the same for the same seed."""

    def __init__(self, settings: Settings, target: Target, model: str) -> None:
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
        key = f"Authorization: Bearer {settings.api_key}\r\n" if settings.api_key else ""
        self._head = (
            f"POST {target.prefix}/v1/chat/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n{key}"
            "Content-Type: application/json\r\nAccept: */*\r\nContent-Length: "
        )

    def make(self) -> bytes:
        prompt = " ".join([self._shared, *self._random.choices(WORDS, k=self._own)])
        body = f"{self._before}{prompt}{self._after}"
        return f"{self._head}{len(body)}\r\n\r\n{body}".encode()


@dataclass(slots=True)
class Load:
    """One stage under way."""

    requests: Requests
    target: Target
    settings: Settings
    concurrency: int
    tally: Tally = field(default_factory=Tally)
    warming: Tally = field(default_factory=Tally)
    counting: bool = False
    ended: bool = False
    sent: int = 0
    open: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def following(self) -> tuple[bytes, Tally] | None:
        """What a connection sends next, and where it is counted."""
        if self.finished:
            return None
        if self.settings.requests and not self.counting:
            return self.requests.make(), self.warming
        self.sent += 1
        return self.requests.make(), self.tally

    def count(self) -> None:
        """The warm-up is over. For a duration, what is answered from now on counts, whenever it was sent."""
        self.counting = True
        self.tally.clear()

    def lost(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.idle.set()

    async def connect(self) -> None:
        """Open one connection; it drives itself from then on."""
        loop = asyncio.get_running_loop()
        expected = self.settings.output_tokens
        self.open += 1
        self.idle.clear()
        try:
            await loop.create_connection(
                lambda: Connection(self.following, expected, self.lost), self.target.host, self.target.port
            )
        except OSError as error:
            (self.tally if self.counting else self.warming).fail(f"no connection: {error.strerror or error}")
            self.lost()

    @property
    def finished(self) -> bool:
        limit = self.settings.requests
        return self.ended or bool(self.counting and limit and self.sent >= limit)


async def _measure(settings: Settings, target: Target, processes: Mapping[str, int]) -> list[Stage]:
    model = settings.model or await _first_model(target)
    requests = Requests(settings, target, model)
    stages = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread that takes time from the load
        disable=not sys.stderr.isatty(),
    )
    with bar:
        for concurrency in settings.concurrency:
            stages.append(await _stage(Load(requests, target, settings, concurrency), processes, bar))
    return stages


async def _stage(load: Load, processes: Mapping[str, int], bar: Progress) -> Stage:
    line = bar.add_task(f"{load.concurrency} connections", total=1.0, state="warming up")
    bar.refresh()
    for _ in range(load.concurrency):
        await load.connect()
    keep = asyncio.create_task(_reconnect(load), name="reconnect")
    await asyncio.sleep(load.settings.warm_up_s)
    load.count()
    cpu, own, began = cpu_of(processes.values()), own_seconds(), time.perf_counter()
    await _watch(
        load, began, lambda done, rate: bar.update(line, completed=done, state=f"{rate:.0f} req/s", refresh=True)
    )
    # For a duration, what is still under way would be measured under falling load: it does not count.
    seconds, counted = time.perf_counter() - began, load.tally.copy()
    after = cpu_of(processes.values())
    spent = {name: after[pid] - cpu[pid] for name, pid in processes.items()}
    own = own_seconds() - own
    if not counted.requests and not counted.failed:
        counted.fail("no request was answered in time")
    load.ended = True
    keep.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keep
    if load.open:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STUCK_S):
                await load.idle.wait()
    return figures(load.concurrency, seconds, counted, spent, own)


async def _watch(load: Load, began: float, show: Callable[[float, float], None]) -> None:
    """Wait until the stage's time is over or its requests are answered, and show how far it is."""
    settings = load.settings
    answered, since = -1, began
    while True:
        now = time.perf_counter()
        took, count = now - began, load.tally.requests + load.tally.failed
        show(
            min(1.0, count / settings.requests if settings.requests else took / settings.duration_s),
            count / max(took, 1e-9),
        )
        if settings.requests:
            if load.finished and not load.open:
                return
            answered, since = (count, now) if count != answered else (answered, since)
            if now - since > _STUCK_S:
                load.tally.fail(f"no answer within {_STUCK_S:.0f} s")
                return
        elif took >= settings.duration_s:
            return
        left = _SHOW_S if settings.requests else min(_SHOW_S, settings.duration_s - took)
        if load.open:
            load.idle.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await load.idle.wait()
                if not load.finished:
                    await asyncio.sleep(_RECONNECT_S)  # nobody is connected: time to reconnect


async def _reconnect(load: Load) -> None:
    """Replace connections that the server closed."""
    while True:
        await asyncio.sleep(_RECONNECT_S)
        for _ in range(load.concurrency - load.open):
            if not load.finished:
                await load.connect()


async def _first_model(target: Target) -> str:
    status, body = await get(target.host, target.port, f"{target.prefix}/v1/models", timeout_s=10.0)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        where = f"http://{target.host}:{target.port}"
        if not status:
            raise BenchFailed(f"no server answers at {where}: start one, or correct --url") from None
        said = body[:200].decode(errors="replace")
        raise BenchFailed(f"{where}{target.prefix}/v1/models names no model: {said}; name it with --model") from None
