"""A router process that is asked to stop is gone in time, also if its broker is dead or does not answer."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.bus.tasks import EXIT_OK, EXIT_STUCK
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.run_router import END_S
from penstock.schemas import wire
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.conftest import Connect
from tests.pipeline.support import Process, free_port
from tests.workers.support import request


@pytest.mark.parametrize("broker_is", ["there", "stopped", "killed"])
async def test_a_router_that_holds_a_request_ends_in_time(
    make_broker: Callable[..., EmbeddedNats], connect: Connect, tmp_path: Path, broker_is: str
) -> None:
    server = make_broker()
    await server.start()
    nc = await connect(server)
    subjects = Subjects("ps")
    await apply(nc, topology(subjects))
    log = tmp_path / "router.log"
    router = Process(log, "router", "--log-format", "json", nats_url=server.url("operator"))
    await asyncio.to_thread(router.wait_for, "router_open")
    asked = request(model="missing")
    subject = subjects.request(asked.model, asked.priority.value, asked.id)
    await nc.jetstream().publish(subject, wire.encode(asked), headers={HEADER_MSG_ID: asked.id})

    async with asyncio.timeout(10):
        while not (await nc.jetstream().consumer_info("ps_REQUESTS", "router-standard")).num_ack_pending:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    if broker_is == "stopped":
        os.kill(server.pid, signal.SIGSTOP)
    elif broker_is == "killed":
        server.kill()
        await asyncio.to_thread(router.wait_for, "bus_disconnected")
    try:
        router.ask_to_stop()
        status = await asyncio.to_thread(router.wait, END_S + 2.0)  # and a loaded machine
    finally:
        router.stop()
        if broker_is == "stopped":
            os.kill(server.pid, signal.SIGCONT)
    assert status in (EXIT_OK, EXIT_STUCK)


@pytest.mark.parametrize("role", ["router", "gateway"])
async def test_a_process_that_waits_for_its_broker_stops_when_it_is_asked(role: str, tmp_path: Path) -> None:
    port = ["--http-port", "0"] if role == "gateway" else []
    process = Process(tmp_path / "log", role, "--log-format", "json", *port, nats_url=f"nats://127.0.0.1:{free_port()}")
    try:
        await asyncio.to_thread(process.wait_for, "bus_error")
        process.ask_to_stop()
        status = await asyncio.to_thread(process.wait, 5.0)
    finally:
        process.stop()
    assert status == EXIT_OK
    assert "stopped_during_startup" in (tmp_path / "log").read_text()
