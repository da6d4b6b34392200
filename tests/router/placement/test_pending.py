"""What routing derives from a request without a worker: its revision, its lane, what it has streamed."""

from typing import Any

import msgspec
import pytest

from penstock.router.placement.pending import (
    PendingRequest,
    as_fallback,
    lane,
    required_revision,
    trimmed,
    why_fall_back,
)
from penstock.schemas import requests, wire
from penstock.schemas.fleet import Revisions
from penstock.schemas.jobs import EarlierWorker
from penstock.schemas.requests import FALLBACK, Fallback, GenerateRequest, Sampling, stored_as_fallback
from tests.workers.support import request

BOTH = Revisions("serving", frozenset({"serving", "other"}))
NONE = Revisions(None, frozenset())


@pytest.mark.parametrize(
    ("pinned", "known", "expected"),
    [
        ("", BOTH, "serving"),
        ("", NONE, None),
        ("other", BOTH, "other"),
        ("gone", BOTH, "serving"),
        ("gone", NONE, "gone"),
    ],
)
def test_before_its_first_token_a_request_moves_with_the_revision(
    pinned: str, known: Revisions, expected: str | None
) -> None:
    assert required_revision(PendingRequest(request(revision=pinned), b"", "", 0), known) == expected


def test_an_answer_that_has_begun_stays_in_its_revision() -> None:
    pending = PendingRequest(request(), b"", "", 0, resume=(wire.pack_tokens([1]),), revision="gone")
    assert pending.streaming
    assert required_revision(pending, BOTH) == "gone"


def test_a_named_worker_is_taken_in_any_revision() -> None:
    assert required_revision(PendingRequest(request(worker="w", revision="gone"), b"", "", 0), BOTH) is None


def test_only_choices_that_continue_count_as_resumed() -> None:
    resume = (wire.pack_tokens([1, 2]), wire.pack_tokens([3]))
    assert PendingRequest(request(n=2), b"", "", 0, resume=resume, finished=(0,)).resumed_tokens == 1


def test_requests_for_different_workers_wait_in_different_lanes() -> None:
    asked = [
        request([1] * 10),
        request([1] * 11),
        request(model="other"),
        request(worker="w"),
        request(revision="r"),
        request(tokenizer="t"),
    ]
    lanes = [lane(PendingRequest(each, b"", "", 0), local_prefill_tokens=10) for each in asked]
    assert len(set(lanes)) == len(lanes)
    assert lane(PendingRequest(request([2] * 9), b"", "", 0), local_prefill_tokens=10) == lanes[0]


S = 1_000_000_000
OTHER = msgspec.structs.replace(request([7] * 3, model="small"), id="other", sampling=Sampling(seed=3))


def may_fall_back(*models: str, **fields: Any) -> GenerateRequest:
    others = (Fallback(name, wire.encode(msgspec.structs.replace(OTHER, model=name))) for name in models)
    return request(fallbacks=tuple(others), fallback_after_s=5.0, created_ns=100 * S, **fields)


@pytest.mark.parametrize(
    ("waited_s", "workers", "expected"),
    [
        (0.5, False, ""),
        (1.0, False, "'m' has no worker"),
        (4.9, True, ""),
        (5.0, True, "no worker of 'm' started it within 5 s"),
    ],
)
def test_a_held_request_falls_back_without_workers_and_after_a_wait(
    waited_s: float, workers: bool, expected: str
) -> None:
    now_ns = int((100 + waited_s) * S)
    asked = may_fall_back("small")
    assert why_fall_back(PendingRequest(asked, b"", "", now_ns), workers, now_ns, 1.0) == expected
    begun = PendingRequest(asked, b"", "", now_ns, resume=(wire.pack_tokens([1]),))
    assert why_fall_back(begun, workers, 10**6 * S, 1.0) == "", "an answer that has begun stays with its model"
    assert why_fall_back(PendingRequest(request(), b"", "", 0), workers, 10**6 * S, 1.0) == "", "it names none"
    patient = msgspec.structs.replace(asked, fallback_after_s=0.0)
    assert why_fall_back(PendingRequest(patient, b"", "", 0), True, 10**6 * S, 1.0) == ""


@pytest.mark.parametrize("packed", [False, True])
def test_a_fallback_is_the_same_request_for_another_model(packed: bool) -> None:
    asked = may_fall_back("small", "hosted", user="ann", tenant="acme")
    raw = wire.encode(requests.packed(asked) if packed else asked)
    earlier = (EarlierWorker(1, "w", "failed"),)
    first = as_fallback(PendingRequest(asked, raw, "ack", 0, attempt=2, earlier_workers=earlier), 1, "why", 9 * S)
    assert (first.request.id, first.request.model, first.request.tenant) == (asked.id, "small", "acme")
    assert (first.request.asked, first.request.recorded_under) == ("m", "m"), "its one terminal event has one subject"
    assert (first.request.fallback, first.request.fell_back_at) == (1, 2)
    assert (first.attempt, first.reply, first.since_ns) == (2, "ack", 9 * S)
    assert first.earlier_workers == earlier
    assert requests.decode(first.raw).prompt == OTHER.prompt
    assert FALLBACK in first.processors, "older builds, which would not say so to readers, do not take it"
    assert [each.model for each in first.request.fallbacks] == ["hosted"]
    second = as_fallback(first, 2, "why", 9 * S)
    assert (second.request.model, second.request.asked, second.request.fallbacks) == ("hosted", "m", ())
    skipped = as_fallback(PendingRequest(asked, raw, "", 0), 2, "why", 9 * S)
    assert (skipped.request.model, skipped.request.fallback) == ("hosted", 2)
    again = stored_as_fallback(first.raw, 1, 2)
    assert again == (requests.decode(first.raw), first.raw), "its gateway stores it again as it runs"
    with pytest.raises(IndexError):
        as_fallback(second, 1, "again", 0)
    assert trimmed(asked).fallbacks == (Fallback("small"), Fallback("hosted"))
