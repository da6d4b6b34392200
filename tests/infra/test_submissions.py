"""More submissions than their stream holds: nothing acknowledged is lost, nothing finished is in the way."""

import dataclasses

from nats.aio.client import Client
from nats.js.errors import APIError

from penstock.infra.nats_server.apply_streams import apply
from penstock.schemas.streams import StreamSpec, Topology, topology
from penstock.schemas.subjects import Subjects

SIZE = 1 << 20
HONEST = 500


def small(subjects: Subjects) -> Topology:
    """With a SUBMIT of 1 MiB."""
    whole = topology(subjects)

    def shrink(spec: StreamSpec) -> StreamSpec:
        return dataclasses.replace(spec, max_bytes=SIZE) if spec.name == subjects.stream("SUBMIT") else spec

    return dataclasses.replace(whole, streams=tuple(map(shrink, whole.streams)))


async def take(nc: Client, subjects: Subjects, count: int) -> list[bytes]:
    """What a gateway is given, acknowledged as when it has answered."""
    pull = await nc.jetstream().pull_subscribe_bind("gateway", subjects.stream("SUBMIT"))
    taken: list[bytes] = []
    while len(taken) < count:
        for message in await pull.fetch(min(256, count - len(taken)), timeout=5):
            taken.append(message.data)
            await message.ack_sync()
    await pull.unsubscribe()
    return taken


async def flood(nc: Client, subjects: Subjects, count: int, size: int) -> tuple[int, list[int]]:
    """How many were acknowledged; the error codes of the others."""
    codes, acknowledged = [], 0
    for _ in range(count):
        try:
            await nc.jetstream().publish(subjects.submit("m"), bytes(size))
            acknowledged += 1
        except APIError as error:
            codes.append(error.err_code)
    return acknowledged, codes


async def test_a_flood_evicts_no_acknowledged_submission_and_is_refused_at_once(nc: Client, subjects: Subjects) -> None:
    await apply(nc, small(subjects))
    for number in range(HONEST):
        await nc.jetstream().publish(subjects.submit("m"), b"honest %d" % number)
    acknowledged, codes = await flood(nc, subjects, 3 * SIZE // 16_384, 16_384)
    assert acknowledged < SIZE // 16_384
    assert set(codes) == {10077}  # maximum bytes exceeded
    taken = await take(nc, subjects, HONEST + acknowledged)
    assert taken[:HONEST] == [b"honest %d" % number for number in range(HONEST)]
    # Whatever was answered makes room.
    assert (await flood(nc, subjects, 10, 16_384))[0] == 10


async def test_finished_submissions_of_three_times_the_limit_refuse_nobody_even_behind_an_unfinished_one(
    nc: Client, subjects: Subjects
) -> None:
    await apply(nc, small(subjects))
    js = nc.jetstream()
    await js.publish(subjects.submit("m"), b"unfinished")
    pull = await js.pull_subscribe_bind("gateway", subjects.stream("SUBMIT"))
    (straggler,) = await pull.fetch(1, timeout=5)
    for _ in range(3 * SIZE // 65_536):
        await js.publish(subjects.submit("m"), bytes(65_000))
        (message,) = await pull.fetch(1, timeout=5)
        await message.ack_sync()
    await straggler.in_progress()
    state = (await js.stream_info(subjects.stream("SUBMIT"))).state
    assert (state.messages, state.first_seq) == (1, 1)
    await pull.unsubscribe()
