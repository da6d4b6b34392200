"""How a request ends at its worker: the terminal event is its record, and nothing is over before that is stored."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import contents, done, wire
from penstock.schemas.requests import Sampling
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_SUMMARY, Subjects
from penstock.schemas.summary import header_of
from penstock.workers.session.lease import Unconfirmed
from tests.infra.bus.support import eventually
from tests.workers.support import LogClient, WorkerHarness, answer, engine, request, run_worker


@pytest.fixture
async def worker(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[WorkerHarness]:
    async with run_worker(broker, pipeline) as worker:
        yield worker


async def limit(log: LogClient, **changes: Any) -> None:
    """Change the limits of the stream of terminal events."""
    name = log.bus.subjects.stream("DONE")
    reply = await log.bus.nc.request(f"$JS.API.STREAM.INFO.{name}", b"")
    config = json.loads(reply.data)["config"] | changes
    config.pop("metadata", None)
    reply = await log.bus.nc.request(f"$JS.API.STREAM.UPDATE.{name}", json.dumps(config).encode())
    assert "error" not in json.loads(reply.data), reply.data


async def refuse_ends(log: LogClient) -> None:
    """No terminal event is stored from now on, as on a full disk."""
    await log.bus.js.publish(log.bus.subjects.returned("filler"), wire.encode(done.Returned("f", "m", 1, "w", "")))
    await limit(log, max_msgs=1, discard="new")


async def take_ends(log: LogClient) -> None:
    await limit(log, max_msgs=-1, discard="old")


async def unacknowledged(log: LogClient, worker: WorkerHarness) -> int:
    info = await log.bus.js.consumer_info(log.bus.subjects.stream("WORK"), worker.id)
    return int(info.num_ack_pending or 0)


async def test_a_terminal_event_that_is_refused_is_stored_once_that_is_possible(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job, delivered again meanwhile, is neither run again nor acknowledged."""
    monkeypatch.setattr("penstock.infra.bus.publisher.RESEND_S", 0.1)
    asked = request()
    await refuse_ends(log)
    await log.send_job(worker.id, asked)
    await eventually(lambda: log.progress(asked)[0].finish is not None)
    await eventually(lambda: worker.session.requests.ending)
    steps = worker.engine.steps
    await log.send_job(worker.id, asked, msg_id="delivered-again")
    await eventually(lambda: worker.session.requests.ending[asked.id].delivery.metadata.sequence.consumer == 2)
    assert await unacknowledged(log, worker) == 2
    assert not log.ends(asked)
    await take_ends(log)
    end = await log.end(asked)
    assert end.choices[0].tokens == wire.pack_tokens(answer(asked))
    assert worker.engine.steps == steps
    await eventually(lambda: not worker.session.requests.ending)
    again = await log.send_job(worker.id, asked, msg_id="delivered-late")
    assert again
    await eventually(lambda: not worker.session.requests.running and asked.id in worker.session.requests.ended)
    assert len(log.ends(asked)) == 1


async def test_a_return_that_is_refused_is_stored_once_that_is_possible(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.infra.bus.publisher.RESEND_S", 0.1)
    worker.engine.hold()
    asked = request()
    await log.send_job(worker.id, asked)
    await eventually(lambda: worker.session.requests.running)
    await refuse_ends(log)
    worker.session.terminal.requeue(worker.session.requests.running[asked.id], "a test")
    await eventually(lambda: asked.id in worker.session.requests.ending)
    assert asked.id not in worker.session.requests.ended
    assert await unacknowledged(log, worker) == 1
    await take_ends(log)
    assert (await log.handed_back(asked)).reason == "a test"
    await log.settled(worker.id)


class Doubt:
    """The worker's lease cannot be renewed for a while."""

    def __init__(self, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lease = worker.session.lease
        self._monkeypatch = monkeypatch

    def begin(self) -> None:
        async def unanswered(expected: int | None) -> bool:
            return False

        self._monkeypatch.setattr(self._lease, "_write", unanswered)
        self._lease._in_doubt = True

    def end(self) -> None:
        self._monkeypatch.undo()


async def ends_in_doubt(log: LogClient, worker: WorkerHarness, doubt: Doubt) -> Any:
    """A request that has streamed some tokens, and whose rest and end fall into the doubt."""
    worker.engine.hold()
    asked = request()
    await log.send_job(worker.id, asked)
    worker.engine.allow(4)
    await log.has_streamed(asked)
    doubt.begin()
    worker.engine.resume()
    await eventually(lambda: worker.session.requests.ending)
    await eventually(lambda: worker.publisher.waiting == 1)
    await asyncio.sleep(0.3)  # longer than the publisher's sweep
    assert not log.ends(asked)
    assert log.progress(asked)[0].finish is None
    return asked


async def test_a_terminal_event_waits_until_the_lease_is_good_and_the_tokens_before_it_are_sent(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = Doubt(worker, monkeypatch)
    asked = await ends_in_doubt(log, worker, doubt)
    doubt.end()
    await log.end(asked)
    assert log.streamed(asked) == answer(asked)
    await log.settled(worker.id)


async def test_a_terminal_event_is_dropped_with_the_tokens_before_it_if_the_lease_is_lost(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or routers would take the request for finished, and nobody would send the rest."""
    doubt = Doubt(worker, monkeypatch)
    asked = await ends_in_doubt(log, worker, doubt)
    await log.remove_key(worker.id)
    doubt.end()
    await asyncio.wait_for(worker.session.lost.wait(), 10)
    await worker.session.fence()
    await eventually(lambda: not worker.publisher.waiting)
    assert not log.ends(asked)
    assert log.progress(asked)[0].finish is None


@pytest.mark.parametrize("lease", ["kept", "lost"])
async def test_without_its_output_in_its_record_a_request_has_not_ended_before_that_is_stored(
    log: LogClient, broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch, lease: str
) -> None:
    """The leader of the token stream has died, say, and that of DONE lives on another server."""
    acknowledging = True
    take = Unconfirmed._on_reply

    async def take_some(self: Unconfirmed, answer: Any) -> None:
        if acknowledging:
            await take(self, answer)

    monkeypatch.setattr(Unconfirmed, "_on_reply", take_some)
    async with run_worker(broker, pipeline, durability="power") as worker:
        acknowledging = False
        asked, stored = request(no_store=True), request()
        subject = log.bus.subjects.contents(asked.gateway, asked.id, contents.REQUEST)
        await log.bus.js.publish(subject, wire.encode(asked))
        await log.send_job(worker.id, contents.without_content(asked, bytes(32)))
        await log.send_job(worker.id, stored)
        assert (await log.end(stored)).code == "", "its record has it all"
        await eventually(lambda: asked.id in worker.session.requests.ending)
        if lease == "kept":
            assert not log.ends(asked)
            acknowledging = True
            assert (await log.end(asked)).code == ""
        else:
            await worker.session.fence()
            await asyncio.sleep(0.3)  # longer than the publisher's sweep
            assert not log.ends(asked)


async def test_the_terminal_event_is_the_record_of_its_request(log: LogClient, worker: WorkerHarness) -> None:
    asked = request(n=2, tenant="acme", client_request_id="theirs", sampling=Sampling(temperature=0, logprobs=2))
    await log.send_job(worker.id, asked)
    end = await log.end(asked)
    without = msgspec.structs.replace(asked, prompt=b"", prompt_length=asked.prompt_tokens, digests=b"")
    assert done.request_of(end) == without
    assert end.left_out == ("prompt",), "REQUESTS has it"
    streamed = log.progress(asked)
    assert [(choice.tokens, choice.logprobs) for choice in end.choices] == [(p.tokens, p.logprobs) for p in streamed]
    assert all(choice.logprobs for choice in end.choices)
    subject = log.bus.subjects.done("acme", asked.model, asked.id)
    stored = await log.bus.js.get_last_msg(log.bus.subjects.stream("DONE"), subject)
    assert stored.data == wire.encode(end)
    assert stored.headers is not None
    assert stored.headers[HEADER_SUMMARY] == header_of(end, asked)
    assert stored.headers[HEADER_CONTENT_TYPE] == wire.content_type(done.Done)


async def test_log_probabilities_of_earlier_attempts_are_kept_if_the_job_has_them(
    log: LogClient, broker: EmbeddedNats, pipeline: Subjects
) -> None:
    asked = request(sampling=Sampling(temperature=0, logprobs=1))
    async with run_worker(broker, pipeline, engine()) as worker:
        await log.publish_tokens(asked, 1, answer(asked)[:3])
        await log.send_job(worker.id, asked, attempt=2, resume=(wire.pack_tokens(answer(asked)[:3]),))
        end = await log.end(asked)
    assert end.choices[0].tokens == wire.pack_tokens(answer(asked))
    assert (end.choices[0].logprobs, end.left_out) == ((), ("prompt", "logprobs"))


def test_what_does_not_fit_is_left_out_the_output_last() -> None:
    asked = request(prompt=tuple(range(200)))
    tokens = wire.pack_tokens(range(100))
    event = done.Done(
        asked.id,
        asked.model,
        1,
        choices=(done.Outcome(tokens, "stop"),),
        submitted=wire.encode(asked),
        code="",
        user="u",
    )
    whole = done.encode_within(event, 10_000)
    assert done.decode(whole) == event
    small = done.decode(done.encode_within(event, len(whole) - 1))
    assert (small.left_out, small.choices[0].tokens) == (("prompt",), tokens)
    kept = done.request_of(small)
    assert kept == msgspec.structs.replace(asked, prompt=b"", digests=b"")
    least = done.decode(done.encode_within(event, 200))
    assert least.left_out == ("prompt", "scores", "logprobs", "tokens", "request")
    assert least.choices[0].reason == "stop"
