"""Metrics of a user's own code in a worker."""

import secrets

import pytest
from prometheus_client import generate_latest

from penstock.infra.metrics.scope import MetricConflict, process_scope
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.metrics import user


def test_a_users_metric_is_on_the_workers_page_with_the_labels_of_its_process() -> None:
    scope = process_scope("worker", {"process": "worker-3"})
    scope.register(NativeSeries(user.PREFIX))
    name = f"banned-{secrets.token_hex(4)}"
    user.counter(name, "tokens", ["list"]).labels("words").inc(2)
    user.counter(name, "tokens", ["list"]).labels("words").inc()
    shown = generate_latest(scope.registry).decode()
    labels = 'component="worker",list="words",process="worker-3"'
    assert f"user_{name.replace('-', '_')}_total{{{labels}}} 3.0" in shown


def test_a_users_metric_cannot_change_its_kind_or_labels() -> None:
    name = f"seen_{secrets.token_hex(4)}"
    user.gauge(name, "seen")
    with pytest.raises(MetricConflict, match="exists already as a gauge with the labels none"):
        user.counter(name, "seen")
    with pytest.raises(MetricConflict, match="exists already"):
        user.gauge(name, "seen", ["list"])
    with pytest.raises(MetricConflict, match="'model' is set automatically"):
        user.histogram(f"{name}_other", "seen", ["model"])
