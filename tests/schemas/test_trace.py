"""Trace context: what is one, what is not, and that ids follow from the request alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.requests import new_request_id
from penstock.schemas.trace import MAX_STATE, Trace, asked, headers, read_parent, span_id, stage_name, trace_id, wanted

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01-what-a-later-version-adds", True),
    ],
)
def test_a_traceparent_is_read_and_written_as_version_00(text: str, sampled: bool) -> None:
    found = read_parent(text)
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled) == (TRACE, SPAN, sampled)
    assert str(found) == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        PARENT.upper(),
        PARENT + "-more",
        PARENT[:-1],
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_traceparent_starts_a_trace_of_its_own(text: str) -> None:
    assert read_parent(text) is None
    if text.strip() == text:
        assert asked(text, "a=1") is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    found = read_parent(text)
    assert found is None or read_parent(str(found)) == found


@pytest.mark.parametrize(("state", "kept"), [("a=1,b=2", "a=1,b=2"), ("x" * (MAX_STATE + 1), ""), ("a=\x00", "")])
def test_a_tracestate_is_kept_if_it_can_be_handed_on(state: str, kept: str) -> None:
    assert asked(f" {PARENT} ", state) == Trace(PARENT, kept)


def test_the_callers_word_decides_what_is_traced() -> None:
    assert not wanted(None)
    assert wanted(Trace())
    assert wanted(Trace(PARENT))
    assert not wanted(Trace(PARENT[:-1] + "0"))


def test_ids_follow_from_the_request_and_the_span() -> None:
    request = new_request_id()
    assert trace_id(request) == trace_id(request, Trace()) == request.replace("-", "")
    assert trace_id(request, Trace(PARENT)) == TRACE
    names = ["", "1 route", stage_name(1, "prefill"), stage_name(2, "prefill"), stage_name(1, "decode")]
    ids = {span_id(request, name) for name in names}
    assert len(ids) == len(names)
    assert all(len(each) == 16 and int(each, 16) for each in ids)
    assert span_id(request, "") == span_id(request, "") != span_id(new_request_id(), "")
    for odd in ("r1", "0" * 32, request.upper()):
        assert len(trace_id(odd)) == 32
        assert trace_id(odd) != trace_id(odd + "x")
        int(trace_id(odd), 16)


def test_an_engine_gets_the_parent_of_its_spans() -> None:
    request = new_request_id()
    name = stage_name(1, "decode")
    assert headers(request, Trace(PARENT, "a=1"), name) == {
        "traceparent": f"00-{TRACE}-{span_id(request, name)}-01",
        "tracestate": "a=1",
    }
    assert headers(request, Trace(), name) == {
        "traceparent": f"00-{request.replace('-', '')}-{span_id(request, name)}-01"
    }
