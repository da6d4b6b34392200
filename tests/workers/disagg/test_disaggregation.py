"""Two workers and one request between them, on a real nats-server: how the handoff goes, and how it fails.

The bytes move over the loopback backend, which can be stalled and killed at will; NIXL does in tests/pipeline.
The mock engine refuses blocks whose content is not that of their tokens, so no answer is right by chance.
"""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from zlib import crc32

import msgspec
import pytest
from blake3 import blake3

from penstock.infra.bus import object_store
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import block_hashes, control, jobs, wire
from penstock.schemas.done import EarlierRevision
from penstock.schemas.errors import Code
from penstock.schemas.fleet import FIXED, WeightsState, WorkerState
from penstock.schemas.jobs import Move, Stage
from penstock.schemas.requests import GenerateRequest, Media, Sampling
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import PROMPT as PROMPT_ITEM
from penstock.schemas.trace import Trace
from penstock.schemas.transfer import MIXED, Prefilled, Ticket
from penstock.workers.disagg import block_reserver, disaggregation
from penstock.workers.disagg.block_reserver import AnnouncedPrompts
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import BlockReservation
from penstock.workers.engines.mock.executor import expected_tokens
from penstock.workers.engines.mock.memory import embedding
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.kv_transfer.transport_protocol import TransferError
from penstock.workers.session.process import GRACE_S
from tests.infra.bus.support import eventually
from tests.workers.engines.native import models
from tests.workers.kv_transfer.loopback import LoopbackNetwork
from tests.workers.support import (
    BLOCK,
    DRAWN,
    REVISION,
    VOCABULARY,
    ControlledEngine,
    LogClient,
    WorkerHarness,
    answer,
    engine,
    ids,
    request,
    run_worker,
)

PROMPT = list(range(1, 31))  # seven full blocks and a rest
FAST = {"transfer_timeout_s": 0.3, "handoff_lease_s": 2.0, "quarantine_s": 2.0}


class Pair(NamedTuple):
    network: LoopbackNetwork
    prefill: WorkerHarness
    decode: WorkerHarness

    @property
    def route(self) -> tuple[Stage, ...]:
        return (Stage("decode", self.decode.id),)

    async def free(self) -> None:
        await self.prefill.frees_everything()
        await self.decode.frees_everything()


@asynccontextmanager
async def paired(
    broker: EmbeddedNats,
    pipeline: Subjects,
    *,
    host: str = "here",
    pools: tuple[int, int] = (512, 512),
    **settings: Any,
) -> AsyncIterator[Pair]:
    """``pools``: blocks of prefill and of decode."""
    network = LoopbackNetwork(host)
    options: dict[str, Any] = FAST | settings
    first, second = (engine(memory_block_bytes=64, total_blocks=pool) for pool in pools)
    async with (
        run_worker(broker, pipeline, first, network=network, role="prefill", **options) as prefill,
        run_worker(broker, pipeline, second, network=network, role="decode", **options) as decode,
    ):
        yield Pair(network, prefill, decode)


@pytest.fixture
async def pair(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Pair]:
    async with paired(broker, pipeline) as made:
        yield made


async def send_jobs(log: LogClient, pair: Pair, asked: GenerateRequest, attempt: int = 1) -> None:
    await log.send_job(pair.prefill.id, asked, attempt, role="prefill", route=pair.route)


async def handed(log: LogClient, asked: GenerateRequest) -> Prefilled:
    """What prefill sent to decode."""
    s = log.bus.subjects
    found = [jobs.decode(entry.data) async for entry in read(log.bus, s.stream("WORK"), s.all("work"))]
    (message,) = [each for each in found if isinstance(each, Prefilled) and each.request == asked.id]
    return message


async def computed(run_worker: WorkerHarness) -> int:
    """Prompt tokens that a worker took from its cache, since start."""
    return int((await run_worker.stats()).hit_tokens)


# -- the way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 30, 32, 33])
async def test_decode_continues_after_the_token_that_prefill_streamed(log: LogClient, pair: Pair, length: int) -> None:
    asked = request(list(range(1, length + 1)))
    await send_jobs(log, pair, asked)
    end = await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert (end.worker, end.attempt, end.code) == (pair.decode.id, 1, "")
    assert end.timings.started_ns <= end.timings.first_token_ns <= end.timings.ended_ns
    batches = {batch.worker: batch for batch in log.batches}
    assert [item.first for item in batches[pair.prefill.id].items] == [0]
    assert all(item.first > 0 for batch in log.batches if batch.worker == pair.decode.id for item in batch.items)
    states = await log.states(asked, "read", "released")
    assert sorted(states) == ["leased", "offered", "read", "released"]
    await pair.free()


@pytest.mark.parametrize("host", ["here", ""], ids=["read", "written"])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
async def test_sliding_windows_go_with_the_handoff(
    log: LogClient, broker: EmbeddedNats, pipeline: Subjects, tmp_path: Path, kind: str, host: str
) -> None:
    """Of an engine with two pools, or with one of sliding layers only; and a prefix is read from the other worker."""
    options = NativeOptions(block_size=BLOCK, kv_blocks=100, device="cpu")
    directory = models.save(kind, tmp_path)
    first, second = (ControlledEngine(build(str(directory), options)) for _ in range(2))
    network, words = LoopbackNetwork(host), list(models.prompt(41))
    async with (
        run_worker(broker, pipeline, first, network=network, role="prefill", **FAST) as prefill,
        run_worker(broker, pipeline, second, network=network, role="decode", **FAST) as decode,
    ):
        pair = Pair(network, prefill, decode)
        asked = request(words, 20)
        await send_jobs(log, pair, asked)
        end = await log.end(asked)
        assert log.streamed(asked) == models.expected(directory, tuple(words), 20)
        assert (end.worker, end.code) == (decode.id, "")
        assert (await decode.stats()).prompt_tokens == (await decode.stats()).hit_tokens == len(words)
        lines = await log.states(asked, "read", "released")
        assert sorted(lines) == ["leased", "offered", "read", "released"]
        ticket = (await handed(log, asked)).ticket
        assert len(ticket.blocks) == 11 * 4
        assert len(ticket.windows) == 4 * (11 - (41 - {"gemma3": 8, "mistral": 12}[kind] + 1) // BLOCK)
        if host:
            longer = request([*words, *log.streamed(asked), 7], 9)
            await log.send_job(prefill.id, longer, move=Move(decode.id, 15, "on the same host"), role="prefill")
            await log.end(longer)
            assert (await prefill.stats()).hit_tokens == 60
        await pair.free()


async def test_what_was_handed_off_is_freed_without_a_garbage_collection(log: LogClient, pair: Pair) -> None:
    """Full collections are rare in a process that serves."""
    asked = [request(PROMPT) for _ in range(8)]
    ids = {each.id for each in asked}

    def left() -> set[str]:
        found = (each for each in gc.get_objects() if type(each) is SequenceState)
        return {each.request_id for each in found if each.request_id in ids}

    gc.collect()  # what earlier tests left may have the same ids
    gc.disable()
    try:
        for each in asked:
            await send_jobs(log, pair, each)
            await log.end(each)
        await eventually(lambda: len(left()) <= 3)  # locals may still refer to the last ones
    finally:
        gc.enable()


async def test_a_record_has_the_brokers_times_where_two_workers_clocks_differ(log: LogClient, pair: Pair) -> None:
    ahead_s = (40, 20)
    for worker, seconds in zip((pair.prefill, pair.decode), ahead_s, strict=True):
        worker.bus.clock.offset_ns = seconds * 10**9
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    times, sent = (await log.end(asked)).timings, await handed(log, asked)
    assert (times.started_ns, times.first_token_ns) == (sent.started_ns, sent.first_token_ns)
    assert 10 < (times.started_ns - time.time_ns()) / 1e9 < 40


async def test_each_stage_of_a_traced_request_leaves_its_own_stamps(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT, trace=Trace())
    await send_jobs(log, pair, asked)
    end = await log.end(asked)
    before, after = (await handed(log, asked)).stamps, end.stamps
    assert before is not None
    assert after is not None
    assert 0 < before.received_ns <= before.started_ns <= before.first_token_ns <= after.received_ns
    assert after.received_ns <= after.started_ns <= after.first_token_ns <= end.timings.ended_ns
    assert end.timings.first_token_ns == before.first_token_ns  # the request's own
    plain = request(PROMPT[::-1])
    await send_jobs(log, pair, plain)
    assert (await log.end(plain)).stamps is None
    assert (await handed(log, plain)).stamps is None
    await pair.free()


async def test_choices_share_the_prompt_and_continue_apart(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT, n=3, sampling=DRAWN)
    await send_jobs(log, pair, asked)
    end = await log.end(asked)
    assert [ids(outcome.tokens) for outcome in end.choices] == [answer(asked, choice=choice) for choice in range(3)]
    assert end.usage.cached == 0
    await pair.free()


async def test_a_prompt_that_decode_knows_already_is_not_moved_again(log: LogClient, pair: Pair) -> None:
    first, second = request(PROMPT[:28]), request(PROMPT[:28])
    await send_jobs(log, pair, first)
    await log.end(first)
    await send_jobs(log, pair, second)
    end = await log.end(second)
    assert end.usage.cached == 24, "the last block is computed for its logits"
    assert [part.finish.cached_tokens for part in log.progress(first) if part.finish] == [0], "brought, not cached"
    states = await log.states(second, "released")
    assert states == ["offered", "released"]


async def test_only_what_is_missing_is_moved(log: LogClient, pair: Pair) -> None:
    first, second = request(PROMPT[:16]), request(PROMPT)
    for asked in (first, second):
        await send_jobs(log, pair, asked)
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)
    await log.states(second, "read", "released")
    (read,) = [line for line in await log.handoffs(second) if line.state == "read"]
    assert read.blocks == 8 - 4


async def test_an_answer_of_one_token_ends_at_prefill(log: LogClient, pair: Pair) -> None:
    await reserving(log, pair)
    heard = await announcements(log, pair)
    asked = request(PROMPT, max_tokens=1)
    await send_jobs(log, pair, asked)
    end = await log.end(asked)
    assert end.worker == pair.prefill.id
    assert log.streamed(asked) == answer(asked)
    assert await log.handoffs(asked) == []
    assert not heard, "decode would evict blocks for nothing"
    await pair.free()


async def test_a_job_without_a_route_is_done_whole_by_any_of_them(log: LogClient, pair: Pair) -> None:
    for worker_, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        asked = request(PROMPT)
        await log.send_job(worker_.id, asked, role=role)
        end = await log.end(asked)
        assert end.worker == worker_.id
        assert log.streamed(asked) == answer(asked)


async def test_a_resumed_request_is_handed_off_with_all_that_was_streamed(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT, max_tokens=12)
    whole = answer(asked)
    await log.publish_tokens(asked, 1, whole[:5])
    await log.send_job(
        pair.prefill.id, asked, 2, resume=(wire.pack_tokens(whole[:5]),), role="prefill", route=pair.route
    )
    await log.end(asked)
    assert log.streamed(asked) == whole
    await pair.free()


async def test_what_decode_adopted_is_in_its_cache_and_its_events(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    for worker in (pair.prefill.id, pair.decode.id):
        events = [event for batch in log.kv if batch.worker == worker for event in batch.events]
        assert b"".join(event.digests for event in events).startswith(asked.digests)  # type: ignore[union-attr]


async def test_over_tcp_the_owner_pushes(broker: EmbeddedNats, pipeline: Subjects, log: LogClient) -> None:
    async with paired(broker, pipeline, host="") as pair:
        asked = request(PROMPT, n=2, sampling=DRAWN)
        await send_jobs(log, pair, asked)
        end = await log.end(asked)
        assert [ids(outcome.tokens) for outcome in end.choices] == [answer(asked, choice=choice) for choice in range(2)]
        assert await log.states(asked, "read", "released") == ["offered", "leased", "read", "released"]
        assert pair.prefill.transport is not None
        assert pair.prefill.transport.stats().bytes_written
        await pair.free()


# -- failure ------------------------------------------------------------------------------------------------------


async def test_an_owner_that_is_gone_means_computing_again(log: LogClient, pair: Pair) -> None:
    assert pair.prefill.transport is not None
    pair.network.stall(pair.prefill.transport.endpoint.agent)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
    pair.network.kill(pair.prefill.transport.endpoint.agent)
    end = await log.end(asked)
    assert (end.worker, end.code) == (pair.decode.id, "")
    assert log.streamed(asked) == answer(asked)
    assert await log.failure(asked) == "peer_lost"
    await pair.free()


@pytest.mark.parametrize("lost", [False, True], ids=["brought", "computed again"])
async def test_a_prompt_is_scored_by_prefill_whatever_becomes_of_its_blocks(
    log: LogClient, pair: Pair, lost: bool
) -> None:
    asked = request(PROMPT, n=2, sampling=Sampling(temperature=0.0, prompt_logprobs=2))
    assert pair.prefill.transport is not None
    agent = pair.prefill.transport.endpoint.agent
    if lost:
        pair.network.stall(agent)
    await send_jobs(log, pair, asked)
    if lost:
        await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
        pair.network.kill(agent)
    end = await log.end(asked)
    assert [ids(outcome.tokens) for outcome in end.choices] == [answer(asked)] * 2
    assert end.worker == pair.decode.id
    scores = [(batch.worker, item) for batch in log.batches for item in batch.items if item.choice == PROMPT_ITEM]
    assert {worker for worker, _ in scores} == {pair.prefill.id}
    assert [value for _, item in scores for value in item.logprobs or ()] == [
        VOCABULARY.score(crc32(wire.pack_tokens(PROMPT[:at])), PROMPT[at], 2) for at in range(1, len(PROMPT))
    ]
    assert (await log.states(asked, "failed" if lost else "read"))[0] == "offered"


@pytest.mark.parametrize("host", ["here", ""], ids=["read", "write"])
async def test_a_stalled_transfer_ends_in_time_and_its_blocks_wait_in_quarantine(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, host: str
) -> None:
    async with paired(broker, pipeline, host=host) as pair:
        assert pair.prefill.transport is not None
        agent = pair.prefill.transport.endpoint.agent if host else pair.decode.transport.endpoint.agent  # type: ignore[union-attr]
        pair.network.stall(agent)
        asked = request(PROMPT)
        began = time.monotonic()
        await send_jobs(log, pair, asked)
        await log.end(asked)
        assert time.monotonic() - began < FAST["transfer_timeout_s"] + 3
        assert log.streamed(asked) == answer(asked)
        states = await log.states(asked, "offered", "quarantined", "failed")
        assert "leased" in states or host, "leading layers, which it may be reading, have no line of their own"
        assert (await pair.decode.stats()).reserved_blocks == 8
        assert (await pair.decode.stats()).pinned_blocks == 8, "nobody else gets what may still be written to"
        pair.network.resume(agent)  # its late data lands in the quarantined blocks
        await pair.decode.frees_everything()
        await log.states(asked, "settled", "released")
        again = request(PROMPT)
        await log.send_job(pair.decode.id, again, role="decode")
        await log.end(again)
        assert log.streamed(again) == answer(again)
        await pair.free()


async def test_no_earlier_session_s_writer_reaches_blocks_that_the_next_one_uses(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with paired(broker, pipeline, host="", quarantine_s=30.0) as pair:
        assert pair.decode.transport is not None
        agent = pair.decode.transport.endpoint.agent
        pair.network.stall(agent)
        asked = request(PROMPT)
        await send_jobs(log, pair, asked)
        await log.end(asked)
        assert (await pair.decode.stats()).reserved_blocks == 8
        await pair.decode.session.fence()
        await pair.decode.frees_everything()
        assert agent not in pair.network.agents, "what the owner still writes would land in blocks of others"
        await pair.decode.begin()
        after = request(list(range(100, 130)))
        await log.send_job(pair.decode.id, after, role="decode")
        await log.end(after)
        assert log.streamed(after) == answer(after)


async def test_a_quarantine_without_end_is_ended_by_a_new_agent(log: LogClient, pair: Pair) -> None:
    assert pair.prefill.transport is not None
    assert pair.decode.transport is not None
    pair.network.stall(pair.prefill.transport.endpoint.agent)
    old = pair.decode.transport.endpoint.agent
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    await pair.free()
    assert pair.decode.transport.endpoint.agent != old
    pair.network.resume(pair.prefill.transport.endpoint.agent)
    after = request(list(range(100, 130)))
    await send_jobs(log, pair, after)
    await log.end(after)
    assert "read" in await log.states(after, "read", "released")


async def test_a_lease_that_nobody_comes_for_expires(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT)
    nobody = (Stage("decode", "nobody"),)
    await log.send_job(pair.prefill.id, asked, role="prefill", route=nobody)
    await eventually(lambda: pair.prefill.session.runner.disaggregation.open_leases)
    assert (await pair.prefill.stats()).pinned_blocks == 8
    registered = pair.prefill.session.runner.registration(WorkerState.ready)
    use, pool = registered.load.connector, registered.transfer.pools["kv"]
    assert (use.leases, use.pinned_blocks, use.reserved_blocks) == (1, 8, 0)
    assert use.registered_bytes == pool.blocks * (pool.block_bytes + 4)
    await pair.prefill.frees_everything()
    assert await log.states(asked, "expired") == ["offered", "expired"]


@pytest.mark.parametrize(("mixed", "registered"), [(False, "fp8"), (True, MIXED)])
async def test_how_weights_are_quantized_is_registered_unless_kv_of_others_is_as_good(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch, mixed: bool, registered: str
) -> None:
    async with paired(broker, pipeline, mixed_quantization=mixed) as pair:
        runner = pair.prefill.session.runner
        monkeypatch.setattr(runner, "_info", msgspec.structs.replace(runner._info, quantization="fp8"))
        endpoint = runner.registration(WorkerState.ready).transfer
        assert (endpoint.quantization, endpoint.agent) == (registered, pair.prefill.transport.endpoint.agent)  # type: ignore[union-attr]


async def test_a_ticket_whose_lease_has_passed_is_not_read(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT)
    await log.send_job(pair.prefill.id, asked, role="prefill", route=(Stage("decode", "nobody"),))
    await log.states(asked, "expired")
    stored = await log.bus.js.get_last_msg(
        log.bus.subjects.stream("WORK"), log.bus.subjects.work("decode", "nobody"), direct=True
    )
    assert stored.data is not None
    await log.bus.js.publish(log.bus.subjects.work("decode", pair.decode.id), stored.data)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert await log.failure(asked) == "stale"


async def test_blocks_with_a_new_owner_are_recognised_after_the_read(log: LogClient, pair: Pair) -> None:
    """The lease is the first line of defence; this is the second: a ticket that lies about its lease."""
    asked = request(PROMPT)
    await log.send_job(pair.prefill.id, asked, role="prefill", route=(Stage("decode", "nobody"),))
    await log.states(asked, "expired")
    stored = await log.bus.js.get_last_msg(
        log.bus.subjects.stream("WORK"), log.bus.subjects.work("decode", "nobody"), direct=True
    )
    for start in range(100, 700, 30):  # until every block of the pool has been given out again
        other = request(list(range(start, start + 30)), max_tokens=90)
        await log.send_job(pair.prefill.id, other, role="prefill")
        await log.end(other)
    assert stored.data is not None
    message = jobs.decode(stored.data)
    assert isinstance(message, Prefilled)
    ticket = msgspec.structs.replace(message.ticket, lease_ns=time.time_ns() + 10**10)
    lying = msgspec.structs.replace(message, ticket=ticket)
    await log.bus.js.publish(log.bus.subjects.work("decode", pair.decode.id), wire.encode(lying))
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert await log.failure(asked) == "stale"
    await pair.free()


async def test_without_room_at_decode_the_handoff_waits_until_there_is_some(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with paired(broker, pipeline, pools=(512, 16)) as pair:
        long = request(list(range(500, 540)), max_tokens=20)
        pair.decode.engine.hold()
        await log.send_job(pair.decode.id, long, role="decode")
        pair.decode.engine.allow(2)
        await log.has_streamed(long)
        asked = request(PROMPT)
        await send_jobs(log, pair, asked)
        await log.has_streamed(asked)
        pair.decode.engine.resume()
        await log.end(asked)
        await log.end(long)
        assert log.streamed(asked) == answer(asked)
        await pair.free()


async def test_a_request_cancelled_before_during_and_after_the_handoff_leaves_nothing(
    log: LogClient, pair: Pair
) -> None:
    before = request(PROMPT)
    pair.prefill.engine.hold()
    await send_jobs(log, pair, before)
    await eventually(lambda: before.id in pair.prefill.session.requests.running)
    for worker_ in (pair.prefill, pair.decode):
        await worker_.session.on_cancel(before.id, "gone")
    pair.prefill.engine.resume()
    assert (await log.end(before)).code == Code.cancelled

    assert pair.prefill.transport is not None
    pair.network.stall(pair.prefill.transport.endpoint.agent)
    during = request(list(range(200, 230)))
    await send_jobs(log, pair, during)
    await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
    for worker_ in (pair.prefill, pair.decode):
        await worker_.session.on_cancel(during.id, "gone")
    assert (await log.end(during)).code == Code.cancelled
    pair.network.resume(pair.prefill.transport.endpoint.agent)

    after = request(list(range(300, 330)), max_tokens=900)
    pair.decode.engine.hold()
    await send_jobs(log, pair, after)
    await log.states(after, "released")
    for worker_ in (pair.prefill, pair.decode):
        await worker_.session.on_cancel(after.id, "gone")
    pair.decode.engine.resume()
    assert (await log.end(after)).code == Code.cancelled
    await pair.free()


async def test_a_revoked_attempt_frees_its_blocks(log: LogClient, pair: Pair) -> None:
    pair.prefill.engine.hold()
    asked = request(PROMPT, max_tokens=20)
    await send_jobs(log, pair, asked)
    await eventually(lambda: asked.id in pair.prefill.session.requests.running)
    await log.revoke(pair.prefill.id, asked, 1, role="prefill")
    await eventually(lambda: asked.id not in pair.prefill.session.requests.running)
    pair.prefill.engine.resume()
    await pair.prefill.frees_everything()
    assert await log.handoffs(asked) == []


async def test_a_worker_that_lost_its_lease_frees_everything_it_held_for_others(log: LogClient, pair: Pair) -> None:
    asked = request(PROMPT)
    await log.send_job(pair.prefill.id, asked, role="prefill", route=(Stage("decode", "nobody"),))
    await log.has_streamed(asked)
    await eventually(lambda: pair.prefill.session.runner.disaggregation.open_leases)
    await pair.prefill.session.fence()
    await pair.prefill.frees_everything()
    await pair.prefill.begin()


async def test_a_reader_that_leaves_ends_the_lease_at_once(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with paired(broker, pipeline, handoff_lease_s=90.0) as pair:
        assert pair.prefill.transport is not None
        pair.network.stall(pair.prefill.transport.endpoint.agent)
        asked = request(PROMPT)
        await send_jobs(log, pair, asked)
        await eventually(lambda: pair.prefill.session.runner.disaggregation.open_leases)
        await log.remove_key(pair.decode.id)
        await pair.prefill.frees_everything()  # not only when the lease has passed
        pair.network.resume(pair.prefill.transport.endpoint.agent)


async def test_an_order_for_an_unknown_ticket_is_answered(log: LogClient, pair: Pair) -> None:
    subject = log.bus.subjects.control(pair.prefill.id)
    reply = await log.bus.nc.request(subject, wire.encode(control.Release("no:1:decode")), timeout=2)
    assert "no such ticket" in control.decode_ok(reply.data).error
    assert pair.decode.transport is not None
    push = control.Push("no:1:decode", "x", pair.decode.transport.endpoint, b"", b"", 1.0)
    reply = await log.bus.nc.request(subject, wire.encode(push), timeout=2)
    assert control.decode_pushed(reply.data).cause == "stale"


async def test_many_handoffs_at_once_are_all_right_and_leave_nothing(log: LogClient, pair: Pair) -> None:
    asked = [request(list(range(start, start + 5 + start % 40))) for start in range(1, 600, 10)]
    await asyncio.gather(*(send_jobs(log, pair, each) for each in asked))
    for each in asked:
        await log.end(each)
        assert log.streamed(each) == answer(each)
    await pair.free()


# -- announced prompts --------------------------------------------------------------------------------------------


@pytest.fixture
def unsent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Prefill hands no request over before this is set."""
    sent, coordinator = asyncio.Event(), pair.prefill.session.runner.disaggregation
    publish = coordinator._publish_stage

    async def later(*stage: Any) -> None:
        await sent.wait()
        await publish(*stage)

    monkeypatch.setattr(coordinator, "_publish_stage", later)
    return sent


def announced(pair: Pair) -> AnnouncedPrompts:
    return cast("AnnouncedPrompts", pair.decode.session.runner.disaggregation._announced)


async def reserving(log: LogClient, pair: Pair) -> None:
    """Until prefill knows that decode takes announcements."""
    peers = pair.prefill.session.runner.disaggregation._peers
    assert peers is not None
    await eventually(lambda: peers.reserves(pair.decode.id))


async def announcements(log: LogClient, pair: Pair) -> list[bytes]:
    """What decode is told from now on."""
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data)

    await log.bus.nc.subscribe(log.bus.subjects.control(pair.decode.id + disaggregation.ANNOUNCED), cb=hear)
    await log.bus.nc.flush()
    return heard


@pytest.mark.parametrize("asked", [{}, {"n": 2, "sampling": DRAWN}], ids=["one choice", "two"])
async def test_kv_is_read_while_the_message_with_the_request_is_on_its_way(
    log: LogClient, pair: Pair, unsent: asyncio.Event, asked: dict[str, Any]
) -> None:
    await reserving(log, pair)
    wanted = request(PROMPT, **asked)
    await send_jobs(log, pair, wanted)
    await log.states(wanted, "read")
    assert not pair.decode.session.requests.running
    assert len(announced(pair)) == pair.decode.session.runner.disaggregation.open_leases == 1
    unsent.set()
    await log.end(wanted)
    assert [log.streamed(wanted, at) for at in range(wanted.n)] == [answer(wanted, choice=at) for at in range(wanted.n)]
    assert sorted(await log.states(wanted, "released")) == ["leased", "offered", "read", "released"]
    assert not len(announced(pair))
    await pair.free()


@pytest.fixture
async def last_layer(pair: Pair) -> AsyncIterator[threading.Event]:
    """Prefill computes the last layer of a prompt's last step once this is set."""
    computes, executor = threading.Event(), pair.prefill.engine.executor
    report = executor.written

    def written(layers: int) -> None:
        report(layers)
        assert computes.wait(30)

    executor.written = written
    yield computes
    computes.set()
    executor.written = report


def moved(pair: Pair) -> tuple[int, int]:
    """Transfers that decode has completed, and their bytes."""
    assert pair.decode.transport is not None
    stats = pair.decode.transport.stats()
    return stats.transfers, stats.bytes_read


async def leading_read(log: LogClient, pair: Pair, asked: GenerateRequest) -> None:
    """Until decode has read all layers of a request's prompt but the one that prefill is computing."""
    await reserving(log, pair)
    before = moved(pair)[0]
    await send_jobs(log, pair, asked)
    await eventually(lambda: moved(pair)[0] == before + 1)


async def test_all_layers_but_the_last_are_read_while_that_is_computed(
    log: LogClient, pair: Pair, unsent: asyncio.Event, last_layer: threading.Event
) -> None:
    asked = request(PROMPT)
    await leading_read(log, pair, asked)
    blocks = -(-len(PROMPT) // BLOCK)
    assert moved(pair) == (1, blocks * 64 * 3 // 4)
    assert not await log.handoffs(asked)
    assert not log.streamed(asked)
    last_layer.set()
    await log.states(asked, "offered", "read")
    assert moved(pair) == (2, blocks * 64)
    assert not pair.decode.session.requests.running
    unsent.set()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    lines = {line.state: line for line in await log.handoffs(asked)}
    assert (lines["read"].bytes, lines["read"].blocks) == (blocks * 64, blocks)
    assert moved(pair)[0] == 2
    await pair.free()


async def test_a_long_prompts_request_is_expected_as_long_after_its_layers_as_the_last_one_came(
    log: LogClient,
    pair: Pair,
    unsent: asyncio.Event,
    last_layer: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected: list[tuple[str, float]] = []
    monkeypatch.setattr(announced(pair)._engine, "expect", lambda *each: expected.append(each))
    requests = []
    for number in range(2):
        requests.append(asked := request([*PROMPT[:-1], number]))
        unsent.clear()
        last_layer.clear()
        await leading_read(log, pair, asked)
        last_layer.set()
        await log.states(asked, "read")
        await eventually(lambda: all(each.reading and each.reading.done() for each in announced(pair)._open.values()))
        unsent.set()
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)
    assert [who for who, _ in expected] == [requests[0].id, *[requests[1].id] * 3]
    first, leading, whole, last = [within_s for _, within_s in expected]
    assert first == last == block_reserver.SUBMIT_S  # both requests have come
    assert block_reserver.SUBMIT_S < whole <= block_reserver.SUBMIT_S + block_reserver.MOST_BEHIND_S
    assert leading > whole


async def test_all_layers_are_read_at_once_where_blocks_are_reserved_only_then(log: LogClient, pair: Pair) -> None:
    coordinator = pair.decode.session.runner.disaggregation
    assert pair.prefill.transport is not None
    ticket = Ticket("r:1:decode", pair.prefill.id, pair.prefill.transport.endpoint, "kv", bytes(32), bytes(32), 1 << 62)
    coordinator.expect(control.Reserve(ticket.id, ticket.worker, bytes(range(112)), 1, 1))
    coordinator.expect(control.Fetch(ticket, 3))
    coordinator.expect(control.Fetch(ticket))
    reading = announced(pair)._open[ticket.id].reading
    assert reading is not None
    assert await reading is not None
    assert moved(pair) == (1, 8 * 64)
    coordinator.release(control.Release(ticket.id))
    await pair.free()


async def test_all_layers_are_read_before_the_first_token_is_published(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reserving(log, pair)
    coordinator = pair.prefill.session.runner.disaggregation
    heard, offered = await announcements(log, pair), coordinator.offer

    def offer(running: Any) -> Ticket | None:
        told.append(coordinator._announced_to[running.request.id])
        return offered(running)

    told: list[bool] = []
    monkeypatch.setattr(coordinator, "offer", offer)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    orders = [control.decode_worker(each) for each in heard]
    assert [order.layers for order in orders if isinstance(order, control.Fetch)] == [3, 0]
    assert told == [True]
    assert log.streamed(asked) == answer(asked)
    await pair.free()


async def test_a_request_that_is_cancelled_before_its_last_layer_leaves_nothing(
    log: LogClient, pair: Pair, last_layer: threading.Event
) -> None:
    asked = request(PROMPT)
    await leading_read(log, pair, asked)
    await pair.prefill.session.on_cancel(asked.id, "gone")
    await pair.decode.frees_everything()
    last_layer.set()
    assert (await log.end(asked)).code == Code.cancelled.value
    assert moved(pair)[0] == 1
    await pair.free()


async def test_a_prefill_worker_that_dies_before_the_last_layer_leaves_nothing(
    log: LogClient, pair: Pair, last_layer: threading.Event
) -> None:
    asked = request(PROMPT)
    await leading_read(log, pair, asked)
    dead = pair.prefill.id
    last_layer.set()
    await pair.prefill.die()
    await log.remove_key(dead)
    await pair.decode.frees_everything()
    await pair.prefill.begin()
    await send_jobs(log, pair, asked, attempt=2)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await pair.free()


async def test_a_session_that_ends_between_two_parts_of_a_prompt_holds_nothing(
    log: LogClient, pair: Pair, last_layer: threading.Event
) -> None:
    await leading_read(log, pair, request(PROMPT))
    await pair.decode.session.fence()
    await pair.decode.frees_everything()
    last_layer.set()
    await pair.decode.begin()


async def test_blocks_that_are_reused_between_two_parts_are_not_used(
    log: LogClient, pair: Pair, unsent: asyncio.Event, last_layer: threading.Event
) -> None:
    """Their generations are others once the second part is read; then the ticket of the request is."""
    asked = request(PROMPT)
    await leading_read(log, pair, asked)
    generations = pair.prefill.engine.scheduler.blocks.generations
    for block in range(len(generations)):
        generations[block] += 1
    last_layer.set()
    assert await log.failure(asked) == "stale"
    unsent.set()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await log.states(asked, "failed", "read", "released")
    await pair.free()


async def test_kv_that_was_computed_again_is_read_again(
    log: LogClient, pair: Pair, unsent: asyncio.Event, last_layer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a preemption: the ticket of all layers has other blocks than that of the leading ones."""
    coordinator = pair.prefill.session.runner.disaggregation
    told = coordinator._tell

    def tell(stage: Stage, order: Any) -> None:
        if isinstance(order, control.Fetch) and order.layers:
            swapped = order.ticket.blocks[4:8] + order.ticket.blocks[:4] + order.ticket.blocks[8:]
            order = msgspec.structs.replace(order, ticket=msgspec.structs.replace(order.ticket, blocks=swapped))
        told(stage, order)

    monkeypatch.setattr(coordinator, "_tell", tell)
    asked = request(PROMPT)
    await leading_read(log, pair, asked)
    last_layer.set()
    await log.states(asked, "read")
    blocks = -(-len(PROMPT) // BLOCK)
    assert moved(pair) == (2, blocks * 64 * 3 // 4 + blocks * 64)
    unsent.set()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await pair.free()


async def test_after_leading_layers_that_could_not_be_read_all_are(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reserving(log, pair)
    assert pair.decode.transport is not None
    read = pair.decode.transport.read

    def read_all(*args: Any, layers: tuple[int, int] | None = None, **options: Any) -> Any:
        if layers is None:
            return read(*args, **options)
        refused: Future[Any] = Future()
        refused.set_exception(TransferError("refused", "not these"))
        return refused

    monkeypatch.setattr(pair.decode.transport, "read", read_all)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert sorted(await log.states(asked, "read", "released")) == ["leased", "offered", "read", "released"]
    assert moved(pair)[0] == 1
    await pair.free()


async def test_workers_of_earlier_builds_are_not_told_of_leading_layers(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take them for all."""
    peers = pair.prefill.session.runner.disaggregation._peers
    assert peers is not None
    await reserving(log, pair)
    monkeypatch.setitem(peers._reserving, pair.decode.id, False)
    heard = await announcements(log, pair)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    orders = [control.decode_worker(each) for each in heard]
    assert [order.layers for order in orders if isinstance(order, control.Fetch)] == [0]
    await pair.free()


async def test_kv_that_was_read_for_a_request_that_never_comes_is_freed(
    log: LogClient, pair: Pair, unsent: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_reserver, "ANNOUNCED_S", 0.2)
    await reserving(log, pair)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.states(asked, "read")
    await pair.decode.frees_everything()
    unsent.set()  # it comes after all
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await pair.free()


async def test_a_prompt_that_ends_at_the_prefill_worker_is_withdrawn(
    log: LogClient, pair: Pair, unsent: asyncio.Event
) -> None:
    await reserving(log, pair)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.states(asked, "read")
    began = time.monotonic()
    await log.revoke(pair.prefill.id, asked, 1, role="prefill")
    await pair.decode.frees_everything()
    assert time.monotonic() - began < block_reserver.ANNOUNCED_S / 2
    unsent.set()
    await pair.free()


async def test_announced_prompts_of_a_prefill_worker_that_dies_are_freed(
    log: LogClient, pair: Pair, unsent: asyncio.Event
) -> None:
    await reserving(log, pair)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.states(asked, "read")
    unsent.set()
    dead = pair.prefill.id
    await pair.prefill.die()
    began = time.monotonic()
    await log.remove_key(dead)
    await pair.decode.frees_everything()
    assert time.monotonic() - began < block_reserver.ANNOUNCED_S / 2
    await pair.prefill.begin()
    await send_jobs(log, pair, asked, attempt=2)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await pair.free()


async def reading(log: LogClient, pair: Pair) -> tuple[GenerateRequest, str]:
    """A request whose announced KV is being read, over a link that carries nothing, and the owner's agent."""
    await reserving(log, pair)
    assert pair.prefill.transport is not None
    owner = pair.prefill.transport.endpoint.agent
    pair.network.stall(owner)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
    return asked, owner


async def test_kv_that_cannot_be_read_in_time_is_computed_and_nothing_is_held(
    log: LogClient, pair: Pair, unsent: asyncio.Event
) -> None:
    asked, owner = await reading(log, pair)
    unsent.set()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert await log.failure(asked) == "timeout"
    pair.network.resume(owner)
    await pair.free()


async def test_a_session_that_ends_while_announced_kv_is_read_holds_nothing(
    log: LogClient, pair: Pair, unsent: asyncio.Event
) -> None:
    _, owner = await reading(log, pair)
    await pair.decode.session.fence()
    pair.network.resume(owner)
    await pair.decode.frees_everything()
    unsent.set()
    await pair.decode.begin()


async def test_kv_of_weights_that_are_replaced_while_it_is_read_is_not_used(log: LogClient, pair: Pair) -> None:
    assert pair.prefill.transport is not None
    pair.network.stall(pair.prefill.transport.endpoint.agent)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: asked.id in pair.decode.session.requests.running)
    await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
    pair.decode.model.revision = "another"
    pair.network.resume(pair.prefill.transport.endpoint.agent)
    assert "another revision" in (await log.handed_back(asked)).reason
    assert log.streamed(asked) == answer(asked)[:1]
    await pair.free()


async def test_kv_that_an_engine_keeps_is_not_fetched_for_weights_that_were_replaced(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = pair.decode.session.runner.disaggregation
    on_prefilled = coordinator.on_prefilled

    async def kept(running: Any, prefilled: Any) -> None:
        pair.decode.model.revision = "another"
        await on_prefilled(running, msgspec.structs.replace(prefilled, opaque=b"kept"))

    monkeypatch.setattr(coordinator, "on_prefilled", kept)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    assert "another revision" in (await log.handed_back(asked)).reason
    assert log.streamed(asked) == answer(asked)[:1]
    await pair.free()


async def test_kv_that_came_while_the_weights_stood_still_is_not_used_with_others(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are its first tokens continued by weights that nobody asked to."""
    runner = pair.decode.session.runner
    held = SimpleNamespace(holds=True, frozen=True, watches=False, shown=FIXED)
    monkeypatch.setattr(runner, "_weights", held)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: runner.parked)
    pair.decode.model.revision, held.holds = "another", False
    runner.submit_parked()
    assert "another revision" in (await log.handed_back(asked)).reason
    assert log.streamed(asked) == answer(asked)[:1]
    await pair.free()


async def replaced(log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch, before: str = "") -> GenerateRequest:
    """A request that prefill hands off with other weights than decode has. ``before``: as of ``WeightsState``."""
    weights = SimpleNamespace(holds=False, watches=False, shown=WeightsState(before=before))
    for each in pair.prefill, pair.decode:
        monkeypatch.setattr(each.session.runner, "_weights", weights)
    asked, pair.decode.model.revision = request(PROMPT), "another"
    await log.send_job(pair.prefill.id, asked, role="prefill", route=pair.route, revision="replaced since")
    return asked


async def test_kv_of_weights_that_were_replaced_before_it_came_is_not_used(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await replaced(log, pair, monkeypatch)
    assert "another revision" in (await log.handed_back(asked)).reason
    assert log.streamed(asked) == answer(asked)[:1]
    assert not (await pair.decode.stats()).cached_blocks
    await pair.free()


async def test_weights_that_are_asked_to_continue_others_compute_the_prompt_themselves(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await replaced(log, pair, monkeypatch, before=pair.prefill.model.revision)
    end = await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert end.timings.made_with is not None
    assert end.timings.made_with.before == (EarlierRevision(pair.prefill.model.revision, (1,)),)
    assert (await pair.decode.stats()).prompt_tokens == len(PROMPT)
    assert not await computed(pair.decode)
    await pair.free()


async def test_a_session_that_ends_while_its_link_is_down_leaves_no_subscription(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc, session = pair.decode.bus.nc, pair.decode.session
    assert session.runner.disaggregation.reader is not None
    left = {
        log.bus.subjects.control(session.id + disaggregation.ANNOUNCED),
        session.runner.disaggregation.reader._inbox + ".*",
    }
    assert left <= {each.subject for each in nc._subs.values()}
    with monkeypatch.context() as down:
        down.setattr(nc, "_status", nc.RECONNECTING)
        await pair.decode.die()
    assert not left & {each.subject for each in nc._subs.values()}
    await pair.decode.begin()


@pytest.mark.parametrize("answered", [True, False])
async def test_a_session_that_ends_before_announced_kv_is_read_holds_nothing(
    log: LogClient, pair: Pair, answered: bool
) -> None:
    coordinator, prompts = pair.decode.session.runner.disaggregation, announced(pair)
    assert pair.prefill.transport is not None
    endpoint, names = pair.prefill.transport.endpoint, bytes(range(112))
    coordinator.expect(control.Reserve("r:1:decode", pair.prefill.id, names, 1, 1))
    wait = prompts._open["r:1:decode"].wait
    if answered:
        await eventually(wait.answer.done)
    coordinator.expect(
        control.Fetch(Ticket("r:1:decode", pair.prefill.id, endpoint, "kv", bytes(32), bytes(32), 1 << 62))
    )
    await prompts.close()
    assert (await asyncio.wrap_future(wait.answer)) is not None
    await pair.decode.frees_everything()


async def test_blocks_stay_reserved_until_shortly_after_the_prompt_should_have_ended(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker that fell silent kept them for five seconds, however short its steps were."""
    monkeypatch.setattr(block_reserver, "LATE_S", 0.1)
    coordinator, prompts = pair.decode.session.runner.disaggregation, announced(pair)
    assert pair.prefill.transport is not None
    endpoint = pair.prefill.transport.endpoint
    until = {"short:1:decode": 0.05, "long:1:decode": 20.0, "unknown:1:decode": 0.0, "endless:1:decode": 1e9}
    began = time.monotonic()
    for ticket, ends_s in until.items():
        coordinator.expect(control.Reserve(ticket, pair.prefill.id, bytes(range(112)), 1, 1, 0, ends_s))
    coordinator.expect(
        control.Fetch(Ticket("short:1:decode", pair.prefill.id, endpoint, "kv", bytes(32), bytes(32), 1 << 62), 1)
    )
    left = {ticket[:4]: each.timer.when() - asyncio.get_running_loop().time() for ticket, each in prompts._open.items()}
    assert 4.0 < left["unkn"] <= 5.0 < 19.0 < left["long"] <= 20.1 < 29.0 < left["endl"] <= 30.0
    await eventually(lambda: "short:1:decode" not in prompts._open)
    assert time.monotonic() - began < block_reserver.ANNOUNCED_S / 2
    assert len(prompts) == 3
    await prompts.close()
    await pair.decode.frees_everything()


async def test_an_announcement_says_when_the_prompt_ends_once_others_were_computed(log: LogClient, pair: Pair) -> None:
    await reserving(log, pair)
    heard = await announcements(log, pair)
    for _ in range(2):
        asked = request(PROMPT)
        await send_jobs(log, pair, asked)
        await log.end(asked)
    orders = [each for each in map(control.decode_worker, heard) if isinstance(each, control.Reserve)]
    assert orders[0].ends_s == 0.0
    assert 0.0 < orders[1].ends_s < 30.0
    await pair.free()


async def test_announcements_that_come_twice_late_alone_or_of_another_prompt_change_nothing(
    log: LogClient, pair: Pair, unsent: asyncio.Event
) -> None:
    await reserving(log, pair)
    asked = request(PROMPT)
    ticket = f"{asked.id}:1:decode"

    async def say(*orders: control.Reserve | control.Fetch) -> None:
        for order in orders:
            subject = log.bus.subjects.control(pair.decode.id + disaggregation.ANNOUNCED)
            await log.bus.nc.publish(subject, wire.encode(order))
        await log.bus.nc.flush()

    others = control.Reserve(ticket, pair.prefill.id, bytes(7 * 16), 1, 1)
    await say(others, others)
    await eventually(lambda: len(announced(pair)))
    await send_jobs(log, pair, asked)
    unsent.set()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    message = await handed(log, asked)
    await say(others, control.Fetch(message.ticket), control.Fetch(message.ticket))
    more = request(PROMPT[:20])  # behind it, all of them were looked at
    await send_jobs(log, pair, more)
    await log.end(more)
    assert log.streamed(more) == answer(more)
    assert not len(announced(pair))
    await pair.free()


async def test_workers_of_earlier_builds_are_told_nothing_of_prompts_that_end(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = pair.prefill.session.runner.disaggregation._peers
    assert peers is not None
    monkeypatch.setattr(peers, "_reserving", dict[str, bool]())
    heard = await announcements(log, pair)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert not heard
    await pair.free()


# -- pools of any size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [(512, 20), (512, 33), (512, 64), (20, 512), (24, 24), (20, 33), (33, 20)], ids=str)
async def test_whatever_the_ratio_of_the_pools_every_request_ends_with_its_answer(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, pools: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disaggregation, "BLOCK_WAIT_S", 0.05)  # so that many give up waiting for room
    async with paired(broker, pipeline, pools=pools) as pair:
        asked = [
            request(list(range(start, start + 28 + start % 29)), max_tokens=20, n=2 if start % 50 == 1 else 1)
            for start in range(1, 600, 25)
        ]
        await asyncio.gather(*(send_jobs(log, pair, each) for each in asked))
        for each in asked[::8]:
            await pair.prefill.session.on_cancel(each.id, "gone")
            await pair.decode.session.on_cancel(each.id, "gone")
        for number, each in enumerate(asked):
            end = await log.end(each)
            if number % 8:
                assert [log.streamed(each, choice) for choice in range(each.n)] == [
                    answer(each, choice=choice) for choice in range(each.n)
                ]
                assert (end.attempt, end.code) == (1, "")
        await pair.free()


async def test_a_preempted_request_whose_prompt_was_handed_off_continues_with_the_same_answer(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with paired(broker, pipeline, pools=(512, 30)) as pair:
        asked = [request(list(range(start, start + 30)), max_tokens=40) for start in (1, 101)]
        pair.decode.engine.hold()

        def both_run() -> bool:
            pair.decode.engine.allow(1)
            return len([each for each in asked if len(log.streamed(each)) > 1]) == 2

        for each in asked:
            await send_jobs(log, pair, each)
        await eventually(both_run)
        assert max(len(log.streamed(each)) for each in asked) < 25
        pair.decode.engine.resume()
        for each in asked:  # 8 blocks each at first, and 18 in the end
            await log.end(each)
            assert log.streamed(each) == answer(each)
        assert (await pair.decode.stats()).preemptions
        await pair.free()


async def full(worker_: WorkerHarness) -> BlockReservation:
    """All blocks of a worker, for nobody."""
    info = worker_.engine.info
    digests = [bytes([at // 256, at % 256]) * 8 for at in range(info.total_blocks)]
    found = await asyncio.wrap_future(worker_.loop.call(lambda engine: engine.kv_transfer.reserve(digests, 0, 1)))
    assert found is not None
    return found


async def test_a_handoff_that_waits_for_room_asks_no_more_than_it_must_and_resumes_at_once(
    log: LogClient, pair: Pair
) -> None:
    taken = await full(pair.decode)
    asks: list[int] = []
    reserve = pair.decode.engine._engine.kv_transfer.reserve

    def counted(*options: Any) -> Any:
        asks.append(1)
        return reserve(*options)

    pair.decode.engine._engine.kv_transfer.reserve = counted  # type: ignore[method-assign]
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: asks)
    await asyncio.sleep(0.6)
    assert len(asks) < 12, "it looks again and again"  # each time that somebody asks the engine for its numbers
    began = time.monotonic()
    pair.decode.loop.call(lambda engine: engine.kv_transfer.release(taken))
    await log.states(asked, "read")
    assert time.monotonic() - began < disaggregation.BLOCK_WAIT_S / 2
    await log.end(asked)
    await pair.free()


async def test_a_request_cancelled_while_it_waits_for_room_ends_at_once(log: LogClient, pair: Pair) -> None:
    taken = await full(pair.decode)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: [each for each in pair.decode.session.requests.running.values() if each.block_wait])
    began = time.monotonic()
    await pair.decode.session.on_cancel(asked.id, "gone")
    assert (await log.end(asked)).code == Code.cancelled
    await eventually(lambda: not pair.decode.session.runner.stage_tasks)
    assert time.monotonic() - began < disaggregation.BLOCK_WAIT_S / 2
    pair.decode.loop.call(lambda engine: engine.kv_transfer.release(taken))
    await pair.free()


async def test_a_session_that_ends_while_a_handoff_waits_for_room_takes_no_blocks_with_it(
    log: LogClient, pair: Pair
) -> None:
    taken = await full(pair.decode)
    asked = request(PROMPT)
    await send_jobs(log, pair, asked)
    await eventually(lambda: [each for each in pair.decode.session.requests.running.values() if each.block_wait])
    await pair.decode.session.fence()
    pair.decode.loop.call(lambda engine: engine.kv_transfer.release(taken))
    await pair.decode.frees_everything()
    await pair.decode.begin()


async def test_a_handoff_by_a_worker_that_may_not_publish_ends_with_its_ticket_and_not_later(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.prefill.session.lease, "trusted", lambda: False)
    asked = request(PROMPT)
    began = time.monotonic()
    await send_jobs(log, pair, asked)
    assert "in doubt" in (await log.handed_back(asked)).reason
    assert time.monotonic() - began < FAST["handoff_lease_s"] + 2
    await pair.free()


async def test_a_drain_in_the_midst_of_a_handoff_whose_owner_stands_still_ends_in_time(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with paired(broker, pipeline, transfer_timeout_s=60.0, handoff_lease_s=90.0) as pair:
        assert pair.prefill.transport is not None
        pair.network.stall(pair.prefill.transport.endpoint.agent)
        asked = request(PROMPT)
        await send_jobs(log, pair, asked)
        await eventually(lambda: pair.decode.transport is not None and pair.decode.transport.stats().live)
        began = time.monotonic()
        await pair.decode.session.drain(0.3)
        assert time.monotonic() - began < 0.3 + GRACE_S
        assert (await log.handed_back(asked)).reason == "draining"
        await pair.prefill.frees_everything()
        pair.network.resume(pair.prefill.transport.endpoint.agent)


# -- images -------------------------------------------------------------------------------------------------------

IMAGE_TOKENS = 4


class Trio(NamedTuple):
    network: LoopbackNetwork
    encode: WorkerHarness
    prefill: WorkerHarness
    decode: WorkerHarness

    @property
    def route(self) -> tuple[Stage, ...]:
        return Stage("prefill", self.prefill.id), Stage("decode", self.decode.id)

    async def free(self) -> None:
        for each in (self.encode, self.prefill, self.decode):
            await each.frees_everything()


@asynccontextmanager
async def three(broker: EmbeddedNats, pipeline: Subjects, host: str = "here") -> AsyncIterator[Trio]:
    network = LoopbackNetwork(host)
    encoder = ControlledEngine(
        mock.build_encoder(image_tokens=IMAGE_TOKENS, embed_slots=4, vocab_size=1000, block_size=BLOCK)
    )
    seeing = [engine(memory_block_bytes=64, image_tokens=IMAGE_TOKENS, embed_slots=4) for _ in range(2)]
    async with (
        run_worker(broker, pipeline, encoder, network=network, role="encode", **FAST) as encode,
        run_worker(broker, pipeline, seeing[0], network=network, role="prefill", **FAST) as prefill,
        run_worker(broker, pipeline, seeing[1], network=network, role="decode", **FAST) as decode,
    ):
        yield Trio(network, encode, prefill, decode)


@pytest.fixture
async def trio(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Trio]:
    async with three(broker, pipeline) as made:
        yield made


async def picturing(log: LogClient, *raws: bytes, prompt: list[int] | None = None, **options: Any) -> GenerateRequest:
    """A request with images at the beginning of its prompt, which are in the object store."""
    tokens = [999] * (IMAGE_TOKENS * len(raws)) + (prompt or PROMPT)
    media = []
    for number, raw in enumerate(raws):
        digest = blake3(raw).digest()
        await object_store.put(log.bus, "media", digest.hex(), raw)
        media.append(Media(digest, "image/png", len(raw), number * IMAGE_TOKENS, IMAGE_TOKENS))
    spans = [(each.position, each.tokens, each.digest) for each in media]
    packed = wire.pack_tokens(tokens)
    names = block_hashes.chain(packed, BLOCK, block_hashes.root(REVISION), block_hashes.media_extra(spans, BLOCK))
    return request(tokens, media=tuple(media), digests=names, **options)


def picture_answer(asked: GenerateRequest, *raws: bytes, choice: int = 0) -> list[int]:
    prompt = ids(asked.prompt)
    return expected_tokens(
        prompt,
        asked.stop.max_tokens,
        VOCABULARY,
        sampling=asked.sampling,
        choice=choice,
        media=[embedding(raw) for raw in raws],
    )


async def show(log: LogClient, trio: Trio, asked: GenerateRequest) -> None:
    await log.send_job(trio.encode.id, asked, role="encode", route=trio.route)


async def test_embeddings_and_kv_pass_through_three_workers(log: LogClient, trio: Trio) -> None:
    asked = await picturing(log, b"one", b"two", n=2, sampling=DRAWN)
    await show(log, trio, asked)
    end = await log.end(asked)
    assert end.worker == trio.decode.id
    assert [ids(outcome.tokens) for outcome in end.choices] == [
        picture_answer(asked, b"one", b"two", choice=choice) for choice in range(2)
    ]
    assert await log.states(asked, *["read"] * 2, *["released"] * 2), "embeddings, then KV"
    await trio.free()


async def test_another_picture_with_the_same_words_is_another_prompt(log: LogClient, trio: Trio) -> None:
    answers = []
    for raw in (b"one", b"two"):
        asked = await picturing(log, raw)
        await show(log, trio, asked)
        end = await log.end(asked)
        assert end.usage.cached == 0
        answers.append(log.streamed(asked))
        assert answers[-1] == picture_answer(asked, raw)
    assert answers[0] != answers[1]


async def test_the_same_picture_is_encoded_once(log: LogClient, trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    real = object_store.get

    async def counted(bus: Any, bucket: str, name: str, **more: Any) -> bytes:
        fetched.append(name)
        return await real(bus, bucket, name, **more)

    monkeypatch.setattr(object_store, "get", counted)
    for start in (100, 200):
        asked = await picturing(log, b"one", prompt=list(range(start, start + 30)))
        await show(log, trio, asked)
        await log.end(asked)
        assert log.streamed(asked) == picture_answer(asked, b"one")
    assert fetched == [blake3(b"one").digest().hex()]


@pytest.mark.parametrize("host", ["here", ""], ids=["read", "write"])
async def test_an_encode_worker_that_does_not_move_means_encoding_at_the_next(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, host: str
) -> None:
    async with three(broker, pipeline, host) as trio:
        assert trio.encode.transport is not None
        assert trio.prefill.transport is not None
        stalled = (trio.encode if host else trio.prefill).transport
        assert stalled is not None
        trio.network.stall(stalled.endpoint.agent)
        asked = await picturing(log, b"one", prompt=PROMPT)
        await log.send_job(trio.encode.id, asked, role="encode", route=trio.route[:1])
        end = await log.end(asked)
        assert (end.worker, end.code) == (trio.prefill.id, "")
        assert log.streamed(asked) == picture_answer(asked, b"one")
        assert await log.failure(asked) == "timeout"
        trio.network.resume(stalled.endpoint.agent)
        await trio.free()


async def test_pictures_are_encoded_where_they_are_needed_if_nobody_did_before(log: LogClient, trio: Trio) -> None:
    asked = await picturing(log, b"one")
    await log.send_job(trio.prefill.id, asked, role="prefill")
    await log.end(asked)
    assert log.streamed(asked) == picture_answer(asked, b"one")
    await trio.free()


async def test_a_picture_that_is_not_in_the_store_ends_the_request_with_its_reason(log: LogClient, trio: Trio) -> None:
    digest = blake3(b"never stored").digest()
    asked = request([999] * 4 + PROMPT, media=(Media(digest, "image/png", 12, 0, 4),))
    await show(log, trio, asked)
    end = await log.end(asked)
    assert end.code == Code.request_not_found
    assert "never stored" in end.message
    await trio.free()


async def test_more_pictures_than_slots_are_refused_and_few_wait_for_each_other(log: LogClient, trio: Trio) -> None:
    many = await picturing(log, *(b"%d" % number for number in range(5)))
    await show(log, trio, many)
    end = await log.end(many)
    assert end.code == Code.out_of_blocks
    assert "embed_slots" in end.message
    asked = [await picturing(log, b"a%d" % n, b"b%d" % n, prompt=list(range(n, n + 20))) for n in range(6)]
    await asyncio.gather(*(show(log, trio, each) for each in asked))
    for n, each in enumerate(asked):
        await log.end(each)
        assert log.streamed(each) == picture_answer(each, b"a%d" % n, b"b%d" % n)
    await trio.free()
