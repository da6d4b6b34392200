"""A worker reads the beginning of a prompt from another one's prefix cache, or computes it whatever goes wrong.

As in ``test_disaggregation``, the bytes move over the loopback backend, and the mock engine refuses blocks whose
content is not that of their tokens.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import control, wire
from penstock.schemas.jobs import Move
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import Subjects
from penstock.workers.disagg import owner, reader
from tests.infra.bus.support import eventually
from tests.workers.kv_transfer.loopback import LoopbackNetwork
from tests.workers.support import BLOCK, LogClient, WorkerHarness, answer, engine, request, run_worker

PREFIX = list(range(1, 61))  # 15 blocks
FAST = {"transfer_timeout_s": 0.3, "quarantine_s": 2.0, "move_prefixes": "on"}


class Two(NamedTuple):
    network: LoopbackNetwork
    source: WorkerHarness
    reader: WorkerHarness

    def move(self, blocks: int = 15) -> Move:
        return Move(self.source.id, blocks, "on the same host")

    async def free(self) -> None:
        await self.source.frees_everything()
        await self.reader.frees_everything()


@asynccontextmanager
async def two_workers(
    broker: EmbeddedNats, pipeline: Subjects, *, pools: tuple[int, int] = (512, 512), **settings: Any
) -> AsyncIterator[Two]:
    """``pools``: blocks of the source and of the reader."""
    network = LoopbackNetwork("here")
    options: dict[str, Any] = FAST | settings
    first, second = (engine(memory_block_bytes=64, total_blocks=pool) for pool in pools)
    async with (
        run_worker(broker, pipeline, first, network=network, **options) as source,
        run_worker(broker, pipeline, second, network=network, **options) as reader,
    ):
        yield Two(network, source, reader)


@pytest.fixture
async def two(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Two]:
    async with two_workers(broker, pipeline) as made:
        yield made


async def computed_at(log: LogClient, worker: WorkerHarness, prompt: list[int] = PREFIX) -> None:
    """A worker has answered a request with this prompt, so its blocks are cached there."""
    first = request(prompt)
    await log.send_job(worker.id, first)
    await log.end(first)


async def asked_with_move(
    log: LogClient, two: Two, move: Move | None = None, **more: Any
) -> tuple[GenerateRequest, int]:
    """The reader has answered a prompt that goes on behind the prefix; also how many of its tokens were cached."""
    asked = request([*PREFIX, 900, 901], **more)
    await log.send_job(two.reader.id, asked, move=move or two.move())
    end = await log.end(asked)
    assert (end.worker, end.code) == (two.reader.id, "")
    for choice in range(asked.n):
        assert log.streamed(asked, choice) == answer(asked, choice=choice)
    return asked, end.usage.cached


def failures(worker: WorkerHarness) -> dict[str, float]:
    family = worker.metrics.moves.failed.collect()[0]
    return {each.labels["cause"]: each.value for each in family.samples if each.name.endswith("_total") and each.value}


def moved_blocks(worker: WorkerHarness) -> float:
    return float(worker.metrics.moves.blocks.collect()[0].samples[0].value)


async def test_a_prefix_is_read_and_the_rest_computed(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    asked, cached = await asked_with_move(log, two)
    assert cached == len(PREFIX)
    assert moved_blocks(two.reader) == 15
    assert await log.states(asked, "read", "released") == ["offered", "leased", "read", "released"]
    await two.free()


async def test_what_was_read_is_cached_and_announced_there(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    asked, _ = await asked_with_move(log, two)
    events = [event for batch in log.kv if batch.worker == two.reader.id for event in batch.events]
    assert b"".join(event.digests for event in events).startswith(asked.digests)  # type: ignore[union-attr]
    again, cached = await asked_with_move(log, two)
    assert cached == len(PREFIX)
    assert await log.handoffs(again) == [], "the source is not asked for what is here"
    await two.free()


async def test_only_what_the_reader_lacks_is_read(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    await computed_at(log, two.reader, PREFIX[:16])
    _, cached = await asked_with_move(log, two)
    assert (cached, moved_blocks(two.reader)) == (len(PREFIX), 15 - 4)
    await two.free()


async def test_of_blocks_that_were_evicted_meanwhile_the_rest_is_read(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source, PREFIX[:40])
    _, cached = await asked_with_move(log, two)
    assert (cached, moved_blocks(two.reader)) == (40, 10)
    assert failures(two.reader) == {}
    await two.free()


async def test_a_prompt_is_never_read_to_its_last_token(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    asked = request(PREFIX)
    await log.send_job(two.reader.id, asked, move=two.move())
    end = await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert end.usage.cached == len(PREFIX) - BLOCK
    await two.free()


async def test_several_choices_share_what_was_read(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    _, cached = await asked_with_move(log, two, n=3)
    assert cached == len(PREFIX)
    await two.free()


async def test_two_readers_of_one_source_at_once(broker: EmbeddedNats, pipeline: Subjects, log: LogClient) -> None:
    async with two_workers(broker, pipeline) as two:
        await computed_at(log, two.source)
        asked = [request([*PREFIX, 800 + number]) for number in range(4)]
        for each in asked:
            await log.send_job(two.reader.id, each, move=two.move())
        for each in asked:
            await log.end(each)
            assert log.streamed(each) == answer(each)
        await two.free()


async def test_blocks_that_are_not_cached_are_computed(log: LogClient, two: Two) -> None:
    _, cached = await asked_with_move(log, two)
    assert (cached, failures(two.reader)) == (0, {"stale": 1})
    await two.free()


async def test_a_source_that_is_gone_costs_a_moment_and_is_not_asked_again(log: LogClient, two: Two) -> None:
    for first in (100, 200):
        asked = request(list(range(first, first + 62)))
        await log.send_job(two.reader.id, asked, move=Move("nobody", 15))
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)
    assert failures(two.reader) == {"timeout": 1, "silent": 1}
    await two.free()


async def test_what_a_late_source_has_pinned_is_released_at_once(
    log: LogClient, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await computed_at(log, two.source)
    monkeypatch.setattr(reader, "PIN_S", 0.0)
    asked, cached = await asked_with_move(log, two)
    assert (cached, failures(two.reader)) == (0, {"timeout": 1})
    assert await log.states(asked, "released") == ["offered", "released"]
    await two.free()


async def test_a_source_that_dies_while_it_is_read(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    assert two.source.transport is not None
    agent = two.source.transport.endpoint.agent
    two.network.stall(agent)
    asked = request([*PREFIX, 900])
    await log.send_job(two.reader.id, asked, move=two.move())
    await eventually(lambda: two.reader.transport is not None and two.reader.transport.stats().live)
    two.network.kill(agent)
    end = await log.end(asked)
    assert (end.code, log.streamed(asked)) == ("", answer(asked))
    assert await log.failure(asked) == "peer_lost"
    await two.free()


async def test_a_stalled_read_ends_in_time_and_its_blocks_wait_in_quarantine(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    assert two.source.transport is not None
    two.network.stall(two.source.transport.endpoint.agent)
    asked = request([*PREFIX, 900])
    await log.send_job(two.reader.id, asked, move=two.move())
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert failures(two.reader) == {"timeout": 1}
    assert (await two.reader.stats()).pinned_blocks == 15, "nobody else gets what may still be written to"
    two.network.resume(two.source.transport.endpoint.agent)
    await two.free()


async def test_a_request_that_is_cancelled_while_its_prefix_is_read(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    assert two.source.transport is not None
    agent = two.source.transport.endpoint.agent
    two.network.stall(agent)
    asked = request([*PREFIX, 900])
    await log.send_job(two.reader.id, asked, move=two.move())
    await eventually(lambda: two.reader.transport is not None and two.reader.transport.stats().live)
    await two.reader.session.on_cancel(asked.id, "gone")
    end = await log.end(asked)
    assert (end.code, log.streamed(asked)) == ("cancelled", [])
    two.network.resume(agent)
    await two.free()


async def test_without_room_the_prefix_is_computed(broker: EmbeddedNats, pipeline: Subjects, log: LogClient) -> None:
    async with two_workers(broker, pipeline, pools=(512, 30)) as two:
        await computed_at(log, two.source)
        other = request(list(range(500, 580)), max_tokens=30)
        two.reader.engine.hold()
        await log.send_job(two.reader.id, other)
        two.reader.engine.allow(1)
        await log.has_streamed(other)
        asked = request([*PREFIX, 900])
        await log.send_job(two.reader.id, asked, move=two.move())

        def failed_after_a_step() -> bool:
            two.reader.engine.allow(1)
            return bool(failures(two.reader))

        await eventually(failed_after_a_step)
        two.reader.engine.resume()
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)
        assert failures(two.reader) == {"refused": 1}
        await two.free()


async def test_a_source_in_the_middle_of_a_step_answers_at_once(log: LogClient, two: Two) -> None:
    """Blocks are found without the engine; what runs there is not stopped, nor waited for."""
    await computed_at(log, two.source)
    two.source.engine.hold()
    running = request(list(range(300, 310)), max_tokens=4)
    await log.send_job(two.source.id, running)
    await eventually(lambda: two.source.session.requests.running)
    _, cached = await asked_with_move(log, two)
    assert cached == len(PREFIX)
    two.source.engine.resume()
    await log.end(running)
    await two.free()


async def test_a_source_pins_a_bounded_number_of_prefixes(
    log: LogClient, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await computed_at(log, two.source)
    monkeypatch.setattr(owner, "MOST_PINS", 1)
    names = request(PREFIX).digests
    subject = log.bus.subjects.control(two.source.id)

    async def pin(ticket: str) -> control.PrefixPinned:
        order = control.PinPrefix(ticket, two.reader.id, names, 30.0)
        return control.decode_pinned((await log.bus.nc.request(subject, wire.encode(order), timeout=5)).data)

    assert (await pin("a:1:prefix")).ticket is not None
    assert (await two.source.stats()).pinned_blocks == 15
    assert "1 at most" in (await pin("b:1:prefix")).cause
    await log.bus.nc.request(subject, wire.encode(control.Release("a:1:prefix")), timeout=5)
    assert (await pin("c:1:prefix")).ticket is not None


async def test_pins_of_a_reader_that_forgets_them_end_with_their_lease(log: LogClient, two: Two) -> None:
    await computed_at(log, two.source)
    order = control.PinPrefix("a:1:prefix", "somebody", request(PREFIX).digests, 0.2)
    await log.bus.nc.request(log.bus.subjects.control(two.source.id), wire.encode(order), timeout=5)
    await two.source.frees_everything()


async def test_a_worker_that_moves_no_prefixes_computes_and_pins_none(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with two_workers(broker, pipeline, move_prefixes="off") as two:
        await computed_at(log, two.source)
        _, cached = await asked_with_move(log, two)
        assert cached == 0
        assert failures(two.reader) == {}
        order = control.PinPrefix("a:1:prefix", two.reader.id, request(PREFIX).digests, 5.0)
        reply = await log.bus.nc.request(log.bus.subjects.control(two.source.id), wire.encode(order), timeout=5)
        assert control.decode_pinned(reply.data).ticket is None


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_moves_between_small_caches_answers_are_right_and_nothing_is_left_held(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of few families in both directions, evicted as they are read, some cancelled, one agent stalled."""
    # A source that is late, as on a loaded machine, would not be asked again.
    monkeypatch.setattr("penstock.workers.disagg.reader.PIN_S", 5.0)
    rng = Random(seed)
    async with two_workers(broker, pipeline, pools=(70, 50)) as two:
        workers = [two.source, two.reader]
        asked: list[GenerateRequest] = []
        for number in range(60):
            reader = rng.randrange(2)
            family = 1 + 100 * rng.randrange(4)
            prompt = list(range(family, family + rng.randint(20, 90)))
            each = request([*prompt, 900 + number], max_tokens=rng.randint(1, 6))
            asked.append(each)
            move = Move(workers[1 - reader].id, len(prompt) // BLOCK)
            await log.send_job(workers[reader].id, each, move=move)
            if rng.random() < 0.2:
                await workers[reader].session.on_cancel(each.id, "gone")
            stalled = workers[rng.randrange(2)].transport
            if number % 20 == 10 and stalled is not None:
                two.network.stall(stalled.endpoint.agent)
            elif number % 20 == 15:
                for every in workers:
                    assert every.transport is not None
                    two.network.resume(every.transport.endpoint.agent)
            if rng.random() < 0.3:
                await log.end(each)
        for each in asked:
            end = await log.end(each)
            assert end.code in ("", "cancelled")
            assert log.streamed(each) == answer(each)[: len(log.streamed(each))]
            assert end.code or log.streamed(each) == answer(each)
        assert moved_blocks(two.source) + moved_blocks(two.reader) > 0
        await two.free()
        assert not any(each.session.runner.holds_leases for each in workers)
