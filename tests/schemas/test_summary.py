"""What the headers of a record say of it, for those who may not read its body."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.done import Done, Outcome, Timings, Usage
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_SUMMARY, Subjects
from penstock.schemas.summary import header_of, of_done, of_headers
from penstock.schemas.wire import encode
from tests.schemas.samples import REQUEST

S = Subjects()
COUNTS = st.integers(0, 2**40)


@given(
    st.builds(Usage, COUNTS, COUNTS, COUNTS),
    st.builds(Timings, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
    st.text(max_size=20),
    st.sampled_from(["stop", "length", "", "cancelled", "error", "a word\r\nX-Other: 1"]),
    st.sampled_from(["", "worker_lost", "cancelled"]),
)
def test_a_summary_in_headers_is_that_of_the_record_without_what_its_client_wrote(
    usage: Usage, times: Timings, model: str, reason: str, code: str
) -> None:
    request = msgspec.structs.replace(REQUEST, user="secret-user", client_request_id="secret-id", model=model)
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
    assert found == msgspec.structs.replace(whole, user="", client_request_id="", message="", model=model)


def test_other_headers_are_no_summary() -> None:
    for text in ("", "1", "2 done 1 1 1 1 1 1 1 1 standard - - - - m", "1 done 1 1 1 1 x 1 1 1 standard - - - - m"):
        assert of_headers("ps.live.done.t.m.r", {HEADER_SUMMARY: text}) is None
    assert of_headers("ps.live.done.t.m.r", {}) is None
