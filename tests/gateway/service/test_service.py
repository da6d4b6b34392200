"""Which requests a gateway cancels when it has nothing more to do for their client, on a real nats-server."""

import asyncio

import pytest
from nats.aio.msg import Msg

from penstock.gateway.http.answers import DISCONNECTED
from penstock.gateway.log.store_check import unstored
from penstock.infra.bus.connection import Bus
from penstock.schemas.errors import ServingError
from tests.gateway.nats.support import Running

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4}'


async def test_only_a_request_whose_client_left_is_cancelled(bus: Bus, running: Running) -> None:
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
        first = await cancelled.get()
    assert left.request.id.encode() in first
    assert cancelled.empty()
