"""The metrics of one thread equal prometheus_client's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.infra.metrics.scope import MetricScope

BUCKETS = (0.001, 0.01, 0.1, 1, 2.5)


@given(st.lists(st.one_of(st.sampled_from(BUCKETS), st.floats(0, 10)), max_size=30))
def test_a_histogram_shows_what_one_of_the_library_shows(values: list[float]) -> None:
    registry, scope = CollectorRegistry(), MetricScope()
    library = Histogram("penstock_seconds", "time", buckets=BUCKETS, registry=registry)
    ours = scope.thread_histogram("seconds", "time", buckets=BUCKETS)
    for value in values:
        library.observe(value)
        ours.observe(value)

    assert lines(scope.registry) == lines(registry)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=20), st.booleans())
def test_a_counter_shows_what_one_of_the_library_shows(counts: list[tuple[str, int]], labelled: bool) -> None:
    registry, scope, names = CollectorRegistry(), MetricScope(), ["code"] if labelled else []
    library = Counter("penstock_things", "things", names, registry=registry)
    ours = scope.thread_counter("things", "things", names)
    for code, amount in counts:
        for each in (library, ours):
            (each.labels(code) if labelled else each).inc(amount)
    assert lines(scope.registry) == lines(registry)


def test_a_count_without_its_labels_is_refused() -> None:
    counter = MetricScope().thread_counter("things", "things", ["code"])
    with pytest.raises(ValueError, match="has the labels"):
        counter.labels()


def lines(source: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(source).decode().splitlines() if "_created" not in line]
