"""Erasing requests with ``no_store`` on a real nats-server, whatever the router that does it had seen of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from infra.broker.server import EmbeddedNats
from infra.bus.connection import Bus
from infra.bus.direct_get import format_time, get_last, read
from infra.bus.private_objects import private_owners, put_private
from infra.bus.publisher import Publisher
from infra.metrics.scope import MetricScope
from router.erasure import eraser as eraser_module
from router.erasure.eraser import UNACCEPTED_NS, Eraser
from router.erasure.ledger import SECOND_LOOK_S, ErasureLedger
from router.metrics import Metrics
from schemas import done, requests
from schemas.ids import new_request_id
from schemas.requests import GenerateRequest, Media
from schemas.subjects import HEADER_MSG_ID, HEADER_NO_STORE, HEADER_RECORDED_TIME, Subjects
from schemas.tokens import TokenBatch, TokenItem
from schemas.wire import encode, pack_tokens
from tests.infra.bus.support import opened
from tests.infra.timeline.support import accept, assign, end, stream

LATER_NS = int((SECOND_LOOK_S + 1) * 1e9)
PROMPT, ANSWER = pack_tokens(range(901_000, 901_040)), (902_001, 902_002, 902_003, 902_004)


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, subjects) as bus:
        yield bus


@pytest.fixture
async def publisher(bus: Bus) -> AsyncIterator[Publisher]:
    async with Publisher(bus) as publisher:
        yield publisher


def eraser(bus: Bus, publisher: Publisher, ledger: ErasureLedger, *, since_ns: int) -> Eraser:
    metrics = Metrics(MetricScope())
    return Eraser(bus, publisher, ledger, metrics, since_ns=since_ns, owns=lambda model: True)


async def put(bus: Bus, subject: str, message: Any, name: str, **headers: str) -> None:
    await bus.js.publish(subject, encode(message), headers={HEADER_MSG_ID: name} | headers)


async def private(bus: Bus, **more: Any) -> GenerateRequest:
    """A request that was accepted, placed and answered, as new processes store it; it has not ended."""
    request = await accept(bus, model="never", no_store=True, prompt=PROMPT, **more)
    await put(bus, bus.subjects.request("never", "standard", no_store=True), request, f"{request.id}:kept:1")
    await assign(bus, request)
    item = TokenItem(request.id, 1, 0, 0, pack_tokens(ANSWER))
    await put(bus, bus.subjects.tokens(request.token_address), TokenBatch("w", 1, 0, (item,)), f"w:{request.id}")
    return request


async def ended(bus: Bus, request: GenerateRequest, **headers: str) -> None:
    """Its record, as new processes store it."""
    outcome = done.Outcome(pack_tokens(ANSWER), "stop")
    event = done.Done(request.id, request.model, 1, "w", (outcome,), submitted=encode(request))
    subject = bus.subjects.done(request.tenant, request.model, request.id)
    await put(bus, subject, done.without_content(event), request.id, **{HEADER_NO_STORE: "1"} | headers)


async def stored(bus: Bus, request_id: str) -> list[str]:
    """The streams with messages of a request, and the part of their subjects that says which kind."""
    found = []
    for name in ("REQUESTS", "WORK", "TOKENS", "DONE"):
        async for entry in read(bus, bus.subjects.stream(name), ">"):
            if request_id in entry.headers.get(HEADER_MSG_ID, ""):
                found.append("erased" if entry.subject == bus.subjects.erased else name)
    return found


async def test_media_are_erased_with_the_request_that_they_were_stored_for(
    bus: Bus, publisher: Publisher, broker: EmbeddedNats
) -> None:
    since = time.time_ns()
    ledger = ErasureLedger(grace_s=0)
    images = [bytes([40 + number]) * 3000 + b"picture" for number in range(3)]
    media = tuple(Media(blake3(image).digest(), "image/png", len(image)) for image in images)
    # Prepared under one id, long ago, and accepted under that of an idempotency key's claim.
    before = new_request_id(since - UNACCEPTED_NS - 10**9)
    request = await private(bus, media=tuple(msgspec.structs.replace(each, private=before) for each in media[:2]))
    other = new_request_id(since)
    for owner, medium, image in zip((request.id, before, other), media, images, strict=True):
        await put_private(bus, "media", owner, medium.digest, image)
    await ended(bus, request)
    own = eraser(bus, publisher, ledger, since_ns=since)
    await own.scan()
    assert on_disk(broker.data_dir, *images) == images
    await own.erase_due(time.time_ns())
    assert await stored(bus, request.id) == ["erased", "DONE"]
    assert on_disk(broker.data_dir, *images) == images[2:]
    assert await private_owners(bus, "media") == {other}


async def test_media_of_a_request_that_was_never_accepted_are_erased(
    bus: Bus, publisher: Publisher, broker: EmbeddedNats
) -> None:
    """Their gateway died before it could publish the request, or even in the middle of an upload."""
    now = time.time_ns()
    early, late = new_request_id(now - UNACCEPTED_NS - 10**9), new_request_id(now)
    waiting = await accept(bus, model="never", no_store=True, id=new_request_id(now - UNACCEPTED_NS - 10**9))
    images = [bytes([60 + number]) * 3000 for number in range(3)]
    for owner, image in zip((early, late, waiting.id), images, strict=True):
        await put_private(bus, "media", owner, blake3(image).digest(), image)
    await eraser(bus, publisher, ErasureLedger(grace_s=0), since_ns=now).scan()
    assert on_disk(broker.data_dir, *images) == images[1:]
    assert await private_owners(bus, "media") == {late, waiting.id}


def on_disk(folder: Path, *texts: bytes) -> list[bytes]:
    raw = b"\0\0".join(path.read_bytes() for path in folder.rglob("*.blk"))
    return [text for text in texts if text in raw]


def parts(ids: bytes) -> bytes:
    """Of tokens, some that are found wherever they are stored."""
    return ids[-16:]


async def erase_all(one: Eraser) -> None:
    """Now, and at the second look."""
    now = time.time_ns()
    await one.erase_due(now)
    await one.erase_due(now + LATER_NS)


async def test_a_router_that_saw_nothing_finds_what_has_ended_and_leaves_the_rest(
    bus: Bus, broker: EmbeddedNats, publisher: Publisher
) -> None:
    over, running, other = await private(bus), await private(bus), await accept(bus)
    await ended(bus, over)
    await stream(bus, other, 1, 2, 3)
    await end(bus, other, 1, 2, 3)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    assert await stored(bus, over.id) == ["erased", "DONE"]
    assert await stored(bus, running.id) == ["REQUESTS", "REQUESTS", "WORK", "TOKENS"]
    assert await stored(bus, other.id) == ["REQUESTS", "DONE"]
    await ended(bus, running)
    await one.scan()
    await erase_all(one)
    assert on_disk(broker.data_dir, parts(PROMPT), parts(pack_tokens(ANSWER))) == []


async def test_a_request_is_erased_although_its_gateways_clock_is_minutes_ahead(bus: Bus, publisher: Publisher) -> None:
    request = await private(bus, id=new_request_id(time.time_ns() + 600_000_000_000))
    await ended(bus, request)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    assert await stored(bus, request.id) == ["erased", "DONE"]


async def test_what_is_left_for_lists_says_who_and_when_and_nothing_more(bus: Bus, publisher: Publisher) -> None:
    request = await private(bus, user="somebody", salt="secret")
    await ended(bus, request)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    left = await get_last(bus, bus.subjects.stream("REQUESTS"), bus.subjects.erased)
    assert left is not None
    rest = requests.decode(left.data)
    assert (rest.id, rest.user, rest.prompt, rest.salt) == (request.id, "somebody", b"", "")


async def test_tokens_that_a_lost_worker_sends_after_the_erasure_are_erased_as_well(
    bus: Bus, publisher: Publisher
) -> None:
    request = await private(bus)
    await ended(bus, request)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    late = TokenBatch("lost", 1, 0, (TokenItem(request.id, 1, 0, 0, pack_tokens(ANSWER)),))
    for anew in (False, True):  # by the router that erased it, and by one that knows nothing of it
        await put(bus, bus.subjects.tokens(request.token_address), late, f"{request.id}:late:{anew}")
        if anew:
            one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
        await one.scan()
        await erase_all(one)
        assert await stored(bus, request.id) == ["erased", "DONE"]


class _Died(BaseException):
    pass


async def test_the_next_router_erases_the_rest_wherever_one_dies(
    bus: Bus, publisher: Publisher, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    erase, left = eraser_module.erase, 0

    async def erase_some(bus: Bus, stream: str, seq: int) -> bool:
        nonlocal left
        if not left:
            raise _Died
        left -= 1
        return await erase(bus, stream, seq)

    died = 0
    for survived in range(20):
        image, before = bytes([100 + survived]) * 3000, new_request_id(time.time_ns() - 10**9)
        medium = Media(blake3(image).digest(), "image/png", len(image), private=before)
        request = await private(bus, media=(medium,))
        for owner in (request.id, before):
            await put_private(bus, "media", owner, medium.digest, image)
        await ended(bus, request)
        left = survived
        monkeypatch.setattr(eraser_module, "erase", erase_some)
        with contextlib.suppress(_Died):
            one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
            await one.scan()
            await one.erase_due(time.time_ns())
            died -= 1
        died += 1
        monkeypatch.setattr(eraser_module, "erase", erase)
        successor = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
        await successor.scan()
        await erase_all(successor)
        assert await stored(bus, request.id) == ["erased", "DONE"], f"after {survived} deletions"
        assert on_disk(broker.data_dir, image, parts(PROMPT), parts(pack_tokens(ANSWER))) == []
    assert 5 < died < 20, "the last ones erased everything"
    assert await private_owners(bus, "media") == set()


async def test_a_late_job_is_erased_although_all_routers_have_started_since_the_erasure(
    bus: Bus, publisher: Publisher
) -> None:
    request = await private(bus)
    await ended(bus, request)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    since, ledger = time.time_ns(), ErasureLedger(0.0)
    ack = await bus.js.publish(bus.subjects.work("decode", "w-2"), PROMPT, headers={HEADER_MSG_ID: f"{request.id}:2"})
    ledger.add_job(request.id, ack.seq)  # as its fold of WORK does
    new = eraser(bus, publisher, ledger, since_ns=since)
    await new.scan()
    await erase_all(new)
    assert await stored(bus, request.id) == ["erased", "DONE"]


async def test_a_job_that_was_stored_well_after_the_end_is_erased_by_a_router_that_started_later(
    bus: Bus, publisher: Publisher
) -> None:
    request = await private(bus)
    long_ago = format_time(time.time_ns() - 60 * 10**9)
    await ended(bus, request, **{HEADER_RECORDED_TIME: long_ago})
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await erase_all(one)
    assert await stored(bus, request.id) == ["erased", "DONE"]


async def test_a_request_that_cannot_be_erased_delays_no_other(bus: Bus, publisher: Publisher) -> None:
    stream = bus.subjects.stream("REQUESTS")
    requests = [await private(bus, user="u" * 3000 * (number == 0)) for number in range(3)]
    for request in requests:
        await ended(bus, request)
    config = (await bus.js.stream_info(stream)).config
    config.max_msg_size = 2000  # the first one's summary for lists is refused
    await bus.js.update_stream(config)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    await one.erase_due(time.time_ns())
    assert [await stored(bus, request.id) for request in requests[1:]] == [["erased", "DONE"]] * 2
    assert await stored(bus, requests[0].id) == ["REQUESTS", "REQUESTS", "DONE"], "the note that it is to be erased"
    config.max_msg_size = -1
    await bus.js.update_stream(config)
    await erase_all(one)
    await one.erase_due(time.time_ns() + LATER_NS)
    assert await stored(bus, requests[0].id) == ["erased", "DONE"]


async def test_erasing_a_request_reads_none_of_the_others(bus: Bus, publisher: Publisher) -> None:
    others = [await accept(bus, model="never", no_store=True, prompt=bytes(200_000)) for _ in range(3)]
    over = await private(bus)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await one.scan()
    received = bus.nc.stats["in_bytes"]
    await ended(bus, over)
    await one.scan()
    await erase_all(one)
    assert bus.nc.stats["in_bytes"] - received < 200_000
    assert await stored(bus, over.id) == ["erased", "DONE"]
    assert [await stored(bus, other.id) for other in others] == [["REQUESTS"]] * 3


async def test_what_routers_erase_at_the_same_time_is_erased_once_and_listed_once(
    bus: Bus, publisher: Publisher
) -> None:
    over = [await private(bus) for _ in range(5)]
    for request in over:
        await ended(bus, request)
    all_of_them = [eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns()) for _ in range(3)]
    await asyncio.gather(*(one.scan() for one in all_of_them))
    await asyncio.gather(*map(erase_all, all_of_them))
    for request in over:
        assert await stored(bus, request.id) == ["erased", "DONE"]


async def test_a_message_of_a_stream_that_was_made_anew_is_not_taken_for_an_earlier_one(
    bus: Bus, publisher: Publisher
) -> None:
    stream = bus.subjects.stream("REQUESTS")
    over = await accept(bus, model="never", no_store=True)
    one = eraser(bus, publisher, ErasureLedger(0.0), since_ns=time.time_ns())
    await ended(bus, over)
    await one.scan()
    config = (await bus.js.stream_info(stream)).config
    await bus.js.delete_stream(stream)
    await bus.js.add_stream(config)
    running = await accept(bus, model="never", no_store=True)
    await erase_all(one)
    assert await stored(bus, running.id) == ["REQUESTS"]
