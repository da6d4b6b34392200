"""Something within a worker fails that never should: whom it concerns, and that nobody waits for it."""

import time
from typing import Any

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.workers.disagg.test_disaggregation import PROMPT, Pair, pair, send_jobs
from tests.workers.support import LogClient, answer, request, run_worker

__all__ = ["pair"]

SOON_S = 20.0  # of deadlines of a minute


class Fault(Exception):
    """Nobody expects it."""


def fails_for(asked: str, real: Any) -> Any:
    """``Reporter.items`` that fails for a request's items."""

    async def items(gateway: str, items_sent: tuple[Any, ...]) -> None:
        if any(item.request == asked for item in items_sent):
            raise Fault
        await real(gateway, items_sent)

    return items


async def test_a_flush_that_fails_gives_its_requests_back_and_the_neighbours_continue(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_worker(broker, pipeline) as worker:
        hit, beside = request(max_tokens=400), request(list(range(50, 70)), max_tokens=400, gateway="g1")
        report = worker.session.reporter
        monkeypatch.setattr(report, "items", fails_for(hit.id, report.items))
        began = time.monotonic()
        await log.send_job(worker.id, hit)
        await log.send_job(worker.id, beside)
        assert "Fault" in (await log.handed_back(hit)).reason
        assert time.monotonic() - began < SOON_S
        await log.end(beside)
        assert log.streamed(beside) == answer(beside)
        await worker.frees_everything()
        await log.settled(worker.id)
        assert not log.ends(hit)
        seqs = [batch.seq for batch in log.kv if batch.worker == worker.id]
        assert seqs == list(range(len(seqs)))
        assert not worker.fatal


async def test_a_flush_that_fails_in_a_second_attempt_too_ends_the_request_with_the_reason(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_worker(broker, pipeline) as worker:
        hit = request(max_tokens=400)
        report = worker.session.reporter
        monkeypatch.setattr(report, "items", fails_for(hit.id, report.items))
        await log.send_job(worker.id, hit, attempt=2)
        await eventually(lambda: log.ends(hit), SOON_S)
        (end,) = log.ends(hit)
        assert end.code == Code.internal
        assert "Fault" in end.message
        await worker.frees_everything()
        await log.settled(worker.id)


async def test_a_kv_batch_that_fails_leaves_a_gap_and_no_request_waits(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_worker(broker, pipeline) as worker:
        real = worker.session.reporter.events
        failed: list[int] = []

        async def events(model: str, rank: int, seq: int, items_sent: Any) -> None:
            if not failed:
                failed.append(seq)
                raise Fault
            await real(model, rank, seq, items_sent)

        monkeypatch.setattr(worker.session.reporter, "events", events)
        asked = request(list(range(1, 40)), max_tokens=200)
        await log.send_job(worker.id, asked)
        await log.end(asked)
        assert log.streamed(asked) == answer(asked)
        await eventually(lambda: [batch for batch in log.kv if batch.worker == worker.id])
        seqs = [batch.seq for batch in log.kv if batch.worker == worker.id]
        assert seqs == list(range(failed[0] + 1, failed[0] + 1 + len(seqs)))


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("stage", ["send_prefilled", "on_prefilled"])
async def test_a_stage_that_fails_ends_its_request_within_seconds_and_leaks_no_block(
    log: LogClient, pair: Pair, monkeypatch: pytest.MonkeyPatch, stage: str, attempt: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Fault

    if stage == "send_prefilled":
        monkeypatch.setattr("penstock.workers.disagg.disaggregation.next_job", fail)
    else:
        disaggregation = pair.decode.session.runner.disaggregation
        monkeypatch.setattr(disaggregation.reader, "fetch", fail)
        monkeypatch.setattr(disaggregation.reserver, "_quarantine_s", 0.1)
    asked = request(PROMPT)
    began = time.monotonic()
    await send_jobs(log, pair, asked, attempt)
    if attempt == 1:
        assert "Fault" in (await log.handed_back(asked)).reason
    else:
        assert (await log.end(asked)).code == Code.internal
    assert time.monotonic() - began < SOON_S
    await pair.free()


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_request_that_cannot_even_begin_ends_within_seconds(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Fault

    monkeypatch.setattr("penstock.workers.runners.token_runner.sequence_requests", fail)
    async with run_worker(broker, pipeline) as worker:
        asked = request()
        began = time.monotonic()
        await log.send_job(worker.id, asked, attempt)
        if attempt == 1:
            assert "Fault" in (await log.handed_back(asked)).reason
        else:
            assert (await log.end(asked)).code == Code.internal
        assert time.monotonic() - began < SOON_S
        await log.settled(worker.id)


@pytest.mark.parametrize("what", ["housekeeping", "sweep", "flushes"])
async def test_upkeep_that_fails_ends_the_process_in_order(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with run_worker(broker, pipeline) as worker:

        def fail(*_: Any) -> None:
            raise Fault

        worker.engine.hold()
        asked = request(max_tokens=900)
        await log.send_job(worker.id, asked)
        worker.engine.allow(3)
        await log.has_streamed(asked)
        if what == "housekeeping":
            monkeypatch.setattr(worker.session.housekeeping, "_each_time", fail)
        elif what == "sweep":  # of the publisher, where no single message is to blame
            monkeypatch.setattr("penstock.infra.bus.publisher.time", None)
        else:
            monkeypatch.setattr(worker.session.runner.publisher, "_publish", fail)
            worker.engine.resume()  # a few steps more may all be too soon after the last flush for another
        await eventually(lambda: worker.fatal, SOON_S)
        monkeypatch.undo()
        worker.engine.resume()
        began = time.monotonic()
        await worker.session.fail("a task of the worker failed", poison=False)  # as the process does
        assert time.monotonic() - began < SOON_S
        assert (await log.handed_back(asked)).poison is False
        await eventually(lambda: log.registered(worker.id) is None)
