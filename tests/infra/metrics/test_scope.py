"""Metrics with automatic labels."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.infra.metrics.scope import MetricConflict, MetricScope, label_name, metric_name, process_scope

PROCESS = {"namespace": "ps", "process": "worker-0", "model": "demo"}


def page(scope: MetricScope) -> dict[str, float]:
    """{name{label="value",...}: value} of a scope's page, read as Prometheus would."""
    families = text_string_to_metric_families(generate_latest(scope.registry).decode())
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created") and not sample.name.startswith("process_")
    }


def test_a_series_carries_the_labels_of_its_scope_and_of_those_above_it() -> None:
    process = process_scope("worker", PROCESS)
    worker = process.child("worker")
    rank = worker.child("kv", {"dp_rank": "1"})
    process.counter("starts", "starts").inc()
    worker.gauge("running", "sequences", ["state"]).labels("decode").set(3)
    rank.gauge("used_blocks", "blocks").set(7)
    above = "component=worker"
    assert page(process) == {
        f"penstock_starts_total{{{above},model=demo,namespace=ps,process=worker-0}}": 1.0,
        f"penstock_worker_running{{{above},model=demo,namespace=ps,process=worker-0,state=decode}}": 3.0,
        f"penstock_worker_kv_used_blocks{{{above},dp_rank=1,model=demo,namespace=ps,process=worker-0}}": 7.0,
    }
    assert page(rank) == page(process)


def test_a_metric_in_two_scopes_is_one_family() -> None:
    process = MetricScope()
    for rank in ("0", "1"):
        process.child("kv", {"dp_rank": rank}).gauge("used_blocks", "blocks").set(int(rank))
    text = generate_latest(process.registry).decode()
    assert text.count("# TYPE penstock_kv_used_blocks gauge") == 1
    assert page(process) == {"penstock_kv_used_blocks{dp_rank=0}": 0.0, "penstock_kv_used_blocks{dp_rank=1}": 1.0}


def test_a_label_that_is_known_later_reaches_all_scopes_below() -> None:
    process = process_scope("worker", {"model": ""})
    process.child("worker").gauge("running", "sequences").set(1)
    assert page(process) == {"penstock_worker_running{component=worker}": 1.0}
    process.set_label("model", "demo")
    assert page(process) == {"penstock_worker_running{component=worker,model=demo}": 1.0}
    with pytest.raises(ValueError, match="no label 'rank'"):
        process.set_label("rank", "0")


def test_constant_labels_are_on_every_series_of_a_metric() -> None:
    scope = MetricScope()
    scope.counter("read_bytes", "bytes", ["peer"], {"path": "nixl"}).labels("w1").inc(5)
    scope.histogram("seconds", "time", constant={"path": "nixl"}, buckets=(1,)).observe(0.5)
    assert page(scope) == {
        "penstock_read_bytes_total{path=nixl,peer=w1}": 5.0,
        "penstock_seconds_bucket{le=1.0,path=nixl}": 1.0,
        "penstock_seconds_bucket{le=+Inf,path=nixl}": 1.0,
        "penstock_seconds_count{path=nixl}": 1.0,
        "penstock_seconds_sum{path=nixl}": 0.5,
    }


@pytest.mark.parametrize(
    ("labels", "constant", "says"),
    [
        (["process"], None, "'process' is set automatically"),
        ([], {"namespace": "x"}, "'namespace' is set automatically"),
        (["path"], {"path": "nixl"}, "'path' is named twice"),
        (["path", "path"], None, "'path' is named twice"),
    ],
)
def test_a_label_that_exists_already_is_refused_when_the_metric_is_made(
    labels: list[str], constant: dict[str, str] | None, says: str
) -> None:
    scope = process_scope("worker", PROCESS).child("worker")
    with pytest.raises(MetricConflict, match=says):
        scope.gauge("running", "sequences", labels, constant)


def test_a_scope_cannot_set_a_label_of_the_one_above() -> None:
    with pytest.raises(MetricConflict, match="'model' is set by the scope above"):
        process_scope("worker", PROCESS).child("worker", {"model": "other"})


def test_a_name_is_used_once_in_a_scope_and_for_one_kind_in_a_process() -> None:
    process = MetricScope()
    process.child("kv", {"dp_rank": "0"}).gauge("blocks", "blocks")
    with pytest.raises(MetricConflict, match="exists already as a gauge"):
        process.child("kv", {"dp_rank": "1"}).counter("blocks", "blocks")
    process.counter("starts", "starts")
    with pytest.raises(MetricConflict, match="exists already in this scope"):
        process.counter("starts", "starts")


def test_series_of_others_get_the_automatic_labels_and_keep_their_own() -> None:
    engine = CollectorRegistry()
    Counter("vllm:tokens", "tokens", ["model", "engine"], registry=engine).labels("/models/demo", "0").inc(2)
    scope = process_scope("worker", PROCESS)

    class Engine:
        collect = staticmethod(engine.collect)

    scope.register(Engine())  # type: ignore[arg-type]
    labels = "component=worker,engine=0,exported_model=/models/demo,model=demo,namespace=ps,process=worker-0"
    assert page(scope) == {f"vllm:tokens_total{{{labels}}}": 2.0}


@given(st.text(min_size=1))
def test_names_fit_the_grammar_of_prometheus_whatever_they_are_made_of(text: str) -> None:
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric_name(text))
    if text not in ("le", "quantile"):
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label_name(text))
        assert not label_name(text).startswith("__")
    assert metric_name(metric_name(text)) == metric_name(text)


@pytest.mark.parametrize("text", ["le", "quantile", ""])
def test_a_label_name_that_prometheus_sets_itself_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose another|it is empty"):
        label_name(text)


def test_a_process_shows_its_cpu_time_and_memory() -> None:
    shown = generate_latest(process_scope("worker", PROCESS).registry).decode()
    labels = '{component="worker",model="demo",namespace="ps",process="worker-0"}'
    assert f"process_cpu_seconds_total{labels}" in shown
    assert f"process_resident_memory_bytes{labels}" in shown
