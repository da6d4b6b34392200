"""Listing requests on a real broker: each one once, in pages of any size, whatever became of it."""

import time

import pytest

from penstock.gateway.http.request_list import body, parse
from penstock.gateway.request_log import listing
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.listing import Page, ProgressReader, RequestListing, page_of
from penstock.gateway.request_log.lookup import Records
from penstock.gateway.request_log.subscriptions import TokenSubscription
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.tasks import Tasks
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas import control
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.summary import Criteria
from penstock.schemas.tokens import TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from tests.infra.bus.support import eventually
from tests.penstock.log_tools.requests.support import accept, assign, end

ALL = Criteria()


async def none_yet(request: GenerateRequest) -> control.Progress:
    return control.Progress(-1, 0)


@pytest.fixture
def requests(bus: Bus) -> RequestListing:
    return RequestListing(bus, Records(bus), ProgressReader(bus, "gw-test", lambda request_id: []), none_yet)


async def pages(requests: RequestListing, criteria: Criteria, limit: int) -> list[str]:
    found: list[str] = []
    page = Page([], "start")
    while page.after:
        page = await page_of([requests], criteria, limit, "" if page.after == "start" else page.after)
        assert len(page.found) <= limit
        found += [each.id for each in page.found]
    return found


async def test_every_request_is_on_one_page_the_newest_first(bus: Bus, requests: RequestListing) -> None:
    sent = [await accept(bus) for _ in range(7)]
    for request in (sent[4], sent[0]):
        await end(bus, request, 1, 2)
    await end(bus, sent[2], code="internal")
    for limit in (1, 3, 7, 50):
        assert await pages(requests, ALL, limit) == [each.id for each in reversed(sent)]
    page = await page_of([requests], ALL, 50)
    states = {each.id: each.state for each in page.found}
    assert [states[each.id] for each in sent] == [
        *("done", "queued", "failed", "queued"),
        *("done", "queued", "queued"),
    ]


async def test_records_of_requests_that_are_no_longer_in_requests_follow(bus: Bus, requests: RequestListing) -> None:
    sent = [await accept(bus, created_ns=1_000_000_000 + n) for n in range(5)]
    for request in sent:
        await end(bus, request, 1)
    await bus.js.purge_stream(bus.subjects.stream("REQUESTS"))
    new = [await accept(bus) for _ in range(2)]
    for limit in (1, 2, 50):
        assert await pages(requests, ALL, limit) == [each.id for each in (*reversed(new), *reversed(sent))]
    await bus.js.purge_stream(bus.subjects.stream("REQUESTS"))
    assert await pages(requests, ALL, 2) == [each.id for each in reversed(sent)]


async def test_a_running_request_names_the_workers_that_streamed_before(bus: Bus) -> None:
    request = await accept(bus)
    tokens = TokenSubscription(bus, request.gateway, Tasks("test"))
    await tokens.start(new=True)
    try:
        progress = ProgressReader(bus, request.gateway, tokens.readers_of)
        tokens.subscribe(InflightRequest(request))
        streamed = [("w-1", 1, 0), ("w-2", 1, 1), ("w-2", 1, 2), ("w-3", 2, 3), ("w-1", 1, 3)]  # the last is void
        for seq, (worker, attempt, first) in enumerate(streamed):
            batch = TokenBatch(worker, 1, seq, (TokenItem(request.id, attempt, 0, first, pack_tokens([7])),))
            await bus.js.publish(bus.subjects.tokens(request.gateway), encode(batch))
        await eventually(lambda: tokens.tail.position >= len(streamed))
        listing = RequestListing(bus, Records(bus), progress, none_yet)
        (found,) = body(await page_of([listing], ALL, 9)).data
    finally:
        await tokens.close()
    assert (found.state, found.attempt, found.worker, found.output_tokens) == ("running", 2, "w-3", 4)
    assert found.workers == ["w-1", "w-2", "w-3"]


async def test_a_request_that_must_have_ended_and_has_no_record_is_in_an_unknown_state(
    bus: Bus, requests: RequestListing
) -> None:
    now = time.time_ns()
    lost = await accept(bus, deadline_ns=now - 61 * 10**9)
    late = await accept(bus, deadline_ns=now - 10**9)
    found = body(await page_of([requests], ALL, 9)).data
    assert [(each.id, each.state) for each in found] == [(late.id, "queued"), (lost.id, "unknown")]
    (only,) = body(await page_of([requests], Criteria(states=frozenset({"unknown"})), 9)).data
    assert only.id == lost.id
    timeline = await read_timeline(bus, lost.id)
    inspection = inspect(timeline)
    assert inspection.request.state == "unknown"
    assert "there is no record of it" in inspection.missing[0]
    assert inspect(await read_timeline(bus, late.id)).request.state == "queued"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"model": "other"}, [1]),
        ({"tenant": "acme"}, [1]),
        ({"state": "failed"}, [2]),
        ({"state": "queued,failed"}, [2, 0]),
        ({"code": "deadline_exceeded"}, [2]),
        ({"code": "any"}, [2]),
        ({"worker": "w-1"}, [2, 1]),
        ({"until": "2001-01-01T00:00:00Z"}, []),
        ({"since": "2001-01-01T00:00:00+01:00"}, [2, 1, 0]),
    ],
)
async def test_filters_narrow_the_list(
    bus: Bus, requests: RequestListing, query: dict[str, str], expected: list[int]
) -> None:
    sent = [await accept(bus), await accept(bus, model="other", tenant="acme"), await accept(bus)]
    await assign(bus, sent[0])
    await end(bus, sent[1], 1)
    await end(bus, sent[2], code="deadline_exceeded")
    assert await pages(requests, parse(query).criteria, 10) == [sent[n].id for n in expected]


async def test_a_page_reads_a_bounded_part_of_the_log(
    bus: Bus, requests: RequestListing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_READ", 4)
    monkeypatch.setattr(listing, "TOGETHER", 2)
    sent = [await accept(bus, user="her" if n == 0 else "") for n in range(9)]
    page = await page_of([requests], Criteria(user="her"), 10)
    assert (page.found, bool(page.after)) == ([], True)
    assert await pages(requests, Criteria(user="her"), 10) == [sent[0].id]


@pytest.mark.parametrize("after", ["x", "r", "rx", "d1", "d.5", "01a2"])
async def test_a_position_that_is_none_is_refused(requests: RequestListing, after: str) -> None:
    with pytest.raises(ServingError) as refused:
        await page_of([requests], ALL, 10, after)
    assert (refused.value.code, refused.value.param) == (Code.invalid_request, "after")


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "x"},
        {"limit": "101"},
        {"state": "lost"},
        {"since": "soon"},
        {"until": "-5"},
        {"q": "1"},
    ],
)
def test_wrong_parameters_are_named(query: dict[str, str]) -> None:
    with pytest.raises(ServingError) as refused:
        parse(query)
    assert refused.value.param == next(iter(query))
