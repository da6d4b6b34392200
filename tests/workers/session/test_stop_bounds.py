"""A worker process that is asked to stop is gone in time, whatever it waits for; asked twice, at once."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import TINY
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import control, fleet, wire
from penstock.schemas.jobs import Stage
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from penstock.workers.runners import token_backend as module
from penstock.workers.session.process import GRACE_S, Stopping, WorkerProcess
from tests.conftest import Connect
from tests.infra.bus.support import eventually
from tests.pipeline.support import Process
from tests.workers.support import LogClient, engine, request

DRAIN_S = 1
BOUND_S = DRAIN_S + GRACE_S + 1.5  # and what the interpreter and a loaded machine take
DEMO = "demo-vision"


def start(server: EmbeddedNats, home: Path, role: str, namespace: str = "ps", *flags: str, drain_s: int = 1) -> Process:
    model = ("--model", DEMO) if role == "encode" else ("--model", str(TINY), "--served-model-name", "tiny")
    return Process(
        home / f"{role}.log",
        *("worker", "--role", role, "--engine", "mock", *model, "--namespace", namespace),
        *("--drain-s", str(drain_s), "--log-format", "json", *flags),
        nats_url=server.url("operator"),
    )


async def ends(process: Process, within_s: float = BOUND_S) -> tuple[int, float]:
    """The exit status, and how long it took from SIGTERM on."""
    began = time.monotonic()
    process.ask_to_stop()
    status = await asyncio.to_thread(process.wait, within_s)
    return status, time.monotonic() - began


async def taken(log: LogClient, worker: str) -> None:
    """Until it has a job."""
    stream = log.bus.subjects.stream("WORK")

    async def pending() -> bool:
        info = await log.bus.js.consumer_info(stream, worker)
        return bool(info.num_ack_pending)

    deadline = time.monotonic() + 10
    while not await pending():
        assert time.monotonic() < deadline


async def registered(log: LogClient, process: Process) -> str:
    await asyncio.to_thread(process.wait_for, "worker_registered")
    await eventually(lambda: log.registrations and log.registrations[-1][1] is not None)
    return log.registrations[-1][0]


async def test_workers_of_all_roles_end_in_time_without_a_broker(
    make_broker: Callable[..., EmbeddedNats], connect: Connect, tmp_path: Path
) -> None:
    server = make_broker()
    await server.start()
    await apply(await connect(server), topology(Subjects("ps")))
    workers = [start(server, tmp_path, role) for role in ("aggregated", "prefill", "decode", "encode")]
    await asyncio.gather(*(asyncio.to_thread(each.wait_for, "worker_registered") for each in workers))
    server.kill()
    await asyncio.gather(*(asyncio.to_thread(each.wait_for, "bus_disconnected") for each in workers))
    found = await asyncio.gather(*(ends(each) for each in workers))
    assert [status for status, _ in found] == [0] * 4, found


async def test_an_engine_in_a_long_step_is_not_waited_for(broker: EmbeddedNats, log: LogClient, tmp_path: Path) -> None:
    namespace = log.bus.subjects.namespace
    process = start(broker, tmp_path, "aggregated", namespace, "--mock-speedup", "0.0001")
    worker = await registered(log, process)
    asked = request(list(range(1, 500)), model="tiny")
    await log.send_job(worker, asked)
    await taken(log, worker)
    status, _ = await ends(process)
    assert status == 0
    assert (await log.handed_back(asked)).reason == "draining"
    assert log.registered(worker) is None


@pytest.mark.parametrize("released", [False, True])
async def test_a_lease_that_nobody_releases_is_waited_for_as_long_as_the_drain_and_orders_are_obeyed_until_then(
    broker: EmbeddedNats, log: LogClient, tmp_path: Path, released: bool
) -> None:
    namespace = log.bus.subjects.namespace
    flags = ("--mock-speedup", "0")
    process = start(broker, tmp_path, "prefill", namespace, *flags, drain_s=20 if released else DRAIN_S)
    worker = await registered(log, process)
    asked = request(list(range(1, 200)), model="tiny")
    await log.send_job(worker, asked, role="prefill", route=(Stage("decode", "nobody"),))
    await log.states(asked, "offered")
    if not released:
        status, took = await ends(process)
        assert (status, took > DRAIN_S) == (0, True)
        return
    process.ask_to_stop()
    await asyncio.to_thread(process.wait_for, "draining")
    order = control.Release(f"{asked.id}:1:decode", "nobody")
    reply = await log.bus.nc.request(log.bus.subjects.control(worker), wire.encode(order), timeout=5)
    assert control.decode_ok(reply.data) == control.Ok()
    assert await asyncio.to_thread(process.wait, 8) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    broker: EmbeddedNats, log: LogClient, tmp_path: Path, signum: signal.Signals
) -> None:
    namespace = log.bus.subjects.namespace
    process = start(broker, tmp_path, "aggregated", namespace, "--mock-speedup", "0.2", drain_s=60)
    worker = await registered(log, process)
    asked = request(model="tiny", max_tokens=900)
    await log.send_job(worker, asked)
    await log.has_streamed(asked)
    process.ask_to_stop()
    await asyncio.to_thread(process.wait_for, "draining")
    process._process.send_signal(signum)
    assert await asyncio.to_thread(process.wait, 30) == 128 + signum, "half of the time to drain"


async def test_a_stop_while_the_engine_is_loading_does_not_wait_for_it(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, held = threading.Event(), engine()

    def build(*_: Any) -> Any:
        assert loads.wait(30)
        return held

    monkeypatch.setattr(module, "build_engine", build)
    monkeypatch.setattr(module, "JOIN_S", 0.3)
    ended: list[int] = []
    url, namespace = broker.url("operator"), log.bus.subjects.namespace
    settings = WorkerSettings(nats_url=url, namespace=namespace, engine="mock", model=str(TINY), drain_s=5)
    worker = WorkerProcess(settings, module.TokenBackend, ended.append)
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.1)
    worker._stopping.ask()
    assert await asyncio.wait_for(serving, 5) == 0
    assert ended == [0]
    assert not log.registrations
    loads.set()
    await eventually(lambda: held.closes)


async def test_while_weights_change_the_lease_is_kept_and_a_stop_returns_what_waits_in_time(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that load or sleep hold the engine thread, for minutes where models are large."""
    began, changed, held, ended = threading.Event(), threading.Event(), engine(), list[int]()

    def sleep() -> None:
        began.set()
        assert changed.wait(60)

    monkeypatch.setattr(module, "build_engine", lambda *_: held)
    monkeypatch.setattr(held.weights, "sleep", sleep)
    url, namespace = broker.url("operator"), log.bus.subjects.namespace
    settings = WorkerSettings(nats_url=url, namespace=namespace, engine="mock", model=str(TINY), drain_s=DRAIN_S)
    worker = WorkerProcess(settings, module.TokenBackend, ended.append)
    serving = asyncio.create_task(worker.serve())
    try:
        await eventually(lambda: worker.session is not None and log.registered(worker.session.id) is not None)
        assert worker.session is not None
        name = worker.session.id
        resting = asyncio.create_task(worker.session.runner.rest(control.Sleep(within_s=10)))
        await eventually(began.is_set)
        waiting = request(model="tiny")
        await log.send_job(name, waiting)
        await asyncio.sleep(fleet.LEASE_S + 0.5)  # the lease would have expired
        assert log.registered(name) is not None
        assert worker.session is not None
        assert worker.session.id == name
        asked_at = time.monotonic()
        worker._stopping.ask()
        assert await asyncio.wait_for(serving, BOUND_S) == 0
        assert time.monotonic() - asked_at < BOUND_S
        assert ended == [0]  # the thread is not waited for
        assert (await log.handed_back(waiting)).reason == "draining"
        assert log.registered(name) is None
    finally:
        changed.set()
        resting.cancel()
    await eventually(lambda: held.closes)


async def test_a_process_whose_event_loop_hangs_is_cut_off_in_time() -> None:
    ended: list[int] = []
    stopping = Stopping(0.1 - GRACE_S, ended.append)
    stopping.ask()
    deadline = time.monotonic() + 5
    while not ended:  # the event loop has no turn here
        assert time.monotonic() < deadline
    assert ended == [75]
