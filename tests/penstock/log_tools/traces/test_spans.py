"""What spans a request's messages make: the tree, its times, attempts, handoffs, errors, measurements."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.log_tools.traces.spans import Span, covered
from penstock.log_tools.traces.spans import spans as spans_of
from penstock.schemas.done import KILLED, Done, Timings
from penstock.schemas.errors import Code
from penstock.schemas.jobs import Revoke, Stage
from penstock.schemas.trace import Stamps, Trace, span_id, stage_name
from tests.penstock.log_tools.traces.samples import (
    ID,
    MS,
    PARENT,
    T0,
    at,
    done,
    encoded,
    job,
    line,
    prefilled,
    request,
    returned,
    split,
    timeline,
)


def named(spans: list[Span], name: str, attempt: int = 1) -> Span:
    (found,) = [s for s in spans if s.name == name and s.attributes.get("penstock.attempt", attempt) == attempt]
    return found


def below(spans: list[Span], parent: Span) -> list[str]:
    found = sorted((s for s in spans if s.parent_id == parent.span_id), key=lambda s: s.start_ns)
    return [span.name for span in found]


def ms(span: Span) -> tuple[float, float]:
    return (span.start_ns - T0) / MS, (span.end_ns - T0) / MS


def check(spans: list[Span]) -> None:
    """What holds of every trace."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "two spans have one id"
    assert len({span.trace_id for span in spans}) == 1
    assert [span for span in spans if span.parent_id not in by_id] == spans[:1]
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert {link.span_id for link in span.links} <= by_id.keys() - {span.span_id}
        parent = by_id.get(span.parent_id)
        assert parent is None or parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns


# --- undisturbed ---


@pytest.mark.parametrize("stamped", [False, True])
def test_one_trace_goes_through_gateway_router_prefill_and_decode(stamped: bool) -> None:
    spans = spans_of(split(stamped=stamped))
    check(spans)
    root = spans[0]
    assert (root.name, root.service, root.instance, root.kind) == ("chat tiny", "gateway", "gw-1", "server")
    assert root.trace_id == ID.replace("-", "")
    assert root.parent_id == ""
    assert below(spans, root) == ["route", "prefill", "decode"]
    assert ms(root) == (0, 50)
    assert ms(named(spans, "route")) == (1, 2)
    assert ms(named(spans, "prefill")) == (3, 22)
    assert ms(named(spans, "decode")) == (22, 50)
    assert ms(named(spans, "transfer")) == (24, 26)
    assert below(spans, named(spans, "prefill")) == ["wait", "prompt"]
    own = ["wait", "first token", "generate"] if stamped else []
    assert below(spans, named(spans, "decode")) == ["transfer", *own]
    assert [span.error for span in spans] == [None] * len(spans)


def test_links_name_who_handed_off() -> None:
    spans = spans_of(split())
    prefill = named(spans, "prefill").span_id
    assert [(link.span_id, link.why) for link in named(spans, "decode").links] == [(prefill, "handoff")]
    assert [(link.span_id, link.why) for link in named(spans, "transfer").links] == [(prefill, "handoff")]
    assert named(spans, "prefill").links == []


def test_the_clients_span_is_the_parent_and_its_trace_everybodys() -> None:
    spans = spans_of(split(Trace(PARENT, "vendor=1")))
    check(spans)
    assert {span.trace_id for span in spans} == {PARENT[3:35]}
    assert spans[0].parent_id == PARENT[36:52]
    assert {span.state for span in spans} == {"vendor=1"}


def test_names_follow_the_genai_conventions() -> None:
    root = spans_of(split())[0].attributes
    assert (
        root
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": ID,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 32,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.response.time_to_first_chunk": 0.02,
        }
        == root
    )
    assert "gen_ai.request.top_k" not in root  # the client did not ask for it
    known = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    names = {value for name, value in vars(known).items() if name.startswith("GEN_AI_")}
    assert {name for name in root if name.startswith("gen_ai.")} <= names


def test_the_routers_decision_is_a_span_without_its_table() -> None:
    route = named(spans_of(split()), "route").attributes
    assert (
        route
        | {
            "penstock.router.mode": "kv",
            "penstock.router.worker": "p-1",
            "penstock.router.candidates": 2,
            "penstock.router.overlap_blocks": 2,
            "penstock.router.prompt_blocks": 3,
            "penstock.router.waited": 0.001,
            "penstock.router.route": ["prefill p-1", "decode d-1"],
        }
        == route
    )


def test_the_transfer_is_read_from_the_ledger() -> None:
    transfer = named(spans_of(split()), "transfer")
    assert (transfer.service, transfer.instance) == ("worker", "d-1")
    assert (
        transfer.attributes
        | {
            "penstock.transfer.source": "p-1",
            "penstock.transfer.backend": "nixl",
            "penstock.transfer.blocks": 4,
            "penstock.transfer.bytes": 4096,
            "penstock.transfer.duration": 0.0015,
        }
        == transfer.attributes
    )


def test_a_failed_transfer_is_an_error_and_the_prompt_is_computed_again() -> None:
    made = timeline(request(Trace()))
    made.add_work("prefill", "p-1", at(3), job(2, Stage("prefill", "p-1"), Stage("decode", "d-1")))
    made.add_work("decode", "d-1", at(22), prefilled("p-1", 5, 20))
    made.add_handoff(line("leased", 24))
    made.add_handoff(line("failed", 29, cause="timeout", message="no answer"))
    made.add_end(done(50, stamps=Stamps(at(23), at(30), at(44))), at(50))
    spans = spans_of(made)
    check(spans)
    transfer = named(spans, "transfer")
    assert (transfer.error, transfer.attributes["error.type"]) == ("no answer", "timeout")
    assert named(spans, "decode").error is None
    assert [n for n in below(spans, named(spans, "decode")) if n != "transfer"] == ["wait", "prompt", "generate"]


def test_an_encode_stage_is_in_front() -> None:
    made = timeline()
    made.add_work(
        "encode", "e-1", at(3), job(2, Stage("encode", "e-1"), Stage("prefill", "p-1"), Stage("decode", "d-1"))
    )
    made.add_work("prefill", "p-1", at(10), encoded("e-1", 4))
    made.add_handoff(line("read", 11, "e-1", "p-1", "prefill", seconds=0.0005))
    made.add_work("decode", "d-1", at(22), prefilled("p-1", 12, 20))
    made.add_end(done(50), at(50))
    spans = spans_of(made)
    check(spans)
    assert below(spans, spans[0]) == ["route", "encode", "prefill", "decode"]
    assert below(spans, named(spans, "encode")) == ["wait", "embeddings"]
    assert below(spans, named(spans, "prefill")) == ["transfer", "wait", "prompt"]


def test_one_worker_alone_has_its_phases_without_stamps() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_end(done(50, "w-1"), at(50))
    spans = spans_of(made)
    check(spans)
    assert below(spans, named(spans, "aggregated")) == ["wait", "prompt", "generate"]
    assert ms(named(spans, "prompt")) == (5, 20)
    assert named(spans, "aggregated").attributes["gen_ai.usage.output_tokens"] == 2


def test_a_prefix_that_was_read_from_another_worker_is_a_span_of_its_reader() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_handoff(line("offered", 3.2, "w-2", "w-1", "prefix"))
    made.add_handoff(line("leased", 3.5, "w-2", "w-1", "prefix"))
    made.add_handoff(line("read", 4.5, "w-2", "w-1", "prefix", blocks=12, bytes=4096, seconds=0.001))
    made.add_end(done(50, "w-1"), at(50))
    spans = spans_of(made)
    check(spans)
    assert below(spans, named(spans, "aggregated")) == ["prefix", "wait", "prompt", "generate"]
    prefix = named(spans, "prefix")
    assert ms(prefix) == (3.5, 4.5)
    assert prefix.attributes["penstock.transfer.source"] == "w-2"
    assert prefix.attributes["penstock.transfer.blocks"] == 12


# --- what was measured ---


def test_what_workers_and_engines_measured_are_attributes_of_their_spans() -> None:
    decode = named(spans_of(split(stamped=True)), "decode")
    assert (
        decode.attributes
        | {
            "penstock.worker.preemptions": 1,
            "gen_ai.latency.time_in_queue": 0.25,
            "penstock.engine.kv_transfer_bytes": 4096.0,
        }
        == decode.attributes
    )
    assert [event.name for event in decode.events] == ["received"]


def test_an_engines_own_spans_are_children_of_its_workers() -> None:
    assert named(spans_of(split()), "decode").span_id == span_id(ID, stage_name(1, "decode"))


# --- attempts ---


def killed() -> RequestTimeline:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_work("aggregated", "w-2", at(18), job(17, Stage("aggregated", "w-2"), attempt=2, reason="worker_lost"))
    made.add_end(done(50, "w-2", attempt=2), at(50))
    return made


def test_a_killed_workers_attempt_ends_with_an_error_when_the_router_steers_again() -> None:
    spans = spans_of(killed())
    check(spans)
    first, second = named(spans, "aggregated", 1), named(spans, "aggregated", 2)
    assert (first.instance, first.error, first.attributes["error.type"]) == ("w-1", "worker_lost", "worker_lost")
    assert ms(first) == (3, 16)
    assert (second.instance, second.error) == ("w-2", None)
    assert [(link.span_id, link.why) for link in second.links] == [(first.span_id, "retry")]
    assert [link.span_id for link in named(spans, "route", 2).links] == [first.span_id]
    assert spans[0].error is None
    assert spans[0].attributes["penstock.attempts"] == 2


def test_an_attempt_that_was_given_back_ends_when_it_was() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_end(returned(1, "w-1", "draining"), at(9))
    made.add_work(
        "aggregated", "w-2", at(18), job(17, Stage("aggregated", "w-2"), attempt=2, reason="returned: draining")
    )
    made.add_end(done(50, "w-2", attempt=2), at(50))
    spans = spans_of(made)
    check(spans)
    first = named(spans, "aggregated", 1)
    assert (ms(first)[1], first.error, first.attributes["error.type"]) == (9, "returned: draining", "returned")


@pytest.mark.parametrize("reason", ["worker_lost", "worker_lost: it was killed (SIGKILL)"])
@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("pair", [True, False])
def test_a_killed_workers_attempt_is_lost_whoever_reports_it_and_in_whatever_order(
    reason: str, reported: bool, pair: bool
) -> None:
    """A router sees the end of a connection first, or what the supervisor says of the process. A reader may not have
    that report, and the streams interleave in any way."""

    def work(made: RequestTimeline) -> list[Callable[[], None]]:
        route = (Stage("prefill", "p-1"), Stage("decode", "w-1")) if pair else (Stage("decode", "w-1"),)
        again = (Stage("decode", "w-2"),)
        return [
            lambda: made.add_work(route[0].role, route[0].worker, at(3), job(2, *route)),
            *([lambda: made.add_work("decode", "w-1", at(8), prefilled("p-1", 4, 7))] if pair else []),
            lambda: made.add_work("decode", "w-2", at(18), job(17, *again, attempt=2, reason=reason)),
        ]

    def ends(made: RequestTimeline) -> list[Callable[[], None]]:
        report = returned(1, "w-1", "it was killed (SIGKILL)", KILLED)
        return [
            *([lambda: made.add_end(report, at(12))] if reported else []),
            lambda: made.add_end(done(50, "w-2", attempt=2), at(50)),
        ]

    count = len(work(timeline())) + len(ends(timeline()))
    for places in combinations(range(count), len(ends(timeline()))):
        made = timeline()
        one, other = iter(work(made)), iter(ends(made))
        for place in range(count):
            next(other if place in places else one)()
        spans = spans_of(made)
        check(spans)
        lost = named(spans, "decode")
        assert (lost.instance, bool(lost.error), lost.attributes["error.type"]) == ("w-1", True, "worker_lost"), places
        assert named(spans, "decode", 2).error is None


def test_prefill_is_revoked_when_its_decode_worker_is_lost() -> None:
    made = timeline()
    made.add_work("prefill", "p-1", at(3), job(2, Stage("prefill", "p-1"), Stage("decode", "d-1")))
    made.add_work("prefill", "p-1", at(8), Revoke(ID, 1))
    made.add_work("aggregated", "w-2", at(10), job(9, Stage("aggregated", "w-2"), attempt=2, reason="worker_lost"))
    made.add_end(done(50, "w-2", attempt=2), at(50))
    spans = spans_of(made)
    check(spans)
    assert named(spans, "prefill").error == "revoked"


# --- ends ---


@pytest.mark.parametrize(
    ("code", "error"), [(Code.engine_error, "what to do"), (Code.cancelled, None), (Code.out_of_blocks, None)]
)
def test_an_error_of_ours_is_one_and_the_clients_is_none(code: Code, error: str | None) -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_end(done(50, "w-1", code=code.value, message="what to do"), at(50))
    spans = spans_of(made)
    for span in (spans[0], named(spans, "aggregated")):
        assert span.error == error
        assert span.attributes["error.type"] == code.value
        assert span.attributes["http.response.status_code"] == code.status


def test_a_request_that_nobody_could_take_is_the_routers() -> None:
    made = timeline()
    made.add_end(
        Done(ID, "tiny", 1, timings=Timings(T0, ended_ns=at(40)), code="deadline_exceeded", message="late"), at(40)
    )
    spans = spans_of(made)
    check(spans)
    assert [(span.name, span.error) for span in spans] == [("chat tiny", "late"), ("route", "late")]
    assert ms(spans[1]) == (0, 40)


def test_after_too_many_attempts_the_routers_last_word_is_a_span() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    made.add_end(Done(ID, "tiny", 2, timings=Timings(T0, ended_ns=at(40)), code="worker_lost", message="gone"), at(40))
    spans = spans_of(made)
    check(spans)
    assert named(spans, "aggregated").error == "gone"
    assert named(spans, "route", 2).error == "gone"


def test_an_unfinished_request_has_the_spans_that_ended() -> None:
    made = timeline()
    made.add_work("aggregated", "w-1", at(3), job(2, Stage("aggregated", "w-1")))
    spans = spans_of(made)
    check(spans)
    assert ms(spans[0]) == (0, 3)


def test_a_message_that_is_stored_twice_counts_once() -> None:
    made = split()
    once = spans_of(made)
    made.add_work("decode", "d-1", at(40), prefilled("p-1", 5, 20))
    made.add_work("prefill", "p-1", at(41), job(2, Stage("prefill", "p-1"), Stage("decode", "d-1")))
    assert spans_of(made) == once


def test_the_same_log_makes_the_same_spans() -> None:
    made = split(Trace(PARENT), stamped=True)
    assert spans_of(made) == spans_of(made) == spans_of(split(Trace(PARENT), stamped=True))


# --- whatever the log says ---

moments = st.floats(-50, 100)


@given(st.data())
def test_spans_nest_and_end_after_they_start_whatever_the_clocks_say(data: st.DataObject) -> None:
    """Each process has its own clock, any worker may be lost at any stage, and any message may be missing."""
    draw = data.draw
    made = timeline(request(draw(st.sampled_from([None, Trace(), Trace(PARENT)]))))
    attempts = draw(st.integers(0, 3))
    for attempt in range(1, attempts + 1):
        route = draw(st.sampled_from([("aggregated",), ("prefill", "decode"), ("encode", "prefill", "decode")]))
        stages = [Stage(role, f"{role}-{attempt}") for role in route]
        reached = draw(st.integers(1, len(stages)))
        made.add_work(route[0], stages[0].worker, at(draw(moments)), job(draw(moments), *stages, attempt=attempt))
        for number in range(1, reached):
            before, stage = stages[number - 1], stages[number]
            stamps = draw(st.sampled_from([None, Stamps(at(draw(moments)), at(draw(moments)), at(draw(moments)))]))
            message: Any = encoded(before.worker, draw(moments), stage.role, attempt)
            if before.role == "prefill":
                message = prefilled(before.worker, draw(moments), draw(moments), stamps, attempt)
            made.add_work(stage.role, stage.worker, at(draw(moments)), message)
        for state in draw(st.lists(st.sampled_from(["offered", "leased", "read", "failed", "released"]), max_size=4)):
            seconds = draw(st.floats(0, 1))
            made.add_handoff(
                line(state, draw(moments), stages[0].worker, stages[-1].worker, route[-1], seconds=seconds)
            )
        if draw(st.booleans()):
            made.add_end(returned(attempt, stages[reached - 1].worker, "draining"), at(draw(moments)))
    if draw(st.booleans()):
        worker = draw(st.sampled_from(["", "aggregated-1", "decode-1", "prefill-2", "decode-3"]))
        times = Timings(T0, *(draw(st.sampled_from([0, at(draw(moments))])) for _ in range(3)), at(draw(moments)))
        code = draw(st.sampled_from(["", "cancelled", "worker_lost", "of_a_later_version"]))
        made.add_end(Done(ID, "tiny", draw(st.integers(1, 4)), worker, timings=times, code=code), at(draw(moments)))
    spans = spans_of(made)
    check(spans)
    assert len([span for span in spans if span.name == "route"]) >= attempts


def test_a_parent_grows_and_no_child_is_cut() -> None:
    def span(name: str, parent: str, start: int, end: int) -> Span:
        return Span(name, "worker", "w", "t", name, parent, start, end)

    spans = covered([span("a", "", 10, 20), span("b", "a", 12, 14), span("c", "b", 5, 30), span("d", "b", 9, 3)])
    assert [(s.start_ns, s.end_ns) for s in spans] == [(5, 30), (5, 30), (5, 30), (9, 9)]
