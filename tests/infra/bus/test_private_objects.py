"""Objects of one request: stored once, read whole, found by the request's id."""

import time
from collections.abc import AsyncIterator

import pytest
from blake3 import blake3

from infra.broker.server import EmbeddedNats
from infra.bus import private_objects
from infra.bus.connection import Bus
from infra.bus.private_objects import get_private, private_owners, private_sequences, put_private
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.subjects import Subjects
from tests.infra.bus.support import opened


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    monkeypatch.setattr(private_objects, "CHUNK", 100)
    async with opened(broker, subjects) as bus:
        yield bus


async def test_a_value_is_read_as_it_was_stored_however_often_it_was(bus: Bus) -> None:
    owner, data = new_request_id(time.time_ns()), bytes(range(250))
    digest = blake3(data).digest()
    for _ in range(2):
        await put_private(bus, "media", owner, digest, data)
        assert await get_private(bus, "media", owner, digest, size=250) == data
    assert len(await private_sequences(bus, "media", owner)) == 3
    assert await private_owners(bus, "media") == {owner}


async def test_two_requests_with_one_image_have_one_each(bus: Bus) -> None:
    owners = [new_request_id(time.time_ns()) for _ in range(2)]
    for owner in owners:
        await put_private(bus, "media", owner, b"digest", b"image")
    assert [await private_sequences(bus, "media", owner) for owner in owners] == [[1], [2]]
    assert await private_owners(bus, "media") == set(owners)


async def test_what_is_not_whole_is_not_found(bus: Bus) -> None:
    owner = new_request_id(time.time_ns())
    await put_private(bus, "media", owner, b"digest", bytes(150))
    for name, size in ((b"digest", 200), (b"other", 150)):
        with pytest.raises(ServingError) as raised:
            await get_private(bus, "media", owner, name, size=size)
        assert raised.value.code is Code.request_not_found
    assert await private_owners(bus, "media") == {owner}
    assert await private_sequences(bus, "media", new_request_id(time.time_ns())) == []
