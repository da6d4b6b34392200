"""The object store, on a real nats-server."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.object_store import CHUNK, get, put, replace
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened

LIFE = 2 * 3600.0 + 300.0  # of the media bucket


def some(size: int, seed: int = 0) -> bytes:
    return blake3(b"%d" % seed).digest(length=size)


async def stored(bus: Bus, kind: str = ">") -> list[Any]:
    full = bus.subjects.bucket("media")
    return [entry async for entry in read(bus, f"OBJ_{full}", f"$O.{full}.{kind}")]


async def read_back(bus: Bus, name: str, limit: int = 1 << 30) -> bytes:
    return await get(bus, "media", name, limit=limit)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK + 17])
async def test_what_is_put_is_got(bus: Bus, size: int) -> None:
    data = some(size)
    left = await put(bus, "media", "name", data)
    assert LIFE - 120 < left < LIFE
    assert await read_back(bus, "name") == data


async def test_the_layout_is_that_of_other_nats_clients(bus: Bus) -> None:
    store = await bus.js.object_store(bus.subjects.bucket("media"))
    ours, theirs = some(3 * CHUNK + 5), some(300_000, 1)
    await put(bus, "media", "ours", ours)
    result = await store.get("ours")
    assert (result.data, result.info.size, result.info.chunks) == (ours, len(ours), 4)
    await store.put("theirs", theirs)
    assert await read_back(bus, "theirs") == theirs
    await store.delete("theirs")
    with pytest.raises(ServingError) as caught:
        await read_back(bus, "theirs")
    assert caught.value.code is Code.request_not_found
    await put(bus, "media", "theirs", theirs)
    assert await read_back(bus, "theirs") == theirs


async def test_an_object_is_stored_once(bus: Bus) -> None:
    data = some(CHUNK + 1)
    await put(bus, "media", "name", data)
    before = [entry.seq for entry in await stored(bus)]
    await put(bus, "media", "name", data)
    assert [entry.seq for entry in await stored(bus)] == before
    assert len(before) == 3


async def test_gateways_that_put_the_same_at_once_leave_one_whole_object(bus: Bus) -> None:
    data = some(CHUNK + 1)
    left = await asyncio.gather(*(put(bus, "media", "name", data) for _ in range(8)))
    assert min(left) > LIFE - 120
    assert await read_back(bus, "name") == data
    entries = await stored(bus, "M.>")
    assert len(entries) == 1
    chunks = {entry.subject for entry in await stored(bus, "C.>")}
    assert len(chunks) == 1  # those of the others were taken back


@pytest.mark.parametrize(
    ("age_s", "keep_s", "again"),
    [
        (60.0, 600.0, False),
        (LIFE / 2 - 120, 600.0, False),
        (LIFE / 2, 600.0, True),  # half of its life is over
        (LIFE / 4, LIFE - 120, True),  # it would not live as long as it is needed
        (LIFE / 4, LIFE / 2, False),
        (30.0, LIFE, False),  # cannot be had any younger
    ],
)
async def test_an_object_is_stored_again_before_it_is_too_old_for_its_users(
    bus: Bus, age_s: float, keep_s: float, again: bool
) -> None:
    data = some(1000)
    await put(bus, "media", "name", data)
    old = [entry.seq for entry in await stored(bus)]
    bus.clock.offset_ns = int(age_s * 1e9)  # this machine's clock is behind, or it is later
    left = await put(bus, "media", "name", data, keep_s=keep_s)
    new = [entry.seq for entry in await stored(bus)]
    assert (new != old) is again
    assert again or left >= min(keep_s, LIFE - 120)
    if again:
        assert old[0] in new  # whoever found the old one can still read its chunks
        assert len(await stored(bus, "M.>")) == 1


async def test_a_lost_confirmation_of_the_entry_is_no_loss_of_the_object(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = bus.nc.request, []

    async def request(subject: str, payload: bytes = b"", **options: Any) -> Any:
        reply = await real(subject, payload, **options)
        if ".M." in subject and subject.startswith("$O.") and not lost:
            lost.append(subject)
            raise TimeoutError
        return reply

    monkeypatch.setattr(bus.nc, "request", request)
    data = some(CHUNK + 1)
    await put(bus, "media", "name", data)
    assert lost
    assert await read_back(bus, "name") == data


async def test_an_upload_that_was_interrupted_starts_over(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is sent again stands behind its successors: the object would be the wrong way round."""
    real, lost = bus.nc.request, []

    async def request(subject: str, payload: bytes = b"", **options: Any) -> Any:
        if ".C." in subject and not lost:
            lost.append(subject)
            raise TimeoutError
        return await real(subject, payload, **options)

    monkeypatch.setattr(bus.nc, "request", request)
    data = some(4 * CHUNK)
    await put(bus, "media", "name", data)
    assert await read_back(bus, "name") == data
    assert {entry.subject for entry in await stored(bus, "C.>")}.isdisjoint(lost)


async def test_what_is_not_there_is_not_found_in_bounded_time(bus: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(ServingError, match="never stored") as caught:
        await read_back(bus, "nothing")
    assert caught.value.code is Code.request_not_found
    assert time.monotonic() - began < 3


async def test_an_object_whose_chunks_went_is_not_found(bus: Bus) -> None:
    full = bus.subjects.bucket("media")
    await put(bus, "media", "name", some(2 * CHUNK))
    first = (await stored(bus, "C.>"))[0].seq
    await bus.js.delete_msg(f"OBJ_{full}", first)
    with pytest.raises(ServingError) as caught:
        await read_back(bus, "name")
    assert caught.value.code is Code.request_not_found


async def test_an_object_above_the_limit_is_not_read(bus: Bus) -> None:
    await put(bus, "media", "name", some(1000))
    with pytest.raises(ServingError, match="1000 bytes, and the limit is 999") as caught:
        await read_back(bus, "name", limit=999)
    assert caught.value.code is Code.body_too_large
    assert len(await read_back(bus, "name", limit=1000)) == 1000


async def test_a_full_bucket_is_a_clear_error_and_keeps_what_it_has(bus: Bus) -> None:
    full = bus.subjects.bucket("media")
    await put(bus, "media", "first", some(CHUNK))
    config = (await bus.js.stream_info(f"OBJ_{full}")).config
    config.max_bytes = 3 * CHUNK
    await bus.js.update_stream(config)
    with pytest.raises(ServingError, match="maximum bytes") as caught:
        await put(bus, "media", "second", some(4 * CHUNK, 2))
    assert caught.value.code is Code.broker_unavailable
    assert await read_back(bus, "first") == some(CHUNK)


async def test_a_broker_that_went_away_is_an_error_within_the_time(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        server.kill()
        for call in (
            put(bus, "media", "name", b"x", timeout=0.5),
            get(bus, "media", "name", limit=10, timeout=0.5),
        ):
            began = time.monotonic()
            with pytest.raises(ServingError) as caught:
                await call
            assert caught.value.code is Code.broker_unavailable
            assert time.monotonic() - began < 2
        with pytest.raises(ServingError, match=r"within 20 s"):  # the time of the whole call, which is over
            await object_store._request(bus, "anything", b"", None, object_store.Until(time.monotonic() - 1, 20.0))


@pytest.mark.parametrize("role", ["gateway", "worker"])
async def test_roles_have_the_rights_they_need(
    broker: EmbeddedNats, subjects: Subjects, role: str
) -> None:  # the server's role users know the namespace "ps" only
    data = some(2 * CHUNK, seed=7)
    name = hashlib.sha256(subjects.namespace.encode()).hexdigest()
    async with opened(broker, Subjects("ps")) as operator:
        gateway = await connect(broker.url("gateway"), role="gateway", name="test")
        other = await connect(broker.url(role), role=role, name="test")
        try:
            await asyncio.gather(*(put(gateway, "media", name, data) for _ in range(2)))
            assert await get(other, "media", name, limit=1 << 20) == data
        finally:
            await gateway.close()
            await other.close()
        assert operator.connected


async def test_replace_keeps_the_newest_value_and_no_chunks_of_the_older(bus: Bus) -> None:
    values = [some(2 * CHUNK + 1, seed) for seed in range(3)]
    for value in values:
        await replace(bus, "media", "state", value)
        assert await get(bus, "media", "state", limit=1 << 30, newest=True) == value
    assert len(await stored(bus, "C.>")) == 3
    assert len(await stored(bus, "M.>")) == 1


async def test_of_two_replacements_at_once_one_value_is_whole(bus: Bus) -> None:
    await replace(bus, "media", "state", some(CHUNK, 9))
    values = [some(3 * CHUNK, seed) for seed in range(2)]
    await asyncio.gather(*(replace(bus, "media", "state", value) for value in values))
    assert await get(bus, "media", "state", limit=1 << 30, newest=True) in values
