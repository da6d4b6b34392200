"""A gateway of two cells while the broker of one hangs, is away, or cannot be read yet."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway import run_gateway
from penstock.gateway.run_gateway import front_of
from penstock.gateway.service import cell as cell_module
from penstock.gateway.service import gateway as gateway_module
from penstock.gateway.service.cell import Cell
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.tasks import ProcessStop
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import cell_in, in_cell
from penstock.schemas.streams import PROMPTS
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_MSG_ID, Subjects, cell_namespace
from penstock.schemas.tokens import TokenItem
from penstock.schemas.wire import content_type, pack_tokens
from tests.gateway.nats.support import gateway_on
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4}'
SOON = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4, "timeout_s": 0.2}'


async def cell(gateway: Gateway, endpoint: str = "completion", body: bytes = BODY) -> int:
    """Which one a request would go to."""
    return cell_in((await gateway.prepare(endpoint, body)).request.id)


@pytest.fixture
async def second(make_broker: Callable[..., EmbeddedNats]) -> AsyncIterator[EmbeddedNats]:
    server = make_broker("second")
    await server.start()
    yield server
    if server.pid:
        os.kill(server.pid, signal.SIGCONT)


async def test_requests_wait_for_workers_but_not_for_a_broker_that_hangs(
    broker: EmbeddedNats, second: EmbeddedNats, subjects: Subjects, model: ModelDir
) -> None:
    async with gateway_on(broker, subjects, model, cells=[second], nearest_cell=1) as running:
        assert await cell(running.gateway) == 1, "no cell has workers or routers"
        assert second.pid
        os.kill(second.pid, signal.SIGSTOP)
        await eventually(lambda: not running.gateway.cells[1].answers)
        assert await cell(running.gateway) == 0
        os.kill(second.pid, signal.SIGCONT)
        await eventually(lambda: running.gateway.cells[1].answers)
        assert await cell(running.gateway) == 1


async def test_a_cell_whose_streams_come_later_holds_no_gateway_up(
    broker: EmbeddedNats, second: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_gateway, "CELL_S", 1.0)
    settings = GatewaySettings(
        nats_url=broker.url("operator"),
        namespace=pipeline.namespace,
        cells=2,
        cell_nats_urls=(second.url("operator"),),
    )
    async with asyncio.timeout(30):
        (home, other) = await run_gateway._links(settings, ProcessStop(bound_s=1.0))
    assert home.connecting is None
    connecting = other.connecting
    assert connecting is not None
    assert not connecting.done()
    there = Subjects(cell_namespace(pipeline.namespace, 1))
    async with opened(second, there), asyncio.timeout(30):  # makes them
        await connecting
    for link in (home, other):
        await run_gateway._close(link)


async def test_prompts_are_packed_where_their_stream_says_so(
    broker: EmbeddedNats, pipeline: Subjects, model: ModelDir
) -> None:
    async with gateway_on(broker, pipeline, model) as running:
        home = running.gateway.cells[0]
        for packs in (True, False):
            name = pipeline.stream("REQUESTS")
            info = await home.bus.js.stream_info(name)
            if not packs:  # as an earlier build has made it
                kept = {key: text for key, text in (info.config.metadata or {}).items() if not key.startswith("_nats.")}
                await home.bus.js.update_stream(info.config.evolve(metadata=without(kept, PROMPTS)))
            await eventually(lambda packs=packs: home.queues.packs is packs)
            request = (await running.gateway.prepare("completion", BODY)).request
            await running.gateway.submit(request)
            stored = await home.bus.js.get_last_msg(name, f"{pipeline.namespace}.request.>")
            assert requests.is_packed(stored.data) is packs
            assert requests.decode(stored.data) == request
            kind = requests.PackedRequest if packs else requests.GenerateRequest
            assert (stored.headers or {})[HEADER_CONTENT_TYPE] == content_type(kind)
            drawn = msgspec.structs.replace(
                request, id=requests.new_request_id(time.time_ns()), prompt=b"", digests=b""
            )
            await running.gateway.submit(drawn)  # as texts to embed, or an image
            stored = await home.bus.js.get_last_msg(name, f"{pipeline.namespace}.request.>")
            assert (stored.headers or {})[HEADER_CONTENT_TYPE] == content_type(requests.GenerateRequest)


def without(fields: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in fields.items() if key != name}


async def test_a_look_that_hangs_in_one_cell_delays_no_deadline_in_another(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir
) -> None:
    async with gateway_on(broker, subjects, model, cells=[broker], nearest_cell=0) as running:
        hanging = asyncio.Event()

        async def hang(*_: Any) -> None:
            hanging.set()
            await asyncio.Event().wait()

        running.gateway.cells[1]._completion.complete_idle = hang  # type: ignore[method-assign]
        await hanging.wait()
        request = (await running.gateway.prepare("completion", SOON)).request
        inflight = await running.gateway.submit(request)
        async with asyncio.timeout(20):
            with pytest.raises(ServingError, match="deadline"):
                await inflight.take()


async def test_while_the_home_broker_is_away_nothing_new_is_accepted(
    broker: EmbeddedNats, second: EmbeddedNats, subjects: Subjects, model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(second, subjects, model, cells=[broker], nearest_cell=1) as running:
        assert await cell(running.gateway) == 1
        await second.stop()
        await eventually(lambda: not running.gateway.cells[0].answers)
        monkeypatch.setattr(gateway_module, "LIMITS_S", 0.2)
        with pytest.raises(ServingError, match="broker of the first cell") as refused:
            await running.gateway.prepare("completion", BODY)
        assert refused.value.code is Code.broker_unavailable
        monkeypatch.setattr(gateway_module, "LIMITS_S", 60.0)
        waiting = asyncio.create_task(cell(running.gateway))
        await second.start()
        assert await waiting == 1, "a request waits for it"


async def test_a_consumer_that_is_missing_at_home_does_not_pass_for_a_broker_that_is_away(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir
) -> None:
    async with gateway_on(broker, subjects, model, cells=[broker], nearest_cell=1) as running:
        home = running.gateway.cells[0]
        await home.bus.js.delete_consumer(subjects.stream("REQUESTS"), "router-standard")
        await eventually(lambda: home.queues.lacks_consumer)
        home.queues.answered = False
        await eventually(lambda: home.answers)
        assert await cell(running.gateway) == 1


async def test_media_and_ids_that_are_needed_early_go_to_a_cell_that_serves(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(broker, subjects, model, cells=[broker], nearest_cell=1) as running:
        compacted = "compaction", b'{"model": "tiny", "input": "a b c"}'
        assert await cell(running.gateway, *compacted) == 1
        monkeypatch.setattr(running.gateway.fleet, "serves_in", lambda cell, name="": True)
        monkeypatch.setattr(Cell, "serves", property(lambda cell: cell.number == 0))
        assert await cell(running.gateway, *compacted) == 0


async def test_ids_name_the_only_cell_so_that_they_are_found_there_when_others_have_come(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir
) -> None:
    async with gateway_on(broker, subjects, model) as running:
        assert {await cell(running.gateway) for _ in range(8)} == {0}


async def test_a_cell_that_is_not_active_gets_no_request_but_its_ids_are_looked_for_there(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(broker, subjects, model, cells=[broker], nearest_cell=1, active_cells=1) as running:
        gateway = running.gateway
        monkeypatch.setattr(gateway.fleet, "best_of", lambda cells, name: [each for each in cells if each == 1])
        prepared = await gateway.prepare("completion", BODY)
        assert cell_in(prepared.request.id) == 0, "only the other one has workers"
        assert [each.accepts(prepared.request) for each in gateway.cells] == [True, False]
        assert not gateway.cells[1].serves, "requests of another cell could be run there"
        assert gateway.cell_of(in_cell(prepared.request.id, 1)) is gateway.cells[1]


def test_no_more_cells_can_be_active_than_there_are() -> None:
    with pytest.raises(ValueError, match="--active-cells 3 is more than --cells 2"):
        front_of(GatewaySettings(cells=2, active_cells=3))


async def test_a_cell_that_cannot_be_read_at_first_is_opened_later_once(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir
) -> None:
    failing = ["tokens", "workers"]

    def fail_twice(gateway: Gateway) -> None:
        tail, fleet = gateway.cells[1]._own.tail, gateway.fleet
        start, follow = tail.start, fleet.follow

        async def started(**options: Any) -> None:
            _fail_at("tokens")
            await start(**options)

        async def followed(cell: int) -> None:
            if cell:
                _fail_at("workers")
            await follow(cell)

        tail.start = started  # type: ignore[method-assign]
        fleet.follow = followed  # type: ignore[method-assign]

    def _fail_at(what: str) -> None:
        if what in failing:
            failing.remove(what)
            raise ServingError(Code.broker_unavailable, "it cannot be read yet")

    async with gateway_on(broker, subjects, model, cells=[broker], change=fail_twice) as running:
        await eventually(lambda: not failing and running.gateway.cells[1].opened)
        names = Counter(task.get_name() for task in asyncio.all_tasks())
        assert names["poll"] == names["sweep-others"] == len(running.gateway.cells), "each once in each cell"


@pytest.mark.parametrize("body", [BODY, BODY[:-1] + b', "no_store": true}'], ids=["stored", "no_store"])
async def test_requests_whose_places_others_have_taken_since_a_power_failure_are_stored_again(
    make_broker: Callable[..., EmbeddedNats],
    subjects: Subjects,
    model: ModelDir,
    monkeypatch: pytest.MonkeyPatch,
    body: bytes,
) -> None:
    """The stream has grown past them, and their jobs may be lost, too: their clients waited until the deadlines."""
    server = make_broker()
    await server.start()
    monkeypatch.setattr(cell_module, "LOST_AGAIN_S", 0.1)
    async with gateway_on(server, subjects, model) as running:
        home = running.gateway.cells[0]
        asked = [(await running.gateway.prepare("completion", body)).request for _ in range(3)]
        *_, streaming = [await running.gateway.submit(request) for request in asked]
        streaming.feed(TokenItem(streaming.request.id, 2, 0, 0, pack_tokens([7])), 1)
        home.bus.on_reconnect.remove(home._look_for_lost)
        server.kill()
        await eventually(lambda: not home.bus.connected)
        lose_end(server.data_dir, subjects.stream("REQUESTS"), 2)
        await server.start()
        await eventually(lambda: home.bus.connected)
        for number in range(3):
            await home.bus.js.publish(subjects.request("other", "standard", f"other-{number}"), b"")
        home.bus.on_reconnect.append(home._look_for_lost)
        publish, tries = home.publisher.publish, 0

        async def fails_first(*args: Any, **options: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 2:
                raise ServingError(Code.broker_unavailable, "its disk is full")
            return await publish(*args, **options)

        monkeypatch.setattr(home.publisher, "publish", fails_first)
        await home._store_lost_until_stored()
        entries = [each async for each in read(home.bus, subjects.stream("REQUESTS"), subjects.all("request"))]
        named = {each.headers[HEADER_MSG_ID]: each for each in entries if HEADER_MSG_ID in each.headers}
        assert list(named) == [request.id for request in asked]
        for attempt, request in enumerate(asked):  # the first was not lost, the second has no tokens
            stored = requests.decode(named[request.id].data)
            assert stored.interrupted_attempt == attempt
            stored = msgspec.structs.replace(stored, interrupted_attempt=0)
            assert (stored == request) == (not request.no_store)
            assert not (request.no_store and stored.prompt)
        await home.store_lost_again()
        assert (await home.bus.js.stream_info(subjects.stream("REQUESTS"))).state.last_seq == len(entries)
