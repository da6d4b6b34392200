"""``/health/ready`` is 200 if and only if a request could be served, and names everything that is missing.

The tests share a broker and a gateway: the first one begins without routers and workers, the last one ends the gateway.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from tests.conftest import outside
from tests.pipeline.support import MODEL, Process, free_port, stopped, until

pytestmark = pytest.mark.timeout(180)

NO_ROUTER = "no router takes requests; start one with 'penstock router'"
NO_WORKER = "no worker serves 'tiny'; start one with 'penstock worker'"
NO_BROKER = "the broker is not connected"
STOPPING = "this gateway is shutting down"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "one two three", "max_tokens": 3, "ignore_eos": True}


class Parts:
    """A broker and a gateway; routers and workers are started by tests."""

    def __init__(self, home: Path, broker: EmbeddedNats) -> None:
        self.broker = broker
        self._home = home
        self._count = 0
        self._started: dict[Process, str] = {}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = self.start("gateway", "--http-port", str(port), "--model", str(MODEL), "--drain-s", "20")
        self.gateway.wait_for("gateway_listening")

    def start(self, role: str, *flags: str) -> Process:
        """From the main thread: a process ends with the thread that has started it."""
        self._count += 1
        log = self._home / f"{role}-{self._count}.log"
        process = Process(log, role, "--log-format", "json", *flags, nats_url=self.broker.url(role))
        self._started[process] = role
        return process

    async def worker(self, name: str = "tiny") -> Process:
        """About 30 ms per token."""
        mock = ("--engine", "mock", "--mock-speedup", "0.2", "--model", str(MODEL), "--served-model-name", name)
        process = self.start("worker", *mock)
        await asyncio.to_thread(process.wait_for, "worker_registered")
        return process

    async def router(self) -> Process:
        process = self.start("router")
        await asyncio.to_thread(process.wait_for, "router_open")
        return process

    async def running(self, role: str) -> Process:
        """The newest process of a role; it is started if there is none."""
        there = [process for process, its in self._started.items() if its == role]
        if there:
            return there[-1]
        return await (self.router() if role == "router" else self.worker())

    async def stop(self, *processes: Process) -> None:
        await stopped(processes or list(self._started)[::-1])
        for process in processes or list(self._started):
            del self._started[process]

    async def kill(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        await self.ended(process)

    async def ended(self, process: Process) -> int:
        """Its exit status."""
        status = await asyncio.to_thread(process.wait)
        del self._started[process]
        return status


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    home = tmp_path_factory.mktemp("parts")
    broker = EmbeddedNats(home / "nats")
    outside(broker.start())
    try:
        outside(apply_at(broker.url("operator"), broker.subjects))
        parts = Parts(home, broker)
        try:
            yield parts
        finally:
            outside(parts.stop())
    finally:
        broker.kill()
        outside(broker.stop())


@pytest.fixture
async def worker(parts: Parts, http: httpx.AsyncClient) -> Process:
    """Of the gateway's model, beside a router: the gateway is ready."""
    _, worker = await asyncio.gather(parts.running("router"), parts.running("worker"))
    await becomes(http)
    return worker


@pytest.fixture
async def http(parts: Parts) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=parts.url, trust_env=False, timeout=30) as made:
        yield made


async def becomes(http: httpx.AsyncClient, *reasons: str, within_s: float = 30.0) -> None:
    """Wait until these are the reasons why the gateway is not ready; none: it is ready."""
    seen: list[Any] = []

    async def so() -> bool:
        answer = await http.get("/health/ready")
        found = answer.json()
        assert (answer.status_code, found["status"]) == ((503, "not ready") if found["reasons"] else (200, "ready"))
        seen[:] = found["reasons"]
        return seen == list(reasons)

    try:
        await until(so, "readiness", within_s)
    except AssertionError:
        raise AssertionError(f"the reasons stay {seen}, not {list(reasons)}") from None


async def components(http: httpx.AsyncClient) -> tuple[int, dict[str, str]]:
    """The status of ``/health``, and of each component why it is not ready."""
    answer = await http.get("/health")
    body = answer.json()
    assert {"/v1/chat/completions", "/v1/models/{name}"} < set(body["endpoints"])
    assert len(set(body["endpoints"])) == len(body["endpoints"])
    return answer.status_code, {each["name"]: each.get("reason", "") for each in body["components"]}


async def served(http: httpx.AsyncClient) -> int:
    return (await http.post("/v1/completions", json=BODY)).status_code


@asynccontextmanager
async def begun(http: httpx.AsyncClient) -> AsyncIterator[asyncio.Task[str]]:
    """What is left of a stream of seconds that a worker has begun."""
    async with http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 150, "stream": True}) as answer:
        texts = answer.aiter_text()
        await anext(texts)
        rest = asyncio.create_task(joined(texts))
        try:
            yield rest
        finally:
            rest.cancel()


async def joined(texts: AsyncIterator[str]) -> str:
    return "".join([text async for text in texts])


async def test_a_gateway_is_ready_once_a_router_and_a_worker_of_its_model_are_there(
    parts: Parts, http: httpx.AsyncClient
) -> None:
    await becomes(http, NO_ROUTER, NO_WORKER)
    assert await components(http) == (503, {"gateway": "", "broker": "", "routers": "none takes requests"})
    router, another = await asyncio.gather(parts.router(), parts.worker("another"))
    await becomes(http, NO_WORKER)  # a worker of another model does not help
    worker = await parts.worker()
    await becomes(http)
    status, found = await components(http)
    assert status == 200
    assert sorted(found.values()) == ["", "", "", "", "it serves 'another', this gateway 'tiny'"]
    assert [(await http.get(path)).status_code for path in ("/ping", "/version")] == [200, 200]
    assert await served(http) == 200

    await parts.kill(worker)
    await becomes(http, NO_WORKER)
    await parts.worker()
    await becomes(http)
    await parts.stop(router)
    await becomes(http, NO_ROUTER)
    await parts.kill(await parts.router())
    await becomes(http, NO_ROUTER)
    await parts.router()
    await becomes(http)
    assert await served(http) == 200
    await parts.stop(another)


async def test_a_worker_that_drains_makes_nobody_ready(parts: Parts, http: httpx.AsyncClient, worker: Process) -> None:
    async with begun(http) as rest:
        worker.ask_to_stop()
        await becomes(http, NO_WORKER)
        assert not rest.done()  # it still answers what it has begun
        assert "data: [DONE]" in await rest
    assert await parts.ended(worker) == 0


async def test_without_its_broker_a_gateway_is_not_ready_and_is_again_when_it_is_back(
    parts: Parts, http: httpx.AsyncClient, worker: Process
) -> None:
    parts.broker.kill()
    await parts.broker.wait()
    await becomes(http, NO_BROKER)
    assert (await http.get("/health/live")).status_code == 200
    await parts.broker.start()
    await becomes(http, within_s=30)
    assert await served(http) == 200


async def test_a_gateway_that_drains_is_not_ready_on_the_connections_that_it_still_has(
    parts: Parts, http: httpx.AsyncClient, worker: Process
) -> None:
    async with begun(http) as rest:
        await becomes(http)  # on a second connection, which stays
        parts.gateway.ask_to_stop()
        await asyncio.to_thread(parts.gateway.wait_for, "gateway_stopping")
        answer = await http.get("/health/ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, [STOPPING])
        assert "data: [DONE]" in await rest
    assert await parts.ended(parts.gateway) == 0
