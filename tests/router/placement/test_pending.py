"""What routing derives from a request without a worker: its revision, its lane, what it has streamed."""

import pytest

from penstock.router.placement.pending import PendingRequest, lane, required_revision
from penstock.schemas import wire
from penstock.schemas.fleet import Revisions
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


def test_only_choices_that_go_on_count_as_resumed() -> None:
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
