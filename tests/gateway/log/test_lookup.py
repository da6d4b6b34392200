"""Finding a request again whose content was in memory storage, and is not there any more."""

import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.log.find import RequestFinder
from gateway.log.lookup import RequestLookup
from gateway.log.records import Records
from infra.broker.server import EmbeddedNats
from infra.bus.connection import Bus
from schemas import contents, done, wire
from schemas.errors import Code, ServingError
from schemas.ids import new_request_id
from schemas.subjects import Subjects
from tests.gateway.log.test_inflight import request_of
from tests.infra.bus.support import opened


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, subjects) as bus:
        yield bus


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
        request_of(), id=new_request_id(now), gateway="gone", no_store=True, in_memory=True, created_ns=now
    )
    stored = wire.encode(contents.without_content(request, bytes(32)))
    event = done.Done(request.id, request.model, 1, code=code, submitted=stored, left_out=("prompt", "tokens"))
    await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), wire.encode(event))
    lookup = RequestLookup(bus, Records(bus), RequestFinder(bus, bus.tasks.group("test")), grace_s)
    with pytest.raises(ServingError) as caught:
        await lookup.find(request.id)
    assert caught.value.code is expected
