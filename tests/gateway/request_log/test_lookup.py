"""Finding a request again: its content was in memory storage and is not there any more, or it was deleted."""

import time

import msgspec
import pytest
from nats.aio.msg import Msg

from penstock.gateway.request_log import lookup as lookups
from penstock.gateway.request_log.lookup import Records, RequestFinder, RequestLookup
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import MemoryStreams
from penstock.schemas import contents, deletions, done, requests, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID, KEPT
from tests.gateway.request_log.test_inflight import request_of


@pytest.mark.parametrize(
    ("code", "grace_s", "expected"),
    [
        ("", 30.0, Code.content_lost),
        ("", 0.0, Code.request_erased),
        ("content_lost", 0.0, Code.content_lost),
        ("deadline_exceeded", 30.0, Code.content_lost),
    ],
)
async def test_content_that_is_gone_before_its_grace_is_over_was_lost_and_not_deleted(
    bus: Bus, code: str, grace_s: float, expected: Code
) -> None:
    now = time.time_ns()
    request = msgspec.structs.replace(
        request_of(), id=new_request_id(now), gateway="gone", no_store=True, created_ns=now
    )
    stored = wire.encode(contents.without_content(request, bytes(32)))
    event = done.Done(request.id, request.model, 1, code=code, submitted=stored, left_out=("prompt", "tokens"))
    await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), wire.encode(event))
    lookup = RequestLookup(bus, Records(bus), RequestFinder(bus), grace_s, MemoryStreams(bus))
    with pytest.raises(ServingError) as caught:
        await lookup.find(request.id)
    assert caught.value.code is expected


async def test_the_prompt_is_read_from_the_stream_of_requests_only_where_the_answer_shows_it(bus: Bus) -> None:
    for echo in (False, True):
        now = time.time_ns()
        request = msgspec.structs.replace(
            request_of(), id=new_request_id(now), created_ns=now, prompt=wire.pack_tokens([3, 4]), echo=echo
        )
        subject = bus.subjects.request(request.model, request.priority.value, request.id)
        stored = wire.encode(requests.packed(request))
        await bus.js.publish(subject, stored, headers={HEADER_MSG_ID: request.id})
        event = done.Done(
            *(request.id, request.model, 1),
            usage=done.Usage(request.prompt_tokens),
            submitted=done.recorded(request),
            left_out=done.not_recorded(request),
        )
        await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), wire.encode(event))
        lookup = RequestLookup(bus, Records(bus), RequestFinder(bus), 0.0, MemoryStreams(bus))
        found = (await lookup.find(request.id)).request
        assert found.prompt == (request.prompt if echo else b"")
        assert found.prompt_tokens == request.prompt_tokens


async def test_no_prompt_is_made_up_where_the_stream_of_requests_has_lost_the_one_that_the_answer_shows(
    bus: Bus,
) -> None:
    """The answer began with as many tokens of id 0."""
    lookup = RequestLookup(bus, Records(bus), RequestFinder(bus), 0.0, MemoryStreams(bus))
    for echo in (False, True):
        now = time.time_ns()
        request = msgspec.structs.replace(
            request_of(), id=new_request_id(now), created_ns=now, prompt=wire.pack_tokens([3, 4]), echo=echo
        )
        event = done.Done(
            *(request.id, request.model, 1),
            usage=done.Usage(request.prompt_tokens),
            submitted=done.recorded(request),
            left_out=done.not_recorded(request),
        )
        await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), wire.encode(event))
        if echo:
            with pytest.raises(ServingError, match="shows its prompt") as caught:
                await lookup.find(request.id)
            assert caught.value.code is Code.request_erased
        assert (await lookup.find(request.id, deleted=echo)).record == event


async def test_a_request_is_found_of_which_only_the_copy_of_a_router_is_left(bus: Bus) -> None:
    """It had waited for half an hour when REQUESTS was half full, so that its router stored it again."""
    made_ns, shard = time.time_ns() - 30 * 60 * 1_000_000_000, bytes(10)
    request = msgspec.structs.replace(request_of(), id=new_request_id(made_ns, shard), created_ns=made_ns)
    subject = bus.subjects.request(request.model, request.priority.value, request.id)
    for name in (new_request_id(None, shard), f"{request.id}:{KEPT}:5"):
        await bus.js.publish(subject, wire.encode(request), headers={HEADER_MSG_ID: name})
    finder = RequestFinder(bus)
    assert await finder.find(request.id) == request
    with pytest.raises(ServingError, match="no request"):
        await finder.find(new_request_id(made_ns - 1_000_000, shard))


async def test_a_deleted_request_is_not_found_though_its_record_is_back_but_by_who_deletes_it(bus: Bus) -> None:
    now = time.time_ns()
    request = msgspec.structs.replace(request_of(), id=new_request_id(now), created_ns=now)
    event = done.Done(request.id, request.model, 1, submitted=wire.encode(request))
    await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), wire.encode(event))
    lookup = RequestLookup(bus, Records(bus), RequestFinder(bus), 0.0, MemoryStreams(bus))
    note = deletions.Deletion("subject of its record")
    await bus.js.publish(f"$KV.{bus.subjects.bucket('deleted')}.{request.id}", wire.encode(note))
    await lookup.deleted.start(bus.tasks)
    with pytest.raises(ServingError) as caught:
        await lookup.find(request.id)
    assert caught.value.code is Code.request_not_found
    assert (await lookup.find(request.id, deleted=True)).record == event
    await lookup.deleted.stop()


@pytest.mark.parametrize("owner_there", [True, False])
async def test_what_a_restarted_broker_has_lost_is_asked_for_again_while_its_gateway_may_put_it_back(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, owner_there: bool
) -> None:
    """A client that re-attached at another gateway was told ``content_lost``, and its request ended well."""
    now, streams = time.time_ns(), MemoryStreams(bus)
    request = msgspec.structs.replace(request_of(), id=new_request_id(now), gateway="gw", no_store=True, created_ns=now)
    stored = wire.encode(contents.without_content(request, bytes(32)))
    subject = bus.subjects.request(request.model, "standard", request.id)
    await bus.js.publish(subject, stored, headers={"Nats-Msg-Id": request.id})
    lookup = RequestLookup(bus, Records(bus), RequestFinder(bus), 30.0, streams)

    async def answer(message: Msg) -> None:
        await message.respond(b"")

    if owner_there:
        await bus.nc.subscribe(bus.subjects.progress("gw"), cb=answer)
    else:
        await streams.open()  # they have just been made
    with pytest.raises(ServingError, match="ask again") as caught:
        await lookup.find(request.id)
    assert caught.value.code is Code.broker_unavailable
    if not owner_there:
        monkeypatch.setattr(lookups, "ABSENT_S", 0.0)
        with pytest.raises(ServingError) as caught:
            await lookup.find(request.id)
        assert caught.value.code is Code.content_lost
        streams.close()
