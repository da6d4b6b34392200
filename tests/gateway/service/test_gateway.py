"""Which requests a gateway cancels when it has nothing more to do for their client, on a real nats-server."""

import asyncio
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from penstock.gateway.admission.queues import unstored
from penstock.gateway.http.answers import DISCONNECTED
from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.doctor.fleet import Keys, find_keys
from penstock.schemas.control import Cancel, decode_cancel
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects
from tests.gateway.nats.support import Running, gateway_on
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
