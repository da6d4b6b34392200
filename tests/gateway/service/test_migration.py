"""A request as it runs in another cell, and what comes back of it."""

import msgspec

from penstock.gateway.service.migration import event_of, guest_id, guest_of, streamed_before
from penstock.schemas import done, jobs, requests, wire
from penstock.schemas.requests import cell_in, time_of
from penstock.schemas.token_dedup import TokenReassembler
from penstock.schemas.tokens import Finish, TokenItem
from tests.penstock.log_tools.traces import samples

REQUEST = samples.request(n=2, id=requests.new_request_id(cell=1))
AT_NS = 1_800_000_000_000_000_000
STREAMED = (wire.pack_tokens([1, 2, 3]), wire.pack_tokens([4]))


def job_of(attempt: int = 2, **more: object) -> jobs.Job:
    decision = jobs.Decision("kv", "cell-0", "r", AT_NS, revision="v1")
    return jobs.Job(msgspec.Raw(wire.encode(REQUEST)), attempt, decision, **more)  # type: ignore[arg-type]


def test_whoever_carries_an_attempt_finds_it_under_the_same_id() -> None:
    first = guest_id(job_of(), REQUEST.id, 0)
    assert first == guest_id(job_of(), REQUEST.id, 0)
    assert first != guest_id(job_of(3), REQUEST.id, 0)
    assert cell_in(first) == 0
    assert time_of(first) == AT_NS


def test_it_goes_on_behind_what_was_streamed() -> None:
    job = job_of(resume=STREAMED, finished=(1,), endings=(Finish("stop"),))
    guest = guest_id(job, REQUEST.id, 0)
    items = streamed_before(job, guest)
    fold = TokenReassembler(2)
    for item in items:
        fold.push(item)
    assert (fold.position(0), fold.position(1), fold.open) == (3, 1, 1)
    assert fold.push(TokenItem(guest, 1, 0, 3, wire.pack_tokens([9])))
    visitor = guest_of(job, REQUEST, guest, "gateway")
    assert visitor.resumes
    assert visitor.revision == "v1"
    assert not guest_of(job_of(1), REQUEST, guest, "gateway").resumes


def test_what_may_have_ended_workers_runs_alone_there() -> None:
    guest = guest_id(job_of(), REQUEST.id, 0)
    suspect = guest_of(job_of(suspect=jobs.SUSPECT), REQUEST, guest, "gateway")
    alone = guest_of(job_of(suspect=jobs.ALONE), REQUEST, guest, "gateway")
    assert (suspect.watched, suspect.repeats_poison) == (True, False)
    assert (alone.watched, alone.repeats_poison) == (True, True)


def test_its_record_is_one_of_its_own_cell() -> None:
    job = job_of(streamed_ns=7)
    guest = guest_id(job, REQUEST.id, 0)
    there = done.Done(guest, REQUEST.model, 1, "w", (done.Outcome(STREAMED[0], "stop"),), submitted=b"other")
    event = event_of(job, REQUEST, there)
    assert (event.request, event.attempt, event.worker, event.choices) == (REQUEST.id, 2, "w", there.choices)
    assert event.timings.streamed_ns == 7
    recorded = done.request_of(event)
    assert recorded == msgspec.structs.replace(REQUEST, ran_as=guest)
    assert recorded is not None
    assert not recorded.origin
