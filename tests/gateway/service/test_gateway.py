"""Which requests a gateway cancels when it has nothing more to do for their client, on a real nats-server."""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from prometheus_client import generate_latest

from penstock.gateway.admission.queues import unstored
from penstock.gateway.http.answers import DISCONNECTED
from penstock.gateway.service import cell as cell_module
from penstock.gateway.service.fleet import FORGET_S
from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.doctor.fleet import Keys, find_keys
from penstock.schemas.control import Cancel, decode_cancel
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from tests.gateway.nats.support import WITHIN_S, Engine, Running, gateway_on
from tests.gateway.service.test_role_models import accepted
from tests.pipeline.support import until

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4}'


async def test_only_a_request_whose_client_left_is_cancelled_always_for_that_reason(bus: Bus, running: Running) -> None:
    gateway = running.gateway
    cancelled: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message: Msg) -> None:
        cancelled.put_nowait(message.data)

    await bus.nc.subscribe(bus.subjects.cancel, cb=take)
    await bus.nc.flush()
    inflights = [await gateway.submit((await gateway.prepare("completion", BODY)).request) for _ in range(2)]
    cut_off, left = inflights
    cut_off.fail(unstored(cut_off.request.id))  # its client is told to ask for the answer later
    left.fail(DISCONNECTED)
    for inflight in inflights:
        with pytest.raises(ServingError):
            await inflight.take()
        gateway.cancel_unfinished(inflight)
    async with asyncio.timeout(10):
        first = decode_cancel(await cancelled.get())
        assert cancelled.empty()
        again = decode_cancel(await cancelled.get())  # nobody has ended it
    assert first == again == Cancel(left.request.id, "the client disconnected")


@pytest.mark.parametrize("stored", [False, True])
async def test_a_request_that_was_never_stored_is_not_waited_for(
    stored: bool, bus: Bus, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker was away when it came: nothing in the log would end it before its deadline, ten minutes later."""
    monkeypatch.setattr(cell_module, "NEVER_STORED_S", 0.3)
    cell = running.gateway.cells[0]
    publish = cell.publisher.publish

    async def unconfirmed(*args: Any, **more: Any) -> Any:
        if stored:
            await publish(*args, **more)
        raise ServingError(Code.broker_unavailable, "no acknowledgement")

    monkeypatch.setattr(cell.publisher, "publish", unconfirmed)
    request = (await running.gateway.prepare("completion", BODY)).request
    cancels: list[bytes] = []

    async def take(message: Msg) -> None:
        cancels.append(message.data)

    await bus.nc.subscribe(bus.subjects.cancel, cb=take)
    await bus.nc.flush()
    with pytest.raises(ServingError):
        await running.gateway.submit(request)
    assert cell.open_requests == 1

    async def known() -> bool:
        return not cell._unconfirmed

    await until(known, "the log was looked at")
    assert cell.open_requests == stored
    if stored:  # it may run, so it is cancelled until it has ended

        async def again() -> bool:
            return len(cancels) > 1

        await until(again, "a further cancellation")
        await Engine(bus).record(request, 0)

        async def ended() -> bool:
            return not cell.open_requests

        await until(ended, "its end was read")


async def test_a_gateway_whose_keys_are_lost_shows_it_and_notes_it_for_the_doctor(
    bus: Bus, broker: EmbeddedNats, subjects: Subjects, model: ModelDir, tmp_path: Path
) -> None:
    (tmp_path / f"{subjects.namespace}-has-keys").touch()
    state = {"namespace": subjects.namespace, "state_dir": str(tmp_path)}
    async with gateway_on(broker, subjects, model, **state) as running:
        assert running.gateway.metrics.registry.get_sample_value("penstock_keys_lost") == 1

        async def noted() -> Keys | None:
            found = await find_keys(bus)
            return found if found.lost_by else None

        assert await until(noted, "it is in the audit log") == (0, (running.gateway.id,))


async def test_an_autoscaler_sees_which_models_are_asked_for_whether_or_not_they_have_workers(
    bus: Bus, broker: EmbeddedNats, model: ModelDir
) -> None:
    await accepted(bus, "away", "completion")  # while it had workers, before this gateway started
    settings = {"learn_models": True, "ready_without_workers": True}
    async with gateway_on(broker, bus.subjects, model, **settings) as (gateway, _):

        def idle() -> dict[str, float]:
            gateway._sweep_once()
            page = generate_latest(gateway.metrics.registry).decode()
            found = re.findall(r'^\w*_model_idle_seconds\{.*model="(.*?)".*\} (.*)$', page, re.MULTILINE)
            return {name: float(value) for name, value in found}

        assert not [reason for reason in gateway.not_ready() if "worker" in reason]
        assert idle() == {"tiny": math.inf}
        for name, code in (("away", Code.broker_unavailable), ("invented", Code.model_not_found)):
            with pytest.raises(ServingError) as refused:
                await gateway.prepare("completion", BODY.replace(b"tiny", name.encode()))
            assert refused.value.code is code
        seen = idle()
        assert (seen.keys(), seen["tiny"]) == ({"tiny", "away"}, math.inf), "a name that clients invent has no series"
        assert seen["away"] < WITHIN_S
        await gateway.prepare("completion", BODY)
        assert idle()["tiny"] < WITHIN_S
        gateway._asked_for["away"] -= FORGET_S
        assert idle().keys() == {"tiny"}
