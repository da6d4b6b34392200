"""A router without numpy decides among any number of targets, and says what is slower."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.configs.settings import RouterSettings
from penstock.infra.metrics.scope import MetricScope
from penstock.router.placement.decision_inputs import USES, Decider
from penstock.router.placement.pending import PendingRequest
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.router_metrics import Metrics
from penstock.schemas.fleet import Registration
from tests.workers.support import MODEL, request


@pytest.fixture
def decider(monkeypatch: pytest.MonkeyPatch) -> tuple[Decider, LoadTracker]:
    monkeypatch.setitem(sys.modules, "numpy", None)
    tracker = LoadTracker()
    cluster: Any = SimpleNamespace(tracker=tracker, caches=SimpleNamespace(depths=lambda keys: {}), suspects=frozenset)
    return Decider(cluster, RouterSettings(seed=1), Metrics(MetricScope())), tracker


def test_more_than_12_targets_without_numpy_are_decided_and_reported_once(decider: tuple[Decider, LoadTracker]) -> None:
    decides, tracker = decider
    pending = PendingRequest(request(), b"", "", 0)
    tracker.put_worker(Registration("w", MODEL, "aggregated", "mock", 1, 16, 100, 4, 4096, dp_size=12))
    with capture_logs() as lines:
        assert decides.decide(pending, (), 0)[0].route
    assert lines == []
    tracker.put_worker(Registration("x", MODEL, "aggregated", "mock", 1, 16, 100, 4, 4096))
    with capture_logs() as lines:
        chosen = {decides.decide(pending, (), 0)[0].chosen for _ in range(200)}
    assert len(chosen) == 13
    (line,) = lines
    assert (line["log_level"], line["targets"]) == ("warning", 13)
    assert line["fix"] == "pip install 'penstock[router]'"


def test_a_prefix_counts_as_shared_after_as_many_prompts_as_its_targets_need(
    decider: tuple[Decider, LoadTracker],
) -> None:
    decides, tracker = decider
    pending = PendingRequest(request(), b"", "", 0)

    def needed(targets: int) -> int:
        """Prompts behind a prefix of 4 blocks until it counts as shared."""
        tracker.put_worker(Registration("w", MODEL, "aggregated", "mock", 1, 16, 100, 4, 4096, dp_size=targets))
        first = 1000 * targets
        for number in range(100):
            keys = [*range(first, first + 4), first + 100 + number]
            if decides.decide(pending, keys, 0)[1].shared_blocks:
                return number
        raise AssertionError("never shared")

    one, two, four = needed(1), needed(2), needed(4)
    assert (two - one, four - two) == (USES, 2 * USES)
