"""The index of requests with ``no_store``, on a real nats-server, against what the stream holds."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from infra.broker.server import EmbeddedNats
from infra.bus import unerased
from infra.bus.connection import Bus
from infra.bus.direct_get import read
from infra.bus.erase import erase
from infra.bus.unerased import UnerasedRequests
from schemas.requests import Media
from schemas.subjects import HEADER_MSG_ID, Subjects, request_of
from schemas.wire import encode
from tests.infra.bus.support import opened
from tests.infra.timeline.support import accept


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, subjects) as bus:
        yield bus


async def stored(bus: Bus) -> dict[str, list[int]]:
    """Sequences by request."""
    found: dict[str, list[int]] = {}
    async for entry in read(bus, bus.subjects.stream("REQUESTS"), bus.subjects.to_be_erased):
        found.setdefault(request_of(entry.headers), []).append(entry.seq)
    return found


async def test_it_has_all_that_is_stored_and_says_where(bus: Bus) -> None:
    rng, index = random.Random(3), UnerasedRequests(bus)
    requests = []
    for _ in range(60):
        step = rng.random()
        if step < 0.5 or not requests:
            requests.append(await accept(bus, no_store=rng.random() < 0.7))
        elif step < 0.7:
            request = rng.choice(requests)
            subject = bus.subjects.request(request.model, "standard", request.id, no_store=request.no_store)
            await bus.js.publish(subject, encode(request), headers={HEADER_MSG_ID: f"{request.id}:kept:{step}"})
        elif step < 0.9:
            await index.refresh()
        elif have := await stored(bus):
            await erase(bus, bus.subjects.stream("REQUESTS"), rng.choice(have[rng.choice(list(have))]))
    await index.refresh()
    for name, seqs in (await stored(bus)).items():
        found = index.get(name)
        assert found is not None
        assert set(seqs) <= set(found.seqs)
    assert set(index) <= {request.id for request in requests if request.no_store}


async def test_it_knows_the_subject_of_the_end_and_the_owners_of_media(bus: Bus) -> None:
    medium = Media(b"x" * 32, "image/png", 3, private="before")
    request = await accept(bus, no_store=True, tenant="acme", media=(medium,))
    index = UnerasedRequests(bus)
    await index.refresh()
    found = index.get(request.id)
    assert found is not None
    assert found.done == bus.subjects.done("acme", request.model, request.id)
    assert found.owners == {request.id, "before"}


async def test_each_request_is_read_once_however_often_it_is_refreshed(bus: Bus) -> None:
    for _ in range(5):
        await accept(bus, no_store=True, prompt=bytes(100_000))
    index = UnerasedRequests(bus)
    await index.refresh()
    received = bus.nc.stats["in_bytes"]
    await asyncio.gather(*(index.refresh() for _ in range(20)))
    new = await accept(bus, no_store=True)
    await asyncio.gather(*(index.refresh() for _ in range(20)))
    assert new.id in index
    assert bus.nc.stats["in_bytes"] - received < 100_000


async def test_concurrent_refreshes_find_what_was_stored_before_each_of_them(bus: Bus) -> None:
    index = UnerasedRequests(bus)

    async def store_and_look() -> bool:
        request = await accept(bus, no_store=True)
        await index.refresh()
        return request.id in index

    assert all(await asyncio.gather(*(store_and_look() for _ in range(30))))


async def test_a_refresh_that_is_cancelled_leaves_the_next_one_complete(bus: Bus) -> None:
    requests = [await accept(bus, no_store=True) for _ in range(5)]
    index = UnerasedRequests(bus)
    cancelled, waiting = asyncio.ensure_future(index.refresh()), asyncio.ensure_future(index.refresh())
    await asyncio.sleep(0)
    cancelled.cancel()
    await waiting
    assert all(request.id in index for request in requests)


async def test_it_stays_small_although_it_never_learns_of_an_erasure(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unerased, "SPARE", 4)
    index = UnerasedRequests(bus)
    most = 0
    for _ in range(30):
        request = await accept(bus, no_store=True)
        await index.refresh()
        assert request.id in index
        most = max(most, len(list(index)))
        for seqs in (await stored(bus)).values():
            await erase(bus, bus.subjects.stream("REQUESTS"), seqs[0])
    assert most <= 2 * 1 + 4 + 1


async def test_a_stream_that_was_made_anew_is_read_from_its_beginning(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unerased, "REREAD_S", 0.0)
    index = UnerasedRequests(bus)
    for _ in range(3):
        await accept(bus, no_store=True)
    await index.refresh()
    stream = bus.subjects.stream("REQUESTS")
    config = (await bus.js.stream_info(stream)).config
    await bus.js.delete_stream(stream)
    await bus.js.add_stream(config)
    request = await accept(bus, no_store=True)
    await index.refresh()
    assert list(index) == [request.id]
