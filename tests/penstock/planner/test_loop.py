"""The planner's shell on a real broker: its inputs, its decisions in the log, its lease."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import ClassVar

import msgspec
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import get_last, read
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.planner.connectors import ConnectorFailed
from penstock.planner.loop import TTL_S, NoDecision, PlannerLease, PlannerLoop, folded, moved
from penstock.planner.observe import STARVED_PERCENT, LoadReader
from penstock.planner.worker_counts import Planner
from penstock.schemas import done, fleet, plans
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.plans import Bounds, Planned, Pool, Role, Rules
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_SUMMARY, Subjects
from penstock.schemas.summary import header_of
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.planner.engines import engine
from tests.schemas.samples import REQUEST

RULES = Rules(
    ttft_ms=500.0, itl_ms=20.0, predictor="constant", interval_s=0.1, start_s=0.1, bounds={"aggregated": Bounds(1, 9)}
)
TIMINGS: dict[Role, object] = {"aggregated": engine()}


class Workers:
    """A connector that remembers what it was asked for, and fails if told to."""

    name: ClassVar[str] = "test"
    one_machine = True

    def __init__(self, failure: str = "") -> None:
        self.asked: list[dict[Role, int]] = []
        self.count = 1
        self._failure = failure

    async def counts(self) -> dict[Role, int]:
        return {"aggregated": self.count}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        self.asked.append(dict(targets))
        if self._failure:
            raise ConnectorFailed(self._failure)
        self.count = targets["aggregated"]


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with await connect(broker.url("operator"), role="operator", name="plan", namespace=subjects.namespace) as bus:
        await apply(bus.nc, topology(subjects))
        yield bus


async def register(bus: Bus, worker: str, **more: object) -> None:
    kept: dict[str, object] = {"model": "tiny", "role": "aggregated", "load": fleet.Load(waiting=3)}
    options = kept | more
    registration = fleet.Registration(
        worker=worker,
        engine="mock",
        epoch=1,
        block_size=32,
        total_blocks=100,
        slots=8,
        max_model_len=1000,
        **options,  # type: ignore[arg-type]
    )
    await bus.js.publish(bus.subjects.lease(worker), encode(registration))


async def serve(bus: Bus, count: int, model: str = "tiny", **changes: object) -> None:
    """Requests of 2,000 → 100 tokens, a quarter cached, that came and ended: TTFT 200 ms, 10 ms a token."""
    for number in range(count):
        request = msgspec.structs.replace(REQUEST, id=f"{model}-{time.time_ns()}-{number}", model=model, tenant="t")
        await bus.js.publish(bus.subjects.request(model, "standard", request.id), encode(request))
        began = 10**9
        event = done.Done(
            request.id,
            model,
            1,
            "w",
            (done.Outcome(pack_tokens([1]), "length"),),
            done.Usage(2000, 100, 500),
            done.Timings(created_ns=began, first_token_ns=began + 200_000_000, ended_ns=began + 1_190_000_000),
            submitted=encode(request),
        )
        event = msgspec.structs.replace(event, **changes)
        await bus.js.publish(bus.subjects.done("t", model, request.id), encode(event), headers=headers(event, request))


def headers(event: done.Done, request: GenerateRequest) -> dict[str, str]:
    return {HEADER_SUMMARY: header_of(event, request)}


async def test_workers_that_wait_for_cores_are_counted(bus: Bus) -> None:
    reader = LoadReader(bus, "tiny")
    await reader.begin()
    await register(bus, "w-1", load=fleet.Load(core_wait_percent=STARVED_PERCENT))
    await register(bus, "w-2", load=fleet.Load(core_wait_percent=STARVED_PERCENT - 1))
    seen = await reader.look()
    assert seen.pools == {"aggregated": Pool(ready=2, starved=1)}


async def acknowledge(bus: Bus) -> None:
    """As routers do: nothing waits."""
    subscription = await bus.js.pull_subscribe_bind("router-standard", bus.subjects.stream("REQUESTS"))
    while True:
        info = await subscription.consumer_info()
        if not info.num_pending:
            return
        for message in await subscription.fetch(info.num_pending, timeout=5):
            await message.ack_sync()


async def test_an_interval_is_read_from_log_and_fleet(bus: Bus) -> None:
    await serve(bus, 2)
    reader = LoadReader(bus, "tiny")
    await reader.begin()
    await serve(bus, 5)
    await serve(bus, 1, code="worker_lost")  # it arrived, and says nothing of lengths
    await acknowledge(bus)
    await register(bus, "w-1")
    await register(bus, "w-2", state=fleet.WorkerState.draining)
    await register(bus, "w-3", model="other")
    seen = await reader.look({"aggregated": 3})
    assert (seen.arrived, seen.ended, seen.queued) == (6, 6, 0)
    assert (seen.isl, seen.osl, seen.hit_rate) == (2000.0, 100.0, 0.25)
    assert seen.ttft is not None
    assert seen.itl is not None
    assert (seen.ttft.p95, seen.itl.mean) == (200.0, 10.0)
    assert seen.pools == {"aggregated": Pool(ready=1, starting=2, waiting=3)}
    again = await reader.look()
    assert (again.arrived, again.ended, again.ttft) == (0, 0, None)


async def test_requests_that_no_worker_has_are_counted(bus: Bus) -> None:
    reader = LoadReader(bus, "tiny")
    await reader.begin()
    await serve(bus, 4)
    assert (await reader.look()).queued == 4


async def test_of_several_models_each_has_its_part_of_the_requests(bus: Bus) -> None:
    reader = LoadReader(bus, "tiny")
    await reader.begin()
    await serve(bus, 3)
    await serve(bus, 9, model="other")
    seen = await reader.look()
    assert (seen.arrived, seen.ended) == (3, 3)


def loop(bus: Bus, workers: Workers, say: Callable[[Planned], None], name: str = "plan-1") -> PlannerLoop:
    planner = Planner(RULES, TIMINGS)  # type: ignore[arg-type]
    return PlannerLoop(bus, planner, workers, planner_id=name, model="tiny", say=say)


async def logged(bus: Bus) -> list[Planned]:
    stream, subject = bus.subjects.stream("PLAN"), bus.subjects.plan("tiny")
    return [plans.decode(entry.data) async for entry in read(bus, stream, subject)]


async def keep_serving(bus: Bus) -> None:
    while True:
        await serve(bus, 1)
        await asyncio.sleep(0.001)


async def test_decisions_are_carried_out_and_logged_with_all_they_depend_on(bus: Bus) -> None:
    await register(bus, "w-1")
    workers, said = Workers(), list[Planned]()
    load = asyncio.create_task(keep_serving(bus))
    async with asyncio.timeout(20):
        await loop(bus, workers, said.append).run(decisions=4)
    load.cancel()
    decisions = await logged(bus)
    assert decisions == said
    assert len(decisions) == 4
    assert all(each.decision.observed.one_machine for each in decisions)
    assert [each for each in map(moved, (one.decision for one in decisions)) if each] == workers.asked
    assert workers.count > 1
    planner = Planner(RULES, TIMINGS)  # type: ignore[arg-type]
    state = planner.begin()
    for planned in decisions:  # the same inputs decide the same again
        after, decision = planner.step(state, planned.decision.observed, planned.at_ns / 1e9)
        assert decision == planned.decision
        state = folded(planner, state, planned)
        assert state == after


async def test_a_change_that_fails_is_in_the_log_and_tried_again(bus: Bus) -> None:
    await register(bus, "w-1")
    workers = Workers(failure="no GPU is free")
    load = asyncio.create_task(keep_serving(bus))
    async with asyncio.timeout(20):
        await loop(bus, workers, lambda planned: None).run(decisions=3)
    load.cancel()
    failed = [planned for planned in await logged(bus) if planned.failure]
    assert {planned.failure for planned in failed} == {"no GPU is free"}
    assert len(failed) == len(workers.asked) > 1


async def test_an_unreadable_decision_and_a_broker_that_is_away_do_not_end_the_planner(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.planner.loop.STANDBY_S", 0.02)
    await register(bus, "w-1")
    await bus.js.publish(bus.subjects.plan("tiny"), b"of another build")
    begin, failures = LoadReader.begin, [ServingError(Code.broker_unavailable, "away")]

    async def begin_later(reader: LoadReader) -> None:
        if failures:
            raise failures.pop()
        await begin(reader)

    monkeypatch.setattr(LoadReader, "begin", begin_later)
    said = list[Planned]()
    load = asyncio.create_task(keep_serving(bus))
    async with asyncio.timeout(20):
        await loop(bus, Workers(), said.append).run(decisions=1)
    load.cancel()
    assert len(said) == 1
    assert not failures


async def test_so_many_decisions_are_not_waited_for_where_none_can_be_made(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.planner.loop.STANDBY_S", 0.02)
    monkeypatch.setattr("penstock.planner.loop.TAKEN_OVER_S", 0.12)
    await register(bus, "w-1")
    said = list[Planned]()
    async with asyncio.timeout(20):
        with pytest.raises(NoDecision, match=r"no decision in 3 intervals of 0.1 s: no request has ended yet"):
            await loop(bus, Workers(), said.append).run(decisions=1)
        other = PlannerLease(bus, "tiny", "other")
        assert await other.take() == "", "the lease was given up"
        with pytest.raises(NoDecision, match=r"another planner, other, decides for tiny"):
            await loop(bus, Workers(), said.append).run(decisions=1)
        await other.give_up()

        async def fail(reader: LoadReader, counts: object = None) -> None:
            raise ServingError(Code.broker_unavailable, "away")

        monkeypatch.setattr(LoadReader, "look", fail)
        with pytest.raises(NoDecision, match=r"the load is unknown \(.*away"):
            await loop(bus, Workers(), said.append).run(decisions=1)
    assert said == []


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it is told from within the loop under test
        await asyncio.sleep(0.02)


async def test_one_planner_decides_and_another_takes_over(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planner.loop.STANDBY_S", 0.02)
    await register(bus, "w-1")
    load = asyncio.create_task(keep_serving(bus))
    told: dict[str, list[Planned]] = {"plan-1": [], "plan-2": []}
    first = asyncio.create_task(loop(bus, Workers(), told["plan-1"].append, "plan-1").run())
    async with asyncio.timeout(20):
        await until(lambda: len(told["plan-1"]) > 0)
        second = asyncio.create_task(loop(bus, Workers(), told["plan-2"].append, "plan-2").run(decisions=1))
        await until(lambda: len(told["plan-1"]) > 2)
        assert told["plan-2"] == []
        first.cancel()  # in order: the lease is given up
        await second
    load.cancel()
    assert [planned.planner for planned in await logged(bus)][-1] == "plan-2"


async def test_a_lease_is_the_brokers_and_expires(bus: Bus) -> None:
    mine, other = PlannerLease(bus, "tiny", "a"), PlannerLease(bus, "tiny", "b")
    assert await mine.take() == ""
    assert mine.held
    assert await other.take() == "a"
    assert not other.held
    assert await mine.take() == ""
    last = await get_last(bus, f"KV_{bus.subjects.bucket('planners')}", bus.subjects.planner("tiny"))
    assert last is not None
    assert last.headers["Nats-TTL"] == str(TTL_S)
    # Somebody else has it, as after an expiry that was not noticed: the next renewal fails, and it is no longer held.
    await bus.js.publish(bus.subjects.planner("tiny"), b"b")
    assert await mine.take() == "?"
    assert not mine.held
    assert await mine.take() == "b"
    assert await other.take() == ""
    await other.give_up()
    assert await mine.take() == ""
    assert await PlannerLease(bus, "another", "c").take() == ""
