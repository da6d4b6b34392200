"""Figures of a run from what was seen of its requests."""

from array import array

import pytest

from penstock.measure.load_generator import Exchange
from penstock.measure.sweep.bodies import PlannedRequest
from penstock.measure.sweep.figures import BadSlo, Slo, figures, record, slo_of


def exchange(key: int, sent: float, **more: object) -> Exchange:
    seen = Exchange(b"", lambda _: None, key=key, sent=sent, first=sent + 0.1, last=sent + 0.5, ended=sent + 0.6)
    seen.gaps_s = array("d", [0.1, 0.3])
    seen.events, seen.status = 5, 200
    seen.prompt_tokens, seen.cached_tokens, seen.output_tokens = 100, 40, 5
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


PLANNED = PlannedRequest(b"", 98, 5)


def test_times_are_in_milliseconds_and_rates_over_first_start_to_last_end() -> None:
    records = [record(exchange(key, 10.0 + key), PLANNED, 10.0) for key in range(2)]
    assert (records[1].sent_ms, records[1].ttft_ms, records[1].latency_ms) == (1000.0, 100.0, 600.0)
    assert records[1].itl_ms == pytest.approx(100.0)
    found = figures(records, 2)
    assert (found.requests, found.failed, found.seconds) == (2, 0, 1.6)
    assert found.output_tokens_per_s == pytest.approx(10 / 1.6)
    assert found.total_tokens_per_s == pytest.approx(210 / 1.6)
    assert found.tokens_per_s_per_gpu == pytest.approx(10 / 1.6 / 2)
    assert found.tokens_per_s_per_user == pytest.approx(10.0)
    assert found.cached_share == pytest.approx(0.4)
    assert found.isl is not None
    assert found.isl_asked is not None
    assert (found.isl.mean, found.isl_asked.mean) == (100, 98)
    assert found.gap_ms is not None
    assert (found.gap_ms.p50, found.gap_ms.max) == (300.0, 300.0)


def test_failed_requests_are_counted_and_make_no_figure() -> None:
    failed = record(exchange(1, 1.0, error="HTTP 500: x", ended=99.0), PLANNED, 0.0)
    found = figures([record(exchange(0, 1.0), PLANNED, 0.0), failed], 0)
    assert (found.requests, found.failed, found.errors) == (1, 1, {"HTTP 500: x": 1})
    assert found.latency_ms is not None
    assert found.latency_ms.max == pytest.approx(600.0)
    assert found.tokens_per_s_per_gpu is None


def test_without_usage_tokens_are_events_and_nothing_is_said_of_lengths() -> None:
    seen = exchange(0, 1.0, prompt_tokens=-1, cached_tokens=-1, output_tokens=-1)
    found = figures([record(seen, PLANNED, 0.0)], 0)
    assert (found.tokens_counted, found.isl, found.osl, found.cached_share) == ("events", None, None, None)
    assert found.output_tokens_per_s == pytest.approx(3 / 0.6)


def test_an_answer_that_is_not_streamed_has_a_latency_only() -> None:
    found = figures([record(exchange(0, 1.0, events=0), PLANNED, 0.0)], 0)
    assert (found.ttft_ms, found.itl_ms, found.gap_ms, found.tokens_per_s_per_user) == (None, None, None, None)
    assert found.latency_ms is not None


def test_nothing_answered_is_no_crash() -> None:
    found = figures([record(exchange(0, 1.0, error="x"), PLANNED, 0.0)], 1)
    assert (found.requests, found.failed, found.ttft_ms, found.requests_per_s) == (0, 1, None, 0.0)


def test_tokens_that_came_together_have_no_gap_between_them() -> None:
    """16 tokens of which the first came after 81 of 82 ms."""
    seen = exchange(0, 0.0, first=0.081, last=0.082, ended=0.082, output_tokens=16, gaps_s=array("d", [0.001]))
    assert record(seen, PLANNED, 0.0).itl_ms == pytest.approx(1 / 15, abs=1e-3)
    at_once = exchange(0, 0.0, first=0.082, last=0.082, ended=0.082, output_tokens=16, gaps_s=array("d"))
    found = figures([record(at_once, PLANNED, 0.0)], 0)
    assert found.itl_ms is not None
    assert (found.itl_ms.mean, found.tokens_per_s_per_user) == (0.0, None)


def test_good_requests_keep_every_limit_and_failed_ones_none() -> None:
    good = exchange(0, 1.0)  # TTFT 100 ms, ITL 100 ms, 600 ms in all
    late = exchange(1, 1.0, first=1.3)
    failed = exchange(2, 1.0, error="HTTP 500: x")
    records = [record(each, PLANNED, 0.0) for each in (good, late, failed)]
    found = figures(records, 0, slo_of("ttft=200, itl=100"))
    assert (found.slo, found.good_share) == ("ttft=200,itl=100", pytest.approx(1 / 3))
    assert found.good_per_s == pytest.approx(1 / 0.6)
    assert figures(records, 0).good_per_s is None
    assert figures(records, 0, Slo(latency=599)).good_share == 0
    single = exchange(3, 1.0, output_tokens=1)
    assert figures([record(single, PLANNED, 0.0)], 0, Slo(itl=1)).good_share == 1
    whole = exchange(4, 1.0, events=0)  # not streamed: its TTFT is unknown
    assert figures([record(whole, PLANNED, 0.0)], 0, Slo(ttft=1e9)).good_share == 0


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "itl=-1", "p99=3", "ttft=500;itl=50", "ttft=inf"])
def test_limits_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BadSlo, match="give limits in ms, as in ttft=500,itl=50"):
        slo_of(text)
    assert slo_of(" ") is None
