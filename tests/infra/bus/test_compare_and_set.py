"""Writes that depend on a revision, as a single server and as servers of a cluster answer them."""

import asyncio
import json

import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, compare_and_set


@pytest.mark.parametrize("code", [10008, 10158, 10164, 10167])
async def test_a_refusal_for_a_moment_is_waited_out(bus: Bus, code: int) -> None:
    subject = f"{bus.subjects.namespace}.stand.in"
    asked: list[dict[str, str]] = []

    async def answer(message: Msg) -> None:
        asked.append(dict(message.headers or {}))
        error = {"error": {"code": 503, "err_code": code, "description": "not now"}}
        await bus.nc.publish(message.reply, json.dumps(error if len(asked) < 3 else {"stream": "s", "seq": 9}).encode())

    server = await bus.nc.subscribe(subject, cb=answer)
    reply = await compare_and_set(bus.nc, subject, b"v", 4, 10, ttl_s=60)
    assert (reply.seq, reply.error) == (9, None)
    assert asked == [{"Nats-Expected-Last-Subject-Sequence": "4", "Nats-TTL": "60"}] * 3
    await server.unsubscribe()


async def test_a_subject_without_a_leader_is_asked_until_there_is_one(bus: Bus) -> None:
    subject = f"{bus.subjects.namespace}.stand.in"
    with pytest.raises(NoRespondersError):
        await compare_and_set(bus.nc, subject, b"v", 0, 0.2)
    waiting = asyncio.create_task(compare_and_set(bus.nc, subject, b"v", 0, 10))

    async def answer(message: Msg) -> None:
        await bus.nc.publish(message.reply, b'{"stream": "s", "seq": 1}')

    server = await bus.nc.subscribe(subject, cb=answer)
    assert (await waiting).seq == 1
    await server.unsubscribe()


async def test_another_revision_is_said_at_once(bus: Bus) -> None:
    subject = f"$KV.{bus.subjects.bucket('idempotency')}.x"
    assert (await compare_and_set(bus.nc, subject, b"v", 0, 5, ttl_s=60)).error is None
    again = await compare_and_set(bus.nc, subject, b"v", 0, 5, ttl_s=60)
    assert again.error is not None
    assert again.error.err_code == WRONG_LAST_SEQUENCE
