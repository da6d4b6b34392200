"""``penstock dead``: on a real nats-server, and with workers whose engine dies of a request."""

import asyncio
import json

import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.dead_requests import run
from penstock.schemas import wire
from penstock.schemas.done import Returned
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID
from tests.penstock.log_tools.requests.support import accept, assign, end


def where(bus: Bus, broker: EmbeddedNats) -> list[str]:
    return ["--nats-url", broker.url(), "--namespace", bus.subjects.namespace]


@pytest.mark.parametrize("code", ["worker_lost", "poisoned_request"])
async def test_dead_requests_are_listed_with_the_end_of_each_attempt(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    dead, other = await accept(bus), await accept(bus)
    for attempt, worker in ((1, "w-1"), (2, "w-2")):
        await assign(bus, dead, worker, attempt)
    returned = Returned(dead.id, dead.model, 1, "w-1", "engine_error: boom", poison=True)
    headers = {HEADER_MSG_ID: f"{dead.id}:1:returned"}
    await bus.js.publish(bus.subjects.returned(dead.model), wire.encode(returned), headers=headers)
    await end(bus, dead, worker="w-2", code=code, attempt=2)
    await end(bus, other, 1)
    assert await asyncio.to_thread(run, ["list", "--json", *where(bus, broker)]) == 0
    [found] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found["summary"]["id"] == dead.id
    assert [(each["worker"], each["reason"], each["engine_failed"]) for each in found["attempts"]] == [
        ("w-1", "engine_error: boom", True),
        ("w-2", "the worker was lost", False),
    ]
    assert await asyncio.to_thread(run, ["list", *where(bus, broker)]) == 0
    shown = capsys.readouterr().out
    assert "w-1: engine_error: boom" in shown
    assert other.id not in shown


async def test_a_retry_asks_first_and_needs_to_know_which(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = await accept(bus)
    await end(bus, dead, code="worker_lost")
    assert await asyncio.to_thread(run, ["retry", "--all", *where(bus, broker)]) == 1
    assert "--yes" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        await asyncio.to_thread(run, ["retry", *where(bus, broker)])
    assert stop.value.code == 2
    capsys.readouterr()
    assert await asyncio.to_thread(run, ["retry", dead.id, "--yes", *where(bus, broker)]) == 1
    assert "no worker of the target serves" in capsys.readouterr().err


async def test_only_requests_that_lost_their_workers_are_tried_again(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, unknown = await accept(bus), new_request_id()
    await end(bus, fine, 1)
    for request_id, said in ((fine.id, "did not lose its workers (done)"), (unknown, "was forgotten, or is older")):
        assert await asyncio.to_thread(run, ["retry", request_id, "--yes", *where(bus, broker)]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "status"), [(["lst"], 2), ([], 2), (["--help"], 0), (["-h"], 0)])
def test_usage_is_output_if_it_was_asked_for_and_else_an_error(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == status
    shown, other = capsys.readouterr() if status == 0 else reversed(capsys.readouterr())
    assert "{list,show,retry}" in shown
    assert not other
