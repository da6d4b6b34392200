"""What the headers of a record say of it, for those who may not read its body."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.done import Done, MadeWith, Outcome, Timings, Usage
from penstock.schemas.jobs import EarlierWorker, Job, earlier_workers, unexplained_losses
from penstock.schemas.requests import Sampling
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_SUMMARY, Subjects
from penstock.schemas.summary import (
    Criteria,
    RequestSummary,
    as_dict,
    header_of,
    of_done,
    of_encoded_done,
    of_headers,
    settings_text,
)
from penstock.schemas.wire import encode
from tests.schemas.samples import DECISION, REQUEST

S = Subjects()
COUNTS = st.integers(0, 2**40)


@given(
    st.builds(Usage, COUNTS, COUNTS, COUNTS, st.integers(-1, 2**40)),
    st.builds(Timings, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
    st.text(max_size=20),
    st.sampled_from(["stop", "length", "", "cancelled", "error", "a word\r\nX-Other: 1"]),
    st.sampled_from(["", "worker_lost", "cancelled"]),
    st.sampled_from(["", "big one"]),
)
def test_a_summary_in_headers_is_that_of_the_record_without_what_its_client_wrote(
    usage: Usage, times: Timings, model: str, reason: str, code: str, asked: str
) -> None:
    request = msgspec.structs.replace(
        REQUEST, user="secret-user", client_request_id="secret-id", model=model, asked=asked
    )
    event = Done(
        request.id, model, 2, "w 1", (Outcome(b"secret", reason),), usage, times, code, "secret", "secret-user",
        submitted=encode(request),
    )  # fmt: skip
    text = header_of(event, request)
    assert text.isascii()
    assert "secret" not in text
    assert "\r" not in text
    subject = S.live(S.done(request.tenant, model, request.id))
    found = of_headers(subject, {HEADER_SUMMARY: text, HEADER_MSG_ID: request.id})
    whole = of_done(event)
    assert found == msgspec.structs.replace(
        whole, user="", client_request_id="", message="", model=model, sampling=None
    )


def test_other_headers_are_no_summary() -> None:
    for text in ("", "1", "2 done 1 1 1 1 1 1 1 1 standard - - - - m", "1 done 1 1 1 1 x 1 1 1 standard - - - - m"):
        assert of_headers("ps.live.done.t.m.r", {HEADER_SUMMARY: text}) is None
    assert of_headers("ps.live.done.t.m.r", {}) is None


def test_a_request_is_found_by_each_of_its_workers_and_by_those_that_it_lost() -> None:
    earlier = (EarlierWorker(1, "w-1", "worker_lost: SIGKILL"), EarlierWorker(2, "w-2", "returned: draining"))
    event = Done(REQUEST.id, "tiny", 3, "w-3", submitted=encode(REQUEST), timings=Timings(earlier_workers=earlier))
    moved = of_done(event)
    assert moved.workers == ["w-1", "w-2", "w-3"]
    assert moved.lost_workers == ["w-1"]
    assert of_encoded_done(encode(event), RequestSummary) == moved
    assert [Criteria(worker=name).accepts(moved) for name in ("w-1", "w-2", "w-3", "w-4")] == [True, True, True, False]
    calm = of_done(Done(REQUEST.id, "tiny", 1, "w-3", submitted=encode(REQUEST)))
    assert [Criteria(lost=True).accepts(each) for each in (moved, calm)] == [True, False]


def test_the_headers_of_a_record_name_earlier_workers() -> None:
    earlier = (EarlierWorker(1, "w:1,2", "worker_lost: it said\r\n secret"), EarlierWorker(2, "w-2"))
    event = Done(REQUEST.id, "tiny", 3, "w-3", submitted=encode(REQUEST), timings=Timings(earlier_workers=earlier))
    text = header_of(event, REQUEST)
    assert "secret" not in text
    subject = S.live(S.done(REQUEST.tenant, "tiny", REQUEST.id))
    found = of_headers(subject, {HEADER_SUMMARY: text})
    assert found is not None
    assert (found.workers, found.lost_workers) == (["w:1,2", "w-2", "w-3"], ["w:1,2"])
    older = of_headers(subject, {HEADER_SUMMARY: " ".join(text.split(" ")[:16])})
    assert older is not None
    assert older.workers == ["w-3"]
    assert of_headers(subject, {HEADER_SUMMARY: text.replace("1:w", "x:w")}) is None


def test_a_summary_says_what_an_answer_was_made_with() -> None:
    sampling = Sampling(0.7, top_k=5, seed=3, logit_bias={7: 1.0, 9: -2.0})
    request = msgspec.structs.replace(REQUEST, sampling=sampling, lora="poet")
    event = Done(
        REQUEST.id,
        "tiny",
        1,
        "w-3",
        submitted=encode(request),
        timings=Timings(made_with=MadeWith("2f6c", "mock", "penstock 1"), router="r-1"),
    )
    for found in (of_done(event), of_encoded_done(encode(event), RequestSummary)):
        assert found is not None
        assert (found.revision, found.engine, found.build, found.adapter) == ("2f6c", "mock", "penstock 1", "poet")
        assert found.router == "r-1"
        assert settings_text(found.sampling) == "temperature 0.7, top_k 5, seed 3, logit_bias of 2 tokens"
        assert as_dict(found)["sampling"] == {
            "temperature": 0.7, "top_k": 5, "seed": 3, "logit_bias": {"7": 1.0, "9": -2.0}
        }  # fmt: skip
    bare = of_done(Done(REQUEST.id, "tiny", 1))
    assert (as_dict(bare)["sampling"], settings_text(bare.sampling)) == ({}, "")


def test_at_a_moment_are_the_requests_that_were_accepted_and_not_over() -> None:
    over = RequestSummary("r", "tiny", "done", 10, ended_ns=20)
    running = RequestSummary("r", "tiny", "running", 10)
    moments = (9, 10, 15, 20, 21)
    assert [Criteria(at_ns=at).accepts(over) for at in moments] == [False, True, True, True, False]
    assert [Criteria(at_ns=at).accepts(running) for at in moments] == [False, True, True, True, True]


def test_a_job_of_an_older_build_names_the_workers_that_were_lost() -> None:
    job = Job(msgspec.Raw(encode(REQUEST)), 3, DECISION, lost=((2, "w-2"),))
    assert earlier_workers(job) == (EarlierWorker(2, "w-2", "worker_lost"),)
    explained = (EarlierWorker(1, "w-1", "worker_lost: SIGKILL"), EarlierWorker(2, "w-2", "returned: draining"))
    assert unexplained_losses((*explained, *earlier_workers(job))) == [(2, "w-2")]


def test_an_attempt_that_no_worker_got_is_not_counted() -> None:
    earlier = tuple(EarlierWorker(number, "w-1", "worker_lost") for number in (1, 2, 3, 4))
    ended = of_done(Done(REQUEST.id, "tiny", 5, code="worker_lost", timings=Timings(earlier_workers=earlier)))
    assert (ended.attempts, ended.workers) == (4, ["w-1"])
