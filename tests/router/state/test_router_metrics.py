"""The series of a router that name a worker."""

from penstock.infra.metrics.scope import MetricScope
from penstock.router.state.router_metrics import Metrics
from tests.schemas.test_pace import worker


def test_workers_with_peers_show_their_slowness_and_those_that_left_no_longer_do() -> None:
    metrics = Metrics(scope := MetricScope())

    def shown(name: str) -> float | None:
        return scope.registry.get_sample_value("penstock_worker_slowness", {"worker": name})

    metrics.paces([worker("a", 10_000), worker("b", 200_000), worker("idle", 0)])
    assert (shown("a"), shown("b"), shown("idle")) == (0.05, 20.0, None)
    metrics.paces([worker("b", 200_000)])
    assert (shown("a"), shown("b")) == (None, None)
