"""Whole deployments as real processes, what their mock engines must answer, and how their streams are read."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.infra.model import modeldir
from penstock.infra.process.child import die_with_parent
from penstock.infra.process.sockets import bind
from penstock.launch.state import DeploymentState, read_state
from penstock.log_tools.timeline.read import read_timeline
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.schemas import fleet, requests
from penstock.schemas.done import Done
from penstock.schemas.requests import GenerateRequest, Sampling
from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.mock.executor import GREEDY, MockVocabulary, expected_tokens

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "tiny"
MODEL_NAME = "tiny"
START_S = 60.0
STOP_S = 30.0


async def until(holds: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """What ``holds`` (a coroutine function) returns, once it is true."""
    found = None
    try:
        async with asyncio.timeout(within_s):
            while not (found := await holds()):  # noqa: ASYNC110 - the far end is another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None
    return found


def free_port() -> int:
    """A port for a server that a test starts.

    Until the tests end, a socket is bound to it that does not listen: the kernel gives the port to nothing else, while
    a server with SO_REUSEADDR can listen on it.
    """
    held = bind("127.0.0.1", 0)
    port: int = held.getsockname()[1]
    held.detach()
    return port


class Process:
    """A ``penstock`` command in a process that ends with the tests, whatever happens to them."""

    def __init__(self, log: Path, *argv: str, nats_url: str = "", module: str = "penstock", **variables: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"} | variables
        if nats_url:
            environ["PENSTOCK_NATS_URL"] = nats_url
        self.log = log
        self._asked = False
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=environ,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    @property
    def pid(self) -> int:
        """Also the session of all that it starts."""
        return self._process.pid

    def wait_for(self, text: str, within_s: float = START_S) -> None:
        """Until the process has said ``text``."""
        deadline = time.monotonic() + within_s
        while text not in (said := self.log.read_text(errors="replace")):
            assert self._process.poll() is None, f"ended with status {self._process.returncode}:\n{said}"
            assert time.monotonic() < deadline, f"does not say {text!r}:\n{said}"
            time.sleep(0.05)

    def ask_to_stop(self) -> None:
        self._asked = True
        self._process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = STOP_S) -> int:
        """Until it ends by itself; the exit status."""
        return self._process.wait(within_s)

    def kill(self) -> None:
        """SIGKILL, if it still runs. Without it, a later test would fail with the warning of a process left behind."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM, unless that was sent; the exit status."""
        if not self._asked:
            self.ask_to_stop()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
            raise


async def _started(processes: list[Process], said: str) -> list[Process]:
    """Not on the event loop: the broker cuts off who does not answer its pings for 2 s."""
    await asyncio.gather(*(asyncio.to_thread(process.wait_for, said) for process in processes))
    return processes


async def stopped(processes: Sequence[Process]) -> list[int]:
    """Stop them at once; their exit statuses."""
    return list(await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes)))


class Deployment:
    """One ``penstock up``, with ports and data of its own; ``variables`` of its environment."""

    def __init__(self, home: Path, *flags: str, module: str = "penstock", **variables: str) -> None:
        self.home = home
        self.data_dir = home / "data"
        self._others: list[Process] = []
        self._up = Process(
            home / "up.log",
            *("up", "--engine", "mock", "--http-port", "0", "--data-dir", str(self.data_dir), "--drain-s", "3"),
            *("--gateways", "1", "--cells", "1"),  # on any machine
            *("--log-format", "text", "--dashboard-port", "-1", *flags),
            module=module,
            **variables,
        )
        self._up.wait_for("(ready after")

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._up.pid

    @property
    def state(self) -> DeploymentState:
        return read_state(self.data_dir / "state.json")

    @property
    def urls(self) -> tuple[str, ...]:
        """Of its gateways."""
        return self.state.http_urls

    def also(self, role: str, *flags: str, **variables: str) -> Process:
        """One more process of a role on this deployment's broker; ``variables`` of its environment."""
        log = self.home / f"{role}-{len(self._others) + 1}.log"
        made = Process(log, role, "--log-format", "json", *flags, nats_url=self.state.nats_url, **variables)
        self._others.append(made)
        return made

    async def also_workers(self, *flags: str, count: int = 1) -> list[Process]:
        """Further mock workers that take no time; returns when they are registered."""
        mock = ("--engine", "mock", "--mock-speedup", "0", "--model", str(MODEL))
        return await _started([self.also("worker", *mock, *flags) for _ in range(count)], "worker_registered")

    async def also_routers(self, *modes: str, flags: Sequence[str] = ()) -> list[Process]:
        """Further routers; returns when they take requests."""
        routers = [self.also("router", "--mode", mode, "--name", f"extra-{mode}", *flags) for mode in modes]
        return await _started(routers, "router_open")

    async def command(self, *argv: str) -> tuple[int, str, str]:
        """Run a ``penstock`` command on the data folder: its exit status, standard output and standard error."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *argv, "--data-dir", str(self.data_dir)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.home,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"},
        )
        async with asyncio.timeout(60):
            out, errors = await process.communicate()
        return process.returncode or 0, out.decode(), errors.decode()

    async def json_lines(self, *argv: str) -> list[dict[str, Any]]:
        """What a command prints with ``--json``."""
        return [json.loads(line) for line in (await self.command(*argv, "--json"))[1].splitlines()]

    def logs(self, prefix: str = "") -> str:
        return "\n".join(path.read_text(errors="replace") for path in (self.data_dir / "logs").glob(f"{prefix}*.log"))

    def killed(self) -> list[str]:
        """What its supervisor said of processes that did not end when they were asked to."""
        return [line for line in self._up.log.read_text(errors="replace").splitlines() if "process_killed" in line]

    def wait(self) -> int:
        """Until the supervisor has ended; its exit status."""
        return self._up.wait()

    def ask_to_stop(self) -> None:
        self._up.ask_to_stop()

    def stop(self) -> int:
        for process in self._others:
            process.kill()
        return self._up.stop()


def bus_of(deployment: str) -> Any:
    """A fixture: an operator's connection to the broker of the deployment that is the fixture ``deployment``."""

    @pytest.fixture
    async def made(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
        found: Deployment = request.getfixturevalue(deployment)
        async with await connect(found.state.nats_url, role="operator", name="test") as bus:
            yield bus

    return made


def http_of(deployment: str) -> Any:
    """A fixture: plain HTTP to the first gateway of the deployment that is the fixture ``deployment``."""

    @pytest.fixture
    async def made(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
        found: Deployment = request.getfixturevalue(deployment)
        async with httpx.AsyncClient(base_url=found.urls[0], trust_env=False, timeout=60) as client:
            yield client

    return made


async def ok(asked: Awaitable[httpx.Response]) -> httpx.Response:
    """The answer, whose status is 200."""
    answer = await asked
    assert answer.status_code == 200, answer.text
    return answer


# -- what the mock engine answers ---------------------------------------------------------------------------------


class Oracle:
    """What every worker must answer, computed from the mock's definition without an engine."""

    def __init__(self, path: Path = MODEL) -> None:
        self.model = modeldir.load(path)
        tokenizer = self.model.tokenizer
        texts = tokenizer.decode_batch([[token] for token in range(self.model.vocab_size)])
        silent = {token for token, text in enumerate(texts) if not text or "\ufffd" in text}
        self.vocabulary = MockVocabulary(self.model.vocab_size, silent | set(self.model.eos_token_ids))

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """Token ids of a body's prompt."""
        tokenizer = self.model.tokenizer
        if "messages" in body:
            assert self.model.template is not None
            ids = tokenizer.encode(self.model.template.render(body["messages"], None), add_special_tokens=False).ids
        elif isinstance(body["prompt"], str):
            ids = tokenizer.encode(body["prompt"]).ids
        else:
            ids = body["prompt"]
        return list(ids)

    def tokens(self, body: dict[str, Any], count: int, choice: int = 0, **more: Any) -> list[int]:
        sampling = GREEDY
        if body.get("temperature", 1.0):
            sampling = Sampling(temperature=1.0, seed=body["seed"])
        return expected_tokens(self.prompt(body), count, self.vocabulary, sampling=sampling, choice=choice, **more)

    def scores(self, body: dict[str, Any], top: int) -> list[Logprob]:
        """Log-probabilities of the prompt's tokens from the second on."""
        prompt = self.prompt(body)
        known = [pack_tokens(prompt[:at]) for at in range(len(prompt))]
        return [self.vocabulary.score(crc32(known[at]), prompt[at], top) for at in range(1, len(prompt))]

    def text(self, tokens: Sequence[int]) -> str:
        decoded: str = self.model.tokenizer.decode(list(tokens))
        return decoded

    def answer(self, body: dict[str, Any], count: int, choice: int = 0) -> str:
        return self.text(self.tokens(body, count, choice))


def words(count: int, seed: int = 0) -> str:
    """Text that no other prompt of the run begins with, if ``seed`` is used once."""
    return f"{seed} " + " ".join(f"word{(seed * 7919 + i * 31) % 9973}" for i in range(count))


def token_prompt(count: int, seed: int) -> list[int]:
    """A prompt of exactly ``count`` tokens that shares no beginning with any other seed's."""
    return random.Random(seed).choices(range(4000), k=count)


def described(entries: Sequence[dict[str, Any] | None], prompt: Sequence[int], top: int) -> list[Logprob]:
    """``prompt_logprobs`` of an answer as what an engine said."""
    assert entries[0] is None
    found = []
    for entry, token in zip(entries[1:], prompt[1:], strict=True):
        assert entry is not None
        ranked = sorted((value["rank"], int(known), value["logprob"]) for known, value in entry.items())
        own = entry[str(token)]
        best = tuple((known, value) for rank, known, value in ranked if rank <= top)
        found.append(Logprob(own["logprob"], best, own["rank"]))
    return found


# -- streams ------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One server-sent event."""

    id: str
    data: str

    @property
    def body(self) -> Any:
        return msgspec.json.decode(self.data)


def parse_sse(raw: bytes) -> list[Event]:
    """Events of a whole stream; each must be one optional id line and one data line."""
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == "", f"the stream ends within an event: {rest!r}"
    events = []
    for block in blocks:
        *head, data = block.split("\n")
        assert len(head) <= 1
        assert all(line.startswith("id: ") for line in head)
        assert data.startswith("data: ")
        events.append(Event(head[0].removeprefix("id: ") if head else "", data.removeprefix("data: ")))
    return events


def joined(events: Sequence[Event], choice: int = 0) -> str:
    """The text that a stream shows for one choice."""
    text = ""
    for event in events:
        if event.data != "[DONE]":
            for part in event.body["choices"]:
                if part["index"] == choice:
                    text += part["text"] if "text" in part else part["delta"].get("content", "")
    return text


# -- looking into a deployment ------------------------------------------------------------------------------------


async def ending(bus: Bus, request_id: str, within_s: float = 30.0) -> tuple[RequestTimeline, Done]:
    """The timeline of a request, once it has its terminal event; there must be exactly one."""

    async def ended() -> RequestTimeline | None:
        try:
            found = await read_timeline(bus, request_id)
        except ValueError:
            return None
        return found if found.done is not None else None

    timeline: RequestTimeline = await until(ended, f"terminal event of {request_id}", within_s)
    stream, subjects = bus.subjects.stream("DONE"), bus.subjects
    ends = [entry async for entry in read(bus, stream, subjects.done_of(request_id))]
    assert len(ends) == 1
    assert timeline.done is not None
    return timeline, timeline.done


async def accepted(bus: Bus, user: str) -> list[GenerateRequest]:
    """The requests in the log whose body said this "user"."""
    stream, subject = bus.subjects.stream("REQUESTS"), bus.subjects.all("request")
    found = [requests.decode(entry.data) async for entry in read(bus, stream, subject)]
    return [request for request in found if request.user == user]


async def registrations(bus: Bus) -> dict[str, fleet.Registration]:
    """The registered workers' latest renewals."""
    bucket = bus.subjects.bucket("workers")
    found: dict[str, fleet.Registration] = {}
    async for entry in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        worker = entry.subject.rpartition(".")[2]
        if entry.data and "KV-Operation" not in entry.headers:
            found[worker] = fleet.decode(entry.data)
        else:
            found.pop(worker, None)
    return found


async def idle_workers(bus: Bus) -> bool:
    """Whether every registered worker says that it holds nothing."""
    loads = [registration.load for registration in (await registrations(bus)).values()]
    return bool(loads) and all(not (load.running or load.waiting or load.used_blocks) for load in loads)


AUTOMATIC = ("namespace", "component", "process", "model", "role")


def samples(text: str) -> dict[str, float]:
    """A metrics page as {name{label="value",...}: value}, without the labels that a process sets automatically: the sum
    over the models of a gateway."""

    def named() -> Iterator[tuple[str, float]]:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(
                    f'{key}="{value}"' for key, value in sorted(sample.labels.items()) if key not in AUTOMATIC
                )
                yield (f"{sample.name}{{{labels}}}" if labels else sample.name), sample.value

    found: dict[str, float] = {}
    for name, value in named():
        found[name] = found.get(name, 0.0) + value
    return found


async def metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        answer = await client.get(url + "/metrics")
    assert answer.status_code == 200
    return samples(answer.text)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to a gateway; leaving closes it, whatever is still on its way."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
