"""KV events from engine to router on both event planes: the same index, whatever way they went."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.state.holders import keys_view
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import block_hashes, kv
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import Subjects
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import StepResult
from penstock.workers.engines.events.relay import EventPublisher, start_relay
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, routing
from tests.workers.support import BLOCK, REVISION, ControlledEngine, LogClient, WorkerHarness, request, run_worker

PLANES = ("nats", "zmq")
RANKS = 2
PROMPTS = [[n % 5, *range(n % 7 * 8), n] * 2 for n in range(24)]  # more than fits


@pytest.fixture
async def clients(log: LogClient) -> AsyncIterator[Clients]:
    made = Clients(log)
    yield made
    await made.stop()


class Clearing:
    """An engine that reports on request that it has dropped its cache."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.clears = False

    def step(self) -> StepResult:
        result: StepResult = self._engine.step()
        if self.clears:
            self.clears = False
            result.events = [kv.Cleared(), *result.events]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextlib.asynccontextmanager
async def worker(
    server: EmbeddedNats, subjects: Subjects, plane: str, *others: EventPublisher
) -> AsyncIterator[WorkerHarness]:
    """A worker on an event plane; ``others``: further publishers of its blocks."""
    inner: Any = Clearing(
        mock.build_data_parallel(
            RANKS, mock.MockOptions(vocab_size=1000, block_size=BLOCK, total_blocks=48, max_model_len=1000, speedup=0)
        )
    )
    outer = inner
    made: list[WorkerHarness] = []
    if plane == "zmq":
        sources = tuple(f"{each.endpoint}/{each.replay.rpartition(':')[2]}" for each in others)
        settings = WorkerSettings(event_plane="zmq", kv_events_port=0, kv_events_from=sources)
        outer = start_relay(inner, settings, block_hashes.root(REVISION), lambda: made[0].loop.wake() if made else None)
    async with run_worker(server, subjects, ControlledEngine(outer)) as one:
        one.inner = inner  # type: ignore[attr-defined]
        made.append(one)
        yield one


def index_of(routing: Routing) -> PrefixIndex:
    index = routing.router.cluster.caches.index
    assert index is not None
    return index


def contents(routing: Routing, worker: WorkerHarness) -> dict[int, tuple[int, int]]:
    """Blocks and the sum of their keys, by rank."""
    holdings = [holding for holding, _, _ in index_of(routing).feeds() if holding.target_id[0] == worker.id]
    return {holding.target_id[1]: (holding.blocks, holding.key_sum) for holding in holdings}


def held(worker: WorkerHarness) -> dict[int, int]:
    """Blocks in the caches of the engine itself, by rank."""
    dumps = [worker.inner.dump(rank) for rank in range(RANKS)]  # type: ignore[attr-defined]
    return {rank: sum(len(event.digests) // 16 for event in events) for rank, events in enumerate(dumps)}


async def run(log: LogClient, worker: WorkerHarness, prompt: list[int], rank: int) -> GenerateRequest:
    """Give a job to a rank as a router would; returns when it has ended."""
    asked = request(prompt, 2)
    await log.send_job(worker.id, asked, rank=rank)
    await log.end(asked)
    return asked


async def test_the_same_engine_gives_the_same_index_on_both_planes(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(routing(broker, pipeline))
        workers = [await stack.enter_async_context(worker(broker, pipeline, plane)) for plane in PLANES]
        for number, prompt in enumerate(PROMPTS):
            for each in workers:
                await run(log, each, prompt, number % RANKS)
        for each in workers:
            wanted = held(each)
            await eventually(
                lambda each=each, wanted=wanted: (  # type: ignore[misc]
                    {rank: count for rank, (count, _) in contents(router, each).items()} == wanted
                )
            )
        one, other = (contents(router, each) for each in workers)
        assert one == other
        assert all(count > 30 for count, _ in one.values())
        removed = 0
        for each in workers:
            mine = [batch for batch in log.kv if batch.worker == each.id]
            for rank in range(RANKS):
                seqs = [batch.seq for batch in mine if batch.rank == rank]
                assert seqs == list(range(len(seqs)))
            removed += sum(isinstance(event, kv.Removed) for batch in mine for event in batch.events)
        assert removed, "nothing was evicted"
        assert not index_of(router).holders.ragged


@pytest.mark.parametrize("plane", PLANES)
async def test_a_repeated_prompt_goes_to_its_worker_and_rank(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, clients: Clients, plane: str
) -> None:
    async with worker(broker, pipeline, plane) as here, routing(broker, pipeline) as router:
        await router.knows(here.id)
        places = []
        for number in range(6):
            prompt = [number] * 33
            places.append([])
            for turn in range(2):
                asked = request(prompt, 2)
                await clients.ask(asked)
                end = await log.end(asked)
                _, job = await clients.placed(asked)
                places[-1].append(job.decision.rank)
                assert end.usage.cached == (32 if turn else 0)
                place, keys = (here.id, job.decision.rank), keys_view(asked.digests)
                await eventually(lambda place=place, keys=keys: index_of(router).match(keys) == {place: 8})  # type: ignore[misc]
        assert all(first == second for first, second in places)
        assert {rank for first, _ in places for rank in (first,)} == {0, 1}


@pytest.mark.parametrize("plane", PLANES)
async def test_a_cleared_cache_is_forgotten(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, plane: str
) -> None:
    async with worker(broker, pipeline, plane) as here, routing(broker, pipeline) as router:
        await router.knows(here.id)
        first = await run(log, here, [1] * 41, 0)
        await eventually(lambda: index_of(router).held((here.id, 0)) == 10)
        here.inner.clears = True  # type: ignore[attr-defined]
        second = await run(log, here, [2] * 41, 0)
        await eventually(lambda: index_of(router).match(keys_view(second.digests)) == {(here.id, 0): 10})
        assert index_of(router).match(keys_view(first.digests)) == {}


@pytest.mark.parametrize("plane", PLANES)
async def test_a_router_that_starts_later_learns_all_ranks_by_a_dump_in_pages(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(broker, pipeline, plane) as here, routing(broker, pipeline) as early:
        await early.knows(here.id)
        for number, prompt in enumerate(PROMPTS):
            await run(log, here, prompt, number % RANKS)
        monkeypatch.setattr("penstock.workers.runners.token_runner.TokenRunner.dump", _small_pages)
        async with routing(broker, pipeline) as late:
            both = [index_of(each) for each in (early, late)]
            await eventually(lambda: both[0].checksum() == both[1].checksum())
            await run(log, here, [3] * 41, 1)
            await eventually(lambda: both[0].checksum() == both[1].checksum() and both[0].held((here.id, 1)) > 0)
            wanted = held(here)
            await eventually(lambda: {rank: both[1].held((here.id, rank)) for rank in range(RANKS)} == wanted)


async def _small_pages(runner: Any, page: int) -> kv.KvDump:
    found: kv.KvDump = await runner._dumper.page(page, 300)
    return found


async def test_a_cache_beside_the_engine_counts_until_it_dies(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    """Three hops: its publisher, the worker's stream, the router."""
    cache = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", block_size=BLOCK, rank=1)
    async with worker(broker, pipeline, "zmq", cache) as here, routing(broker, pipeline) as router:
        await router.knows(here.id)
        asked, elsewhere = request([7] * 41), request([8] * 41)
        cache.publish([kv.Stored(asked.digests)])
        cache.publish([kv.Stored(elsewhere.digests)])
        cache.publish([kv.Removed(elsewhere.digests)])
        own = await run(log, here, [9] * 41, 1)
        index = index_of(router)
        place = (here.id, 1)
        await eventually(lambda: index.held(place) == 20)
        assert index.match(keys_view(asked.digests)) == {place: 10}
        assert index.match(keys_view(elsewhere.digests)) == {}
        assert await asyncio.to_thread(cache.close)
        await eventually(lambda: index.held(place) == 10)
        assert index.match(keys_view(own.digests)) == {place: 10}
        assert index.awaiting_dump() == []
        seqs = [batch.seq for batch in log.kv if (batch.worker, batch.rank) == place]
        assert seqs == list(range(len(seqs)))


@pytest.mark.parametrize("plane", PLANES)
async def test_a_worker_that_registers_again_is_known_whole_though_it_publishes_before_its_dump(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, plane: str
) -> None:
    async with worker(broker, pipeline, plane) as here, routing(broker, pipeline) as router:
        await run(log, here, [1] * 41, 1)
        await here.die()
        await here.begin()
        await router.knows(here.id)
        await run(log, here, [2] * 41, 1)
        await eventually(lambda: index_of(router).held((here.id, 1)) == 20)
