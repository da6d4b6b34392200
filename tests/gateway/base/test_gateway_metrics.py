"""What is counted of each model, where there are several."""

from prometheus_client import generate_latest

from penstock.gateway.base.gateway_metrics import MAX_MODELS, GatewayMetrics
from penstock.infra.metrics.scope import MetricScope


def test_what_names_no_model_is_the_only_one_s_and_apart_where_there_are_several() -> None:
    metrics = GatewayMetrics(MetricScope())
    one = metrics.of("one")
    assert metrics.of("") is one
    two = metrics.of("two")
    unknown = metrics.of("")
    assert unknown not in (one, two)
    for each in (one, two, unknown):
        each.requests.labels("http", "ok").inc()
        each.queued.set(1)
    page = generate_latest(metrics.registry).decode()
    assert page.count("penstock_requests_total{") == 3
    assert page.count("penstock_queued_requests{") == 2, "nothing waits for a model that is not known"


def test_a_model_that_is_served_no_more_has_no_series() -> None:
    metrics = GatewayMetrics(MetricScope())
    metrics.of("one").open.set(1)
    metrics.of("two").open.set(1)
    metrics.forget("one")
    metrics.forget("never")
    page = generate_latest(metrics.registry).decode()
    assert 'model="one"' not in page
    assert 'model="two"' in page
    metrics.of("one").open.set(2)
    assert 'model="one"' in generate_latest(metrics.registry).decode()


def test_models_beyond_the_limit_are_counted_without_their_names() -> None:
    metrics = GatewayMetrics(MetricScope())
    for number in range(MAX_MODELS):
        metrics.of(f"m{number}")
    assert metrics.of("further") is metrics.of("")
    assert len(metrics.models) == MAX_MODELS
