"""Metrics of KV blocks, and totals that an engine keeps."""

from prometheus_client import Counter, Gauge

from penstock.infra.metrics.scope import process_scope
from penstock.workers.engines.engine_protocol import EngineInfo, EngineStats, GrammarStats
from penstock.workers.metrics.worker_metrics import LABELS, WorkerMetrics


def metrics() -> WorkerMetrics:
    return WorkerMetrics(process_scope("worker", dict.fromkeys(LABELS[2:], "")))


def stats(**more: int) -> EngineStats:
    return EngineStats(**{"running": 1, "waiting": 0, "used_blocks": 25, "cached_blocks": 50, "free_blocks": 25} | more)


def test_kv_blocks_have_a_registry_of_their_own_with_counters_and_gauges() -> None:
    worker = metrics()
    kinds = {metric.describe()[0].name: type(metric) for metric in worker.kv.scope.metrics()}
    assert set(kinds.values()) == {Counter, Gauge}
    assert all(name.startswith("penstock_worker_kv_") for name in kinds)
    assert not set(kinds) & {metric.describe()[0].name for metric in worker.handoff.scope.metrics()}


def test_the_share_of_kv_blocks_in_use_is_shown() -> None:
    worker = metrics()
    worker.engine_built("demo", EngineInfo("mock", 64, 100, 8, 4096, 1000, (0,), True))
    worker.observe(stats(), 0)
    labels = {"component": "worker", "model": "demo"}
    assert worker.registry.get_sample_value("penstock_worker_kv_usage_ratio", labels) == 0.25
    assert worker.registry.get_sample_value("penstock_worker_kv_capacity_blocks", labels) == 100


def test_a_total_that_starts_over_is_counted_on() -> None:
    worker = metrics()
    for total in (10, 25, 25, 5):
        worker.observe(stats(hit_tokens=total), 0)
    labels = {"component": "worker"}
    assert worker.registry.get_sample_value("penstock_worker_prefix_hit_tokens_total", labels) == 30


def test_compiled_and_cached_constraints_are_counted() -> None:
    worker = metrics()
    worker.observe(stats(), 0)
    worker.observe(stats(), 0, GrammarStats(5, 2, 0.25))
    for source, count in (("cached", 5), ("compiled", 2)):
        labels = {"component": "worker", "source": source}
        assert worker.registry.get_sample_value("penstock_worker_grammars_total", labels) == count
    name = "penstock_worker_grammar_compile_seconds_total"
    assert worker.registry.get_sample_value(name, {"component": "worker"}) == 0.25
