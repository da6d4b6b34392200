"""Requests whose worker died, and that wait in routers for the next one, outlive the death of those routers.

No message in the log is theirs then: their job is that of the attempt that ended. Each test starts routers and workers
of its own beside a gateway, and takes 6 to 10 s: a router that starts waits 3.5 s before it takes a worker for lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from penstock.gateway.base.event_stream import COMMENT
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.connection import connect as open_bus
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.state.snapshots import Snapshots
from penstock.schemas import jobs
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.conftest import Connect
from tests.pipeline.fleet.test_no_store import PATH, body
from tests.pipeline.support import MODEL, Oracle, Process, ending, free_port, joined, parse_sse, until
from tests.pipeline.test_no_store_restart import begun

pytestmark = pytest.mark.timeout(120)

TOKENS = 120  # about 12 ms each
OFTEN, NEVER = 0.1, 3600.0  # seconds between two snapshots


class Fleet:
    """A broker, a gateway, and routers and workers that come and go."""

    def __init__(self, server: EmbeddedNats, bus: Bus, home: Path, http_port: int) -> None:
        self.bus = bus
        self.url = f"http://127.0.0.1:{http_port}"
        self._server = server
        self._home = home
        self._started: list[Process] = []
        self._alive: dict[str, Process] = {}

    async def start(self, role: str, name: str, *flags: str, says: str, **more: str) -> Process:
        log = self._home / f"{name}-{len(self._started)}.log"
        role_url = self._server.url(role)
        made = Process(log, role, "--log-format", "json", "--name", name, *flags, nats_url=role_url, **more)
        self._started.append(made)
        self._alive[name] = made
        await asyncio.to_thread(made.wait_for, says)
        return made

    async def routers(self, *names: str, snapshot_s: float) -> None:
        more = {"module": "tests.pipeline.saving_router", "SNAPSHOT_S": str(snapshot_s)}
        sys_url = self._server.sys_url
        started = (self.start("router", name, "--sys-nats-url", sys_url, says="router_open", **more) for name in names)
        await asyncio.gather(*started)

    async def worker(self) -> None:
        flags = ("--engine", "mock", "--mock-speedup", "0.5", "--model", str(MODEL))
        await self.start("worker", "worker", *flags, says="worker_registered")

    def kill(self, *names: str) -> None:
        for name in names:
            self._alive.pop(name).kill()

    async def requeued(self, name: str, requests: set[str]) -> None:
        """Until a router holds the requests for their second attempt."""
        log = self._alive[name].log

        async def all_are() -> bool:
            lines = [line for line in log.read_text().splitlines() if '"request_requeued"' in line]
            return all(any(request in line for line in lines) for request in requests)

        await until(all_are, f"router {name} holds the requests")

    async def saved(self, name: str, requests: set[str]) -> None:
        """Until a router's snapshot knows that the first attempts have ended.

        It is stored when something has come into the logs: here the end of a request whose client goes away.
        """
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(PATH, json=body(99), timeout=0.3)

        async def knows() -> bool:
            found = await Snapshots(self.bus, name).load()
            return found is not None and {(request, 1) for request in requests} <= set(found[1].closed)

        await until(knows, f"router {name} has stored that the first attempts ended")

    async def owner(self, *names: str) -> str:
        """The router that placed the jobs so far."""
        stream, subject = self.bus.subjects.stream("WORK"), self.bus.subjects.all("work")
        found = [jobs.decode(entry.data) async for entry in read(self.bus, stream, subject)]
        by = {job.decision.router.rpartition("-")[0] for job in found if isinstance(job, jobs.Job)}
        assert len(by) == 1
        assert by <= set(names)
        return by.pop()

    def stop(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
async def fleet(make_broker: Callable[..., EmbeddedNats], connect: Connect, tmp_path: Path) -> AsyncIterator[Fleet]:
    server = make_broker()
    await server.start()
    await apply(await connect(server), topology(Subjects("ps")))
    bus = await open_bus(server.url("operator"), role="operator", name="test")
    made = Fleet(server, bus, tmp_path, port := free_port())
    flags = ("--http-port", str(port), "--model", str(MODEL), "--list-requests")
    try:
        await asyncio.gather(made.start("gateway", "gateway", *flags, says="gateway_listening"), made.worker())
        yield made
    finally:
        made.stop()
        await bus.close()


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(f"{each} a snapshot", marks=pytest.mark.slow) for each in ("before", "after")),
        "another router took over",
    ],
)
async def test_requests_that_wait_for_their_next_attempt_outlive_all_routers(
    fleet: Fleet, oracle: Oracle, way: str
) -> None:
    snapshot_s = NEVER if way == "before a snapshot" else OFTEN
    await fleet.routers("a", "b", snapshot_s=snapshot_s)
    asked = [body(number, max_tokens=TOKENS, no_store=number == 2) for number in range(3)]
    async with httpx.AsyncClient(base_url=fleet.url, trust_env=False, timeout=60) as http:
        running = [await begun(http, each) for each in asked]
        requests = {request_id for request_id, _ in running}
        holder = await fleet.owner("a", "b")
        other = "b" if holder == "a" else "a"
        fleet.kill("worker")
        await fleet.requeued(holder, requests)
        if way == "another router took over":
            fleet.kill(holder)
            holder, other = other, holder
            await fleet.requeued(holder, requests)
        if way == "before a snapshot":
            fleet.kill(holder, other)
            await fleet.routers("a", "b", snapshot_s=snapshot_s)
        else:
            await fleet.saved(holder, requests)
            fleet.kill(holder)
            if way == "after a snapshot":
                fleet.kill(other)
            await fleet.routers(holder, snapshot_s=snapshot_s)
        await fleet.worker()
        answers = [(await task).replace(COMMENT, b"") for _, task in running]
    assert [joined(parse_sse(answer)) for answer in answers] == [oracle.answer(each, TOKENS) for each in asked]
    for request_id in requests:
        _, event = await ending(fleet.bus, request_id)
        assert (event.code, event.attempt) == ("", 2)
