"""Figures of a run from what was seen of its requests."""

from array import array

import pytest

from penstock.measure.generator.pool import Exchange
from penstock.measure.sweep.bodies import PlannedRequest
from penstock.measure.sweep.figures import figures, record


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
