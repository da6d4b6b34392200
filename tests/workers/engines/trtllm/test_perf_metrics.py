"""What TensorRT-LLM measures of a request, from its own objects to attributes of a span."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.log_tools.traces.spans import of_stamps
from penstock.schemas.trace import Stamps
from penstock.workers.engines.trtllm import trtllm_metrics
from tests.workers.engines.trtllm.conftest import Results, ask, run

Make = Callable[..., Any]

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
PROMPT = list(range(20, 80))
ENDPOINT = "http://127.0.0.1:4317"


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def test_only_what_happened_is_reported() -> None:
    timing = SimpleNamespace(
        arrival_time=seconds(100.0),
        first_scheduled_time=seconds(100.25),
        first_token_time=seconds(101.0),
        last_token_time=seconds(103.0),
        kv_cache_transfer_start=seconds(0),
        kv_cache_transfer_end=seconds(0),
        kv_cache_size=0,
    )
    cache = SimpleNamespace(num_new_allocated_blocks=3, num_reused_blocks=0, num_missed_blocks=3)
    found = trtllm_metrics.measured_times(
        SimpleNamespace(timing_metrics=timing, kv_cache_metrics=cache, first_iter=5, last_iter=8)
    )
    assert found == {
        "queue_s": 0.25,
        "prefill_s": 0.75,
        "decode_s": 2.0,
        "ttft_s": 1.0,
        "e2e_s": 3.0,
        "blocks_new": 3,
        "blocks_missed": 3,
        "iterations": 4,
    }
    timing.kv_cache_transfer_start, timing.kv_cache_transfer_end = seconds(100.25), seconds(100.5)
    timing.kv_cache_size = 4096
    found = trtllm_metrics.measured_times(SimpleNamespace(timing_metrics=timing))
    assert (found["kv_transfer_s"], found["kv_transfer_bytes"]) == (0.25, 4096)


@pytest.mark.parametrize(
    "odd",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(timing_metrics=None, kv_cache_metrics=None),
        SimpleNamespace(timing_metrics=SimpleNamespace(arrival_time=7, first_token_time="x"), first_iter=None),
        SimpleNamespace(first_iter=9, last_iter=2),
    ],
)
def test_what_a_release_lacks_or_calls_otherwise_is_left_out(odd: Any) -> None:
    assert trtllm_metrics.measured_times(odd) == {}


def measured(results: Results, key: object) -> dict[str, float]:
    found = [each for step in results.steps for each in step.measured if each.key == key]
    assert len(found) <= 1
    return dict(found[0].values) if found else {}


def test_a_traced_requests_measurements_become_attributes_of_its_span(make: Make) -> None:
    engine = make()
    results = run(engine, ask("a", PROMPT, 8, ignore_eos=True, trace=TRACE), ask("b", PROMPT[::-1], 8, ignore_eos=True))
    found = measured(results, "a")
    assert 0 < found["prefill_s"] <= found["ttft_s"] <= found["e2e_s"]
    assert found["blocks_new"] == found["blocks_missed"] == 4
    assert "kv_transfer_s" not in found
    assert measured(results, "b") == {}
    last = next(step for step in results.steps if step.measured)
    assert any(output.key == "a" and output.finish for output in last.outputs), "it comes no later than the end"
    attributes = of_stamps(Stamps(engine=found))
    assert attributes["gen_ai.latency.time_in_model_prefill"] == found["prefill_s"]
    assert attributes["gen_ai.latency.e2e"] == found["e2e_s"]
    assert attributes["penstock.engine.blocks_new"] == 4


def test_it_is_measured_also_where_nothing_is_published(make: Make) -> None:
    results = run(make(publish_events_and_metrics=False), ask("a", PROMPT, 4, ignore_eos=True, trace=TRACE))
    assert measured(results, "a")["e2e_s"] > 0


def test_the_decode_engine_reports_the_transfer(make: Make) -> None:
    prefill, decode = make(role="prefill"), make(role="decode")
    first = run(prefill, ask("p", PROMPT, 2, pin=True, ignore_eos=True, trace=TRACE))
    assert measured(first, "p")["prefill_s"] > 0
    asked = ask(
        "d", PROMPT, 8, generated=first.tokens("p"), opaque=first.pinned[0].opaque, ignore_eos=True, trace=TRACE
    )
    found = measured(run(decode, asked), "d")
    assert found["kv_transfer_s"] > 0
    assert found["kv_transfer_bytes"] > 0
    attributes = of_stamps(Stamps(engine=found))
    assert attributes["penstock.engine.kv_transfer.duration"] == found["kv_transfer_s"]


def test_the_engines_own_spans_are_below_its_workers(make: Make) -> None:
    from tensorrt_llm.executor.result import EXPORTED

    engine = make(otlp_endpoint=ENDPOINT)
    EXPORTED.clear()  # its warm-up
    run(engine, ask("a", PROMPT, 4, ignore_eos=True, trace=TRACE))
    assert [(endpoint, headers) for endpoint, headers, _ in EXPORTED] == [(ENDPOINT, TRACE)]
    EXPORTED.clear()
    run(make(), ask("a", PROMPT, 4, ignore_eos=True, trace=TRACE))
    assert not EXPORTED
