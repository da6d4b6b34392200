"""One registration of a worker on a real nats-server: what it publishes for the jobs that it is given."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process.scheduling import CoreWaits
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import contents, done, fleet, wire
from penstock.schemas.errors import Code
from penstock.schemas.jobs import failure_in
from penstock.schemas.requests import Fallback, GenerateRequest, Parsing, Sampling, ThoughtTokens, fallen_back
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import ANOTHER_MODEL, Finish
from penstock.schemas.trace import Trace
from penstock.workers.engine_loop import loop as engine_loop
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.mock.executor import MockVocabulary
from penstock.workers.runners import token_runner
from penstock.workers.session import requests as module
from penstock.workers.session import session, terminal_events
from penstock.workers.session.lease import Lease
from tests.infra.bus.support import eventually
from tests.workers.support import DRAWN, GATEWAY, LogClient, WorkerHarness, answer, engine, ids, request, run_worker

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
async def worker(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[WorkerHarness]:
    async with run_worker(broker, pipeline, engine()) as worker:
        yield worker


@pytest.fixture
async def narrow(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[WorkerHarness]:
    """One sequence at a time, and one more taken in advance."""
    async with run_worker(broker, pipeline, engine(max_running=1)) as worker:
        yield worker


# -- the way of a job ---------------------------------------------------------------------------------------------


async def test_a_job_becomes_tokens_then_a_terminal_event_then_an_acknowledgement(
    log: LogClient, worker: WorkerHarness
) -> None:
    asked = request(user="ann")
    before = time.time_ns()
    await log.send_job(worker.id, asked)
    end = await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert log.progress(asked)[0].finish == Finish("length", None, 0)
    assert (end.worker, end.attempt, end.code, end.user, end.model) == (worker.id, 1, "", "ann", "m")
    assert end.choices == (done.Outcome(wire.pack_tokens(answer(asked)), "length"),)
    assert end.usage == done.Usage(prompt=5, completion=8, cached=0)
    t = end.timings
    assert t.created_ns == asked.created_ns
    assert before <= t.routed_ns <= t.started_ns <= t.first_token_ns <= t.ended_ns <= time.time_ns()
    await log.settled(worker.id)
    assert len(log.ends(asked)) == 1


async def test_jobs_whose_contents_are_in_memory_storage_run_once_those_are_there(
    log: LogClient, worker: WorkerHarness
) -> None:
    """Of jobs that arrive together, those whose contents are there wait for no other."""
    bus, prompts = log.bus, [list(range(5, 9)), list(range(20, 29)), list(range(40, 46)), list(range(60, 66))]
    asked = [request(prompt, no_store=True) for prompt in prompts]
    *prompt, late = asked

    async def put(each: GenerateRequest) -> None:
        subject = bus.subjects.contents(each.gateway, each.id, contents.REQUEST)
        await bus.js.publish(subject, wire.encode(each))

    for each in prompt:
        await put(each)

    async def answer_as_gateway(message: Any) -> None:
        await message.respond(b"")

    # So that the late one is waited for, its gateway is there.
    there = await bus.nc.subscribe(bus.subjects.progress(GATEWAY), cb=answer_as_gateway)
    for each in (late, *prompt):
        await log.send_job(worker.id, contents.without_content(each, bytes(32)))
    for each in prompt:
        assert (await log.end(each)).usage == done.Usage(prompt=each.prompt_tokens, completion=8, cached=0)
    assert not log.ends(late)
    await put(late)
    assert (await log.end(late)).code == ""
    await there.unsubscribe()
    assert [log.streamed(each) for each in asked] == [answer(each) for each in asked]


async def test_a_job_whose_content_was_sent_ahead_runs_without_asking_for_it(
    log: LogClient, worker: WorkerHarness
) -> None:
    """What was sent under another request's name is none: then it is asked for, as if nothing had been sent."""
    bus = log.bus
    await eventually(lambda: log.registered(worker.id) is not None)
    registered = log.registered(worker.id)
    assert registered is not None
    prompts = (list(range(5, 9)), list(range(20, 29)))
    sent, mistaken = (request(prompt, no_store=True) for prompt in prompts)
    await bus.js.publish(bus.subjects.contents(mistaken.gateway, mistaken.id, contents.REQUEST), wire.encode(mistaken))
    for each in (sent, mistaken):
        await bus.nc.publish(f"{registered.inbox}.{each.id}", wire.encode(sent))
    await eventually(lambda: len(worker.session.contents.sent) == 2)
    for each in (sent, mistaken):
        await log.send_job(worker.id, contents.without_content(each, bytes(32)))
    for each in (sent, mistaken):
        assert (await log.end(each)).code == ""
        assert log.streamed(each) == answer(each)
    assert not worker.session.contents.sent


@pytest.mark.parametrize("no_store", [False, True])
async def test_a_fallback_says_which_one_it_is_before_its_first_token_and_in_its_record(
    log: LogClient, worker: WorkerHarness, no_store: bool
) -> None:
    bus, other = log.bus, request([9, 8, 7], no_store=no_store)
    asked = request(
        model="big", no_store=no_store, fallbacks=(Fallback("absent", b""), Fallback("m", wire.encode(other)))
    )
    if no_store:
        await bus.js.publish(bus.subjects.contents(asked.gateway, asked.id, contents.REQUEST), wire.encode(asked))
    placed = fallen_back(asked, 2, 3)
    job = contents.without_content(placed, bytes(32)) if no_store else placed
    await log.send_job(worker.id, job, attempt=3)
    end = await log.end(asked)
    items = [item for item in log.items if item.request == asked.id]
    assert (items[0].choice, items[0].attempt, items[0].first) == (ANOTHER_MODEL, 3, 2)
    assert log.streamed(asked) == answer(placed)
    assert (end.model, end.code, done.fallback_of(end)) == ("m", "", 2)
    entry = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done("default", "big", asked.id))
    assert entry is not None, "under the model that was asked for"


@pytest.mark.parametrize("code", [Code.engine_error, Code.invalid_request])
async def test_what_fails_before_its_first_token_is_returned_if_another_model_may_run_it(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, code: Code
) -> None:
    def refuse(_: Any) -> None:
        raise RequestError(code, "it broke")

    monkeypatch.setattr(worker.engine, "submit", refuse)
    asked, other = request(fallbacks=(Fallback("small"),)), request()
    for each in (asked, other):
        await log.send_job(worker.id, each)
    assert (await log.end(other)).code == code
    if code is Code.invalid_request:
        assert (await log.end(asked)).code == code, "the client's own error"
        return
    await eventually(lambda: log.returned)
    (returned,) = log.returned
    assert failure_in(f"returned: {returned.reason}") == (code, "it broke")
    assert not log.ends(asked)
    again = msgspec.structs.replace(asked, id="begun")
    await log.send_job(worker.id, again, attempt=2, resume=(wire.pack_tokens([1]),))
    assert (await log.end(again)).code == code, "its client has some of the answer"


async def test_a_worker_whose_link_was_replaced_before_it_had_a_lease_publishes_its_output(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker was killed while the worker started: no hook saw that reconnect."""
    acquire = Lease.acquire

    async def after_a_reconnect(lease: Lease) -> None:
        lease._bus.nc.stats["reconnects"] += 1
        await acquire(lease)

    monkeypatch.setattr(Lease, "acquire", after_a_reconnect)
    async with run_worker(broker, pipeline) as worker:
        asked = request()
        await log.send_job(worker.id, asked)
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)


async def test_a_traced_request_leaves_stamps_and_no_other_is_larger(log: LogClient, worker: WorkerHarness) -> None:
    traced, unsampled, plain = request(trace=Trace()), request(trace=Trace(UNSAMPLED)), request()
    for asked in (traced, unsampled, plain):
        await log.send_job(worker.id, asked)
    end = await log.end(traced)
    stamps, t = end.stamps, end.timings
    assert stamps is not None
    assert t.routed_ns <= stamps.received_ns <= stamps.started_ns == t.started_ns
    assert stamps.started_ns <= stamps.first_token_ns == t.first_token_ns <= t.ended_ns
    assert (stamps.preemptions, stamps.engine) == (0, {})
    for asked in (unsampled, plain):
        other = await log.end(asked)
        assert other.stamps is None
        assert b"stamps" not in wire.encode(other)
    await worker.frees_everything()


async def test_the_prompt_of_an_earlier_request_is_cached_and_counted(log: LogClient, worker: WorkerHarness) -> None:
    prompt = list(range(1, 14))  # three full blocks and a rest
    first, second = request(prompt), request(prompt)
    await log.send_job(worker.id, first)
    assert (await log.end(first)).usage.cached == 0
    await log.send_job(worker.id, second)
    assert (await log.end(second)).usage.cached == 12
    finish = log.progress(second)[0].finish
    assert finish is not None
    assert finish.cached_tokens == 12


async def test_choices_are_drawn_apart_and_end_in_one_event(log: LogClient, worker: WorkerHarness) -> None:
    asked = request(n=3, sampling=DRAWN)
    await log.send_job(worker.id, asked)
    end = await log.end(asked)
    expected = [answer(asked, choice=choice) for choice in range(3)]
    assert expected[0] != expected[1]
    assert [log.streamed(asked, choice) for choice in range(3)] == expected
    assert [ids(outcome.tokens) for outcome in end.choices] == expected
    assert end.usage.completion == 24


@pytest.mark.parametrize("how", ["ended", "revoked", "its end is not stored"])
async def test_what_is_over_is_freed_without_a_garbage_collection(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Full collections are rare in a process that serves."""

    def sequences() -> list[SequenceState]:
        return [each for each in gc.get_objects() if type(each) is SequenceState and each.request_id == asked.id]

    async def refuse(*_: object) -> None:
        raise RuntimeError("the stream is full")

    asked = request(n=2, sampling=DRAWN)
    gc.collect()  # what earlier tests left may have the same id
    gc.disable()
    try:
        worker.engine.hold()
        await log.send_job(worker.id, asked)
        await eventually(lambda: len(sequences()) == 2)
        with monkeypatch.context() as patched:
            if how == "revoked":
                await log.revoke(worker.id, asked, 1)
                await eventually(lambda: not _running(worker, asked))
            elif how != "ended":
                patched.setattr(worker.session.reporter, "done", refuse)
            worker.engine.resume()
            await eventually(lambda: not _running(worker, asked) and not worker.session.terminal.pending)
        following = request()
        await log.send_job(worker.id, following)  # locals still refer to the last request
        await log.end(following)
        await eventually(lambda: not sequences())
    finally:
        gc.enable()


@pytest.mark.parametrize("written_after_s", [0.0, 0.2])
async def test_output_that_waits_for_the_pause_between_flushes_does_not_wait_for_a_long_step(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, written_after_s: float
) -> None:
    monkeypatch.setattr(engine_loop, "MIN_FLUSH_S", 0.1)
    monkeypatch.setattr(engine_loop, "MAX_FLUSH_S", 0.1)
    if written_after_s:  # a busy event loop writes a flush when the pause is over
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(worker.bus.nc, "when_written", partial(loop.call_later, written_after_s))
    asked = request()
    worker.engine.hold()
    worker.engine.allow(2)
    await log.send_job(worker.id, asked)
    await log.has_streamed(asked, 2)  # the third step has begun and does not end


async def test_each_gateway_gets_its_own_requests_only(log: LogClient, worker: WorkerHarness) -> None:
    here, there = request(gateway="g1"), request(gateway="g2")
    worker.engine.hold()
    await log.send_job(worker.id, here)
    await log.send_job(worker.id, there)
    worker.engine.resume()
    await log.end(here)
    await log.end(there)
    for gateway, asked in (("g1", here), ("g2", there)):
        stored = await log.bus.js.get_last_msg(
            log.bus.subjects.stream("TOKENS"), log.bus.subjects.tokens(gateway), direct=True
        )
        assert stored.data is not None
        assert asked.id.encode() in stored.data
        assert (here if asked is there else there).id.encode() not in stored.data


@pytest.mark.parametrize("cut", [1, 3, 7])
async def test_a_resumed_request_continues_as_if_nothing_had_happened(
    log: LogClient, worker: WorkerHarness, cut: int
) -> None:
    asked = request(n=2, sampling=DRAWN)
    whole = [answer(asked, choice=choice) for choice in range(2)]
    closing = whole[0][4]  # of the thoughts of the first choice; cuts are in them and behind them
    thoughts = Parsing("basic", thinking=True, thoughts=ThoughtTokens((), (closing,)))
    asked = msgspec.structs.replace(asked, parsing=thoughts)
    resume = (wire.pack_tokens(whole[0][:cut]), b"")
    await log.publish_tokens(asked, 1, whole[0][:cut])
    await log.send_job(worker.id, asked, attempt=2, resume=resume)
    end = await log.end(asked)
    assert [ids(outcome.tokens) for outcome in end.choices] == whole
    assert end.attempt == 2
    assert end.usage.completion == 16
    assert end.usage.reasoning == sum([*tokens, closing].index(closing) + (closing in tokens) for tokens in whole)
    assert [log.streamed(asked, choice) for choice in range(2)] == whole
    again = [item for item in log.items if item.attempt == 2]
    firsts = [min(item.first for item in again if item.choice == choice) for choice in range(2)]
    assert firsts == [cut, 0], "what the client has is not streamed again"


async def test_a_choice_that_had_ended_stays_ended(log: LogClient, worker: WorkerHarness) -> None:
    asked = request(n=2, sampling=DRAWN)
    early = wire.pack_tokens(answer(asked, 3))
    ending = Finish("stop", "x")
    await log.send_job(worker.id, asked, attempt=2, resume=(early, b""), finished=(0,), endings=(ending,))
    await eventually(lambda: log.ends(asked))
    (end,) = log.ends(asked)
    assert end.choices[0] == done.Outcome(early, "stop", "x")
    assert ids(end.choices[1].tokens) == answer(asked, choice=1)
    assert {item.choice for item in log.items} == {1}


async def test_an_attempt_that_died_between_its_last_token_and_its_end_is_ended_without_the_engine(
    log: LogClient, worker: WorkerHarness
) -> None:
    asked = request(n=2, sampling=DRAWN)
    whole = tuple(wire.pack_tokens(answer(asked, choice=choice)) for choice in range(2))
    for choice in range(2):
        await log.publish_tokens(asked, 1, ids(whole[choice]), choice)
    await log.send_job(worker.id, asked, attempt=2, resume=whole)
    end = await log.end(asked)
    assert end.choices == tuple(done.Outcome(part, "length") for part in whole)
    assert worker.engine.steps == 0
    await log.settled(worker.id)


async def test_a_stop_string_ends_the_answer_where_it_appears(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    tokenizer = load_tokenizer(TINY)
    size = tokenizer.get_vocab_size()
    texts = tokenizer.decode_batch([[token] for token in range(size)])
    silent = {token for token, text in enumerate(texts) if not text or "\ufffd" in text}
    held = engine(vocab_size=size, excluded=silent)
    async with run_worker(broker, pipeline, held, detokenizer=Detokenizer(tokenizer)) as worker:
        expected = answer(request(max_tokens=60), vocabulary=MockVocabulary(size, silent))
        stop = tokenizer.decode(expected)[100:108]
        length = next(i for i in range(1, 61) if stop in tokenizer.decode(expected[:i]))
        asked = request(max_tokens=60, strings=("never said", stop))
        await log.send_job(worker.id, asked)
        end = await log.end(asked)
        assert end.choices == (done.Outcome(wire.pack_tokens(expected[:length]), "stop", stop),)
        assert log.streamed(asked) == expected[:length]
        await worker.frees_everything()

        resumed = request(max_tokens=60, strings=(stop,))
        part = wire.pack_tokens(expected[: length - 1])  # the string is cut in two
        await log.publish_tokens(resumed, 1, ids(part))
        await log.send_job(worker.id, resumed, attempt=2, resume=(part,))
        assert (await log.end(resumed)).choices == end.choices


# -- what goes wrong ----------------------------------------------------------------------------------------------


async def test_a_request_that_the_engine_refuses_fails_alone(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    neighbours = [request([i, 2, 3]) for i in range(3)]
    long, odd = request([1] * 1000, n=2), request([5000])
    for asked in (neighbours[0], long, neighbours[1], odd, neighbours[2]):
        await log.send_job(worker.id, asked)
    worker.engine.resume()
    for asked in neighbours:
        assert (await log.end(asked)).code == ""
        assert log.streamed(asked) == answer(asked)
    for asked, code in ((long, Code.context_length_exceeded), (odd, Code.invalid_request)):
        end = await log.end(asked)
        assert end.code == code
        assert end.message
        assert [outcome.reason for outcome in end.choices] == ["error"] * asked.n
        for part in log.progress(asked):
            assert part.finish == Finish("error", None, 0, code, end.message)
    await log.settled(worker.id)
    assert not worker.failures


async def test_an_unreadable_job_is_dropped_and_logged(log: LogClient, worker: WorkerHarness) -> None:
    with capture_logs() as logs:
        subject = log.bus.subjects.work("aggregated", worker.id)
        await log.bus.js.publish(subject, b"\xc1 not a job")
        asked = request()
        await log.send_job(worker.id, asked)
        await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["job_unreadable"]
    await log.settled(worker.id)


async def test_sessions_that_come_and_go_leave_no_subscriber_behind(log: LogClient, worker: WorkerHarness) -> None:
    for _ in range(3):
        asked = request()
        await log.send_job(worker.id, asked)
        await log.end(asked)
        assert len(worker.broker.subscribers) == 1
        await worker.session.fence()
        assert worker.broker.subscribers == []
        await worker.begin()


async def test_when_the_engine_breaks_every_request_is_requeued(log: LogClient, narrow: WorkerHarness) -> None:
    narrow.engine.hold()
    running, waiting = request(), request()
    await log.send_job(narrow.id, running)
    narrow.engine.allow(1)
    await log.has_streamed(running)
    await log.send_job(narrow.id, waiting)
    await eventually(lambda: len(narrow.session.requests.running) == 2)
    narrow.engine.breaks_at = narrow.engine.steps
    narrow.engine.resume()
    await eventually(lambda: narrow.failures)
    await narrow.session.fail("engine_error: gone")
    back = [await log.handed_back(asked) for asked in (running, waiting)]
    assert [event.poison for event in back] == [True, False]
    assert {(event.worker, event.attempt, event.reason) for event in back} == {(narrow.id, 1, "engine_error: gone")}
    await eventually(lambda: log.registrations[-1] == (narrow.id, None))
    assert not log.done


# -- cancellation and deadlines -----------------------------------------------------------------------------------


async def is_cancelled(log: LogClient, worker: WorkerHarness, *all_asked: Any) -> None:
    for asked in all_asked:
        end = await log.end(asked)
        assert (end.code, end.message) == (Code.cancelled, "gone")
        assert end.choices[0].tokens == log.progress(asked)[0].tokens
        finish = log.progress(asked)[0].finish
        assert finish is not None
        assert (finish.reason, finish.code) == ("cancelled", Code.cancelled)
    await log.settled(worker.id)
    await worker.frees_everything()
    assert sorted(event.request for event in log.done) == sorted({event.request for event in log.done})


async def test_a_cancel_may_come_before_its_job(log: LogClient, worker: WorkerHarness) -> None:
    asked = request()
    await worker.session.on_cancel(asked.id, "gone")
    await log.send_job(worker.id, asked)
    await is_cancelled(log, worker, asked)
    assert worker.engine.steps == 0


async def test_cancelled_while_it_waits_for_a_slot(log: LogClient, narrow: WorkerHarness) -> None:
    narrow.engine.hold()
    running, waiting = request(max_tokens=20), request()
    await log.send_job(narrow.id, running)
    narrow.engine.allow(1)
    await log.has_streamed(running)
    await log.send_job(narrow.id, waiting)
    await eventually(lambda: len(narrow.session.requests.running) == 2)
    await narrow.session.on_cancel(waiting.id, "gone")
    await narrow.session.on_cancel(waiting.id, "gone")  # gateways repeat themselves
    narrow.engine.allow(1)
    await log.end(waiting)
    assert log.streamed(waiting) == []
    narrow.engine.resume()
    assert (await log.end(running)).code == ""
    await is_cancelled(log, narrow, waiting)


async def test_cancelled_while_it_runs(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked, neighbour = request(max_tokens=500), request(max_tokens=20)
    await log.send_job(worker.id, asked)
    await log.send_job(worker.id, neighbour)
    worker.engine.allow(2)
    await log.has_streamed(asked)
    await worker.session.on_cancel(asked.id, "gone")
    worker.engine.resume()
    assert (await log.end(neighbour)).code == ""
    await is_cancelled(log, worker, asked)
    got = log.streamed(asked)
    assert 0 < len(got) < 500
    assert got == answer(asked, len(got))
    await worker.session.on_cancel(asked.id, "gone")  # too late: it changes nothing
    await log.settled(worker.id)
    assert len(log.ends(asked)) == 1


async def test_a_deadline_ends_a_running_request_with_what_it_has(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request(max_tokens=500, deadline_s=0.5)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    await eventually(lambda: time.time_ns() > asked.deadline_ns)
    await eventually(lambda: worker.session.requests.running[asked.id].cancelled is not None)
    worker.engine.resume()
    end = await log.end(asked)
    assert end.code == Code.deadline_exceeded
    assert "deadline" in end.message
    got = log.streamed(asked)
    assert ids(end.choices[0].tokens) == got == answer(asked, len(got))
    assert end.choices[0].reason == "error"
    await worker.frees_everything()
    await log.settled(worker.id)


async def test_a_request_whose_deadline_passed_on_its_way_is_not_started(log: LogClient, worker: WorkerHarness) -> None:
    asked = request(deadline_s=-1)
    await log.send_job(worker.id, asked)
    assert (await log.end(asked)).code == Code.deadline_exceeded
    assert worker.engine.steps == 0


# -- the same again, and attempts ---------------------------------------------------------------------------------


async def test_a_job_that_is_delivered_again_runs_once(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (module, session):
        monkeypatch.setattr(each, "ACK_WAIT_S", 0.3)
    async with run_worker(broker, pipeline) as worker:
        monkeypatch.setattr(module, "ACK_WAIT_S", 300)  # the consumer is made; from now on nothing is renewed
        worker.engine.hold()
        asked = request()
        await log.send_job(worker.id, asked)
        worker.engine.allow(1)
        await log.has_streamed(asked)
        stream = log.bus.subjects.stream("WORK")
        deliveries = 0
        while deliveries < 3:
            info = await log.bus.js.consumer_info(stream, worker.id)
            assert info.delivered is not None
            deliveries = info.delivered.consumer_seq or 0
            await asyncio.sleep(0.02)
        worker.engine.resume()
        await log.end(asked)
        await log.settled(worker.id)
        await log.send_job(worker.id, asked, msg_id="again")  # after its end
        await log.settled(worker.id)
        assert sum(len(ids(item.tokens)) for item in log.items) == 8
        assert len(log.ends(asked)) == 1


async def test_a_job_of_an_older_attempt_is_dropped(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request()
    await log.send_job(worker.id, asked, attempt=3)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    await log.send_job(worker.id, asked, attempt=2)
    worker.engine.resume()
    assert (await log.end(asked)).attempt == 3
    await log.settled(worker.id)  # also the message of the attempt that ran
    assert {item.attempt for item in log.items} == {3}
    await log.send_job(worker.id, asked, attempt=1)
    await log.settled(worker.id)
    assert len(log.ends(asked)) == 1


async def test_a_newer_attempt_takes_the_place_of_the_one_that_runs(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request(max_tokens=20)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    await log.send_job(worker.id, asked, attempt=2, resume=(log.progress(asked)[0].tokens,))
    await eventually(lambda: worker.session.requests.running[asked.id].attempt == 2)
    worker.engine.resume()
    end = await log.end(asked)
    assert (end.attempt, ids(end.choices[0].tokens)) == (2, answer(asked))
    assert log.streamed(asked) == answer(asked)
    await log.settled(worker.id)
    await worker.frees_everything()


async def test_a_revoked_attempt_is_dropped_without_a_word(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request(max_tokens=500)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    await log.revoke(worker.id, asked, 1)
    await eventually(lambda: not worker.session.requests.running)
    worker.engine.resume()
    await worker.frees_everything()
    await log.send_job(worker.id, asked, msg_id="late")
    await log.settled(worker.id)
    assert not log.ends(asked)
    assert not log.returned
    assert log.progress(asked)[0].finish is None


@pytest.mark.parametrize("end", ["terminal event", "return"])
async def test_the_end_of_a_revoked_attempt_that_is_not_stored_yet_is_never_stored(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its broker was away meanwhile; another worker runs the request now."""
    asked, held = request(max_tokens=500), request()
    worker.engine.hold()
    await log.send_job(worker.id, asked)
    await eventually(lambda: asked.id in worker.session.requests.running)
    running, terminal = worker.session.requests.running[asked.id], worker.session.terminal
    with monkeypatch.context() as patched:
        patched.setattr(worker.session._outbox, "open", lambda: False)
        if end == "return":
            terminal.requeue(running, "draining")
        else:
            await terminal.end(running, Code.internal, "too late")
        assert asked.id in worker.session.requests.ending
        await log.revoke(worker.id, asked, 1)
        await eventually(lambda: not worker.session.requests.ending and not terminal.pending)
    await worker.session._outbox.resend()
    worker.engine.resume()
    await log.send_job(worker.id, held)
    await log.end(held)
    await log.settled(worker.id)
    assert not log.ends(asked)
    assert not log.returned


async def test_a_long_job_is_not_delivered_again_while_it_runs(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (module, session):
        monkeypatch.setattr(each, "ACK_WAIT_S", 0.5)
    async with run_worker(broker, pipeline) as worker:
        worker.engine.hold()
        asked = request()
        await log.send_job(worker.id, asked)
        await asyncio.sleep(1.6)  # three times the ack_wait: time itself is what is tested
        info = await log.bus.js.consumer_info(log.bus.subjects.stream("WORK"), worker.id)
        assert info.delivered is not None
        assert (info.delivered.consumer_seq, info.num_ack_pending) == (1, 1)
        worker.engine.resume()
        await log.end(asked)
        await log.settled(worker.id)


# -- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [(600, 400), (1 << 20, 9)], ids=["bytes", "items"])
async def test_output_that_does_not_fit_one_message_is_split(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(Bus, "max_message", property(lambda bus: limit))
    monkeypatch.setattr(terminal_events, "MOST_ITEMS", most)
    worker.engine.hold()
    asked = [request([i + 1, 2], max_tokens=1) for i in range(40)]
    for one in asked:
        await log.send_job(worker.id, one)
    await eventually(lambda: len(worker.session.requests.running) == 40)
    worker.engine.resume()
    for one in asked:
        await log.end(one)
        assert log.streamed(one) == answer(one)
    sizes = [len(wire.encode(batch)) for batch in log.batches]
    assert max(sizes) <= limit
    assert max(len(batch.items) for batch in log.batches) <= most
    assert len(sizes) > 1
    assert [batch.seq for batch in log.batches] == list(range(len(sizes)))


async def test_logprobs_travel_with_their_tokens(log: LogClient, worker: WorkerHarness) -> None:
    asked = request(sampling=Sampling(temperature=0.0, logprobs=2))
    await log.send_job(worker.id, asked)
    await log.end(asked)
    for item in log.items:
        assert item.logprobs is not None
        assert len(item.logprobs) == len(ids(item.tokens))
        assert [p.top[0][0] for p in item.logprobs] == ids(item.tokens)


async def test_a_registration_says_for_how_long_the_worker_waits_for_cores(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(waits: CoreWaits, now: float) -> None:
        waits.percent = 40

    monkeypatch.setattr(CoreWaits, "look", look)

    def told() -> bool:
        registered = log.registered(worker.id)
        return registered is not None and registered.load.core_wait_percent == 40

    await eventually(told)


async def test_a_gpu_that_two_processes_of_an_engine_see_is_registered_once(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = fleet.GpuUse(error="lost")
    seen = (fleet.GpuUse("GPU-1", 80, 40), unread, unread, fleet.GpuUse("GPU-1", 80, 40, host="me"))
    monkeypatch.setattr(type(worker.session._metrics), "gpu_use", property(lambda metrics: seen))
    await worker.session.update_registration()

    def gpus() -> tuple[fleet.GpuUse, ...]:
        registered = log.registered(worker.id)
        return () if registered is None else registered.load.gpus

    await eventually(lambda: gpus() == seen[:3])


async def test_cache_events_are_published_in_one_unbroken_row(log: LogClient, worker: WorkerHarness) -> None:
    for i in range(3):
        asked = request([i] * 9)
        await log.send_job(worker.id, asked)
        await log.end(asked)
    await eventually(lambda: len(log.kv) >= 3)
    assert [batch.seq for batch in log.kv] == list(range(len(log.kv)))
    assert {(batch.worker, batch.epoch) for batch in log.kv} == {(worker.id, worker.session.epoch)}
    registration = log.registered(worker.id)
    assert registration is not None
    assert registration.kv_events
    assert not registration.silent_cache
    assert registration.epoch == worker.session.epoch


async def test_a_worker_tells_where_kv_is_that_its_engine_moves_by_itself(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    held = engine()
    held.info = msgspec.structs.replace(
        held.info, handoff_layout="one", handoff_memory="cuda", connector="c", connector_tokens=7
    )
    async with run_worker(broker, pipeline, held) as worker:
        await eventually(lambda: log.registered(worker.id))
        registration = log.registered(worker.id)
        assert registration is not None
        assert registration.transfer is not None
        assert registration.transfer.gpu
        assert registration.load.connector == fleet.ConnectorUse("c", buffer_tokens=7)


async def test_with_events_switched_off_not_one_is_published(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with run_worker(broker, pipeline, publish_events_and_metrics=False) as worker:
        for i in range(3):
            asked = request([i] * 9)
            await log.send_job(worker.id, asked)
            await log.end(asked)
            assert log.streamed(asked) == answer(asked)
        await eventually(lambda: log.registered(worker.id))
        registration = log.registered(worker.id)
        assert registration is not None
        assert not registration.kv_events
        assert registration.silent_cache
        info = await log.bus.js.stream_info(log.bus.subjects.stream("KV"))
        assert info.state.last_seq == 0


async def test_a_dump_names_what_the_events_named_in_pages_that_fit(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        asked = request([i + 1] * 40)
        await log.send_job(worker.id, asked)
        await log.end(asked)
    await eventually(lambda: log.kv and log.kv[-1].seq == worker.loop._output.kv_seq(0) - 1)
    reported = {d for batch in log.kv for event in batch.events for d in _digests(event)}
    monkeypatch.setattr(Bus, "max_message", property(lambda bus: 512))
    pages = [await worker.session.runner.dump(0)]
    while pages[-1].next_page:
        pages.append(await worker.session.runner.dump(pages[-1].next_page))
    assert len(pages) > 1
    assert {d for page in pages for event in page.events for d in _digests(event)} == reported
    assert {(page.worker, page.epoch, page.seq) for page in pages} == {
        (worker.id, worker.session.epoch, log.kv[-1].seq)
    }


def _digests(event: Any) -> list[bytes]:
    return [event.digests[i : i + 16] for i in range(0, len(event.digests), 16)]


# -- leaving ------------------------------------------------------------------------------------------------------


async def test_a_draining_worker_ends_what_runs_and_requeues_the_rest(log: LogClient, narrow: WorkerHarness) -> None:
    narrow.engine.hold()
    running, *others = [request(max_tokens=20) for _ in range(4)]
    await log.send_job(narrow.id, running)
    narrow.engine.allow(1)
    await log.has_streamed(running)
    for asked in others:
        await log.send_job(narrow.id, asked)
    draining = asyncio.create_task(narrow.session.drain(20))
    for asked in others:  # also those that it had no room for
        event = await log.handed_back(asked)
        assert (event.reason, event.poison) == ("draining", False)
    await eventually(lambda: _state(log, narrow) is fleet.WorkerState.draining)
    late = request()
    await log.send_job(narrow.id, late)  # by a router that did not know yet
    await log.handed_back(late)
    assert not draining.done()
    narrow.engine.resume()
    assert (await log.end(running)).code == ""
    assert log.streamed(running) == answer(running)
    await asyncio.wait_for(draining, 10)
    await eventually(lambda: log.registrations[-1] == (narrow.id, None))
    assert len(log.done) == 1
    assert not [asked for asked in others if log.streamed(asked)]


async def test_a_request_whose_first_token_is_on_its_way_when_the_drain_begins_is_ended_here(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(max_tokens=20)
    worker.engine.hold()
    await log.send_job(worker.id, asked)
    await eventually(lambda: _running(worker, asked))
    active = worker.session.requests.running[asked.id]
    update = worker.session.lease.update

    async def begun_meanwhile() -> None:
        await update()
        worker.engine.allow(1)
        while not active.sequences[0].started_ns:  # the loop does not hear of it before the drain goes on
            time.sleep(0.001)  # noqa: ASYNC251
        assert not active.started_ns

    monkeypatch.setattr(worker.session.lease, "update", begun_meanwhile)
    draining = asyncio.create_task(worker.session.drain(20))
    await log.has_streamed(asked)
    worker.engine.resume()
    assert (await log.end(asked)).code == ""
    assert log.streamed(asked) == answer(asked)
    await asyncio.wait_for(draining, 10)
    assert not log.returned


def _running(worker: WorkerHarness, asked: Any) -> bool:
    return asked.id in worker.session.requests.running


def _state(log: LogClient, worker: WorkerHarness) -> fleet.WorkerState | None:
    registration = log.registered(worker.id)
    return registration.state if registration is not None else None


async def test_what_does_not_end_in_the_drain_time_is_requeued_too(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request(max_tokens=500)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    began = time.monotonic()
    await worker.session.drain(0.3)
    assert time.monotonic() - began < 5
    assert (await log.handed_back(asked)).reason == "draining"
    await eventually(lambda: log.registrations[-1] == (worker.id, None))
    assert not log.ends(asked)


async def test_a_drain_is_not_held_up_by_a_revoked_request(log: LogClient, worker: WorkerHarness) -> None:
    worker.engine.hold()
    asked = request(max_tokens=500)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    draining = asyncio.create_task(worker.session.drain(60))
    await eventually(lambda: _state(log, worker) is fleet.WorkerState.draining)
    await log.revoke(worker.id, asked, 1)
    await asyncio.wait_for(draining, 10)
    assert not log.ends(asked)
    assert not log.returned


async def test_a_worker_that_lost_its_lease_publishes_nothing_more_and_starts_over(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.engine.hold()
    asked = request(max_tokens=500)
    await log.send_job(worker.id, asked)
    worker.engine.allow(1)
    await log.has_streamed(asked)
    old, batches_before = worker.id, len(log.batches)
    await log.remove_key(old)
    await asyncio.wait_for(worker.session.lost.wait(), 10)
    worker.engine.allow(1)
    worker.engine.resume()
    await worker.session.fence()
    await worker.begin()
    assert worker.id != old
    await worker.frees_everything()
    again = request([6] * 9)
    await log.send_job(worker.id, again)
    assert (await log.end(again)).worker == worker.id
    assert {batch.worker for batch in log.batches[batches_before:]} == {worker.id}
    assert not log.ends(asked)
    assert not log.returned
    await eventually(lambda: worker.id in {batch.worker for batch in log.kv})
    assert next(batch.seq for batch in log.kv if batch.worker == worker.id) == 1  # its cache was not empty
    assert log.registered(old) is None


@pytest.mark.parametrize("ends", ["before the next session", "in the next session"])
async def test_a_step_that_outlasts_its_session_holds_up_nothing_of_the_next(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(token_runner, "FENCE_S", 0.01)
    worker.engine.hold()
    lost = request(max_tokens=500)
    await log.send_job(worker.id, lost)
    worker.engine.allow(1)
    await log.has_streamed(lost)
    await log.remove_key(worker.id)
    await asyncio.wait_for(worker.session.lost.wait(), 10)
    await worker.session.fence()
    if ends == "in the next session":
        await worker.begin()
    worker.engine.resume()
    await worker.frees_everything()
    if ends == "before the next session":
        await worker.begin()
    asked = request([6] * 9)
    await log.send_job(worker.id, asked)
    assert (await log.end(asked)).worker == worker.id
    assert {item.request for batch in log.batches if batch.worker == worker.id for item in batch.items} == {asked.id}
    await eventually(lambda: worker.id in {batch.worker for batch in log.kv})
    assert next(batch.seq for batch in log.kv if batch.worker == worker.id) == 1


async def test_a_job_that_reaches_a_worker_while_it_gives_up_its_name_is_not_run(
    log: LogClient, worker: WorkerHarness
) -> None:
    """Its output would come under the next name, and nobody would end it."""
    worker.engine.hold()
    running, stray = request(max_tokens=500), request()
    await log.send_job(worker.id, running)
    worker.engine.allow(1)
    await log.has_streamed(running)
    old = worker.session
    giving_up = asyncio.create_task(old.fence())
    await eventually(lambda: not old.requests.running)
    await log.send_job(old.id, stray)
    await log.bus.js.consumer_info(log.bus.subjects.stream("WORK"), old.id)  # the server has dealt with it
    await worker.bus.nc.flush()
    worker.engine.resume()
    await giving_up
    await worker.begin()
    asked = request()
    await log.send_job(worker.id, asked)
    await log.end(asked)
    assert old.requests.running == {}
    assert [item for item in log.items if item.request == stray.id] == []
    await worker.frees_everything()
