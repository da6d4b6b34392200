"""The histogram of one thread equals prometheus_client's."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from infra.metrics.scope import MetricScope

BUCKETS = (0.001, 0.01, 0.1, 1, 2.5)


@given(st.lists(st.one_of(st.sampled_from(BUCKETS), st.floats(0, 10)), max_size=30))
def test_it_shows_what_a_histogram_of_the_library_shows(values: list[float]) -> None:
    registry, scope = CollectorRegistry(), MetricScope()
    library = Histogram("penstock_seconds", "time", buckets=BUCKETS, registry=registry)
    ours = scope.thread_histogram("seconds", "time", buckets=BUCKETS)
    for value in values:
        library.observe(value)
        ours.observe(value)

    def lines(source: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(source).decode().splitlines() if "_created" not in line]

    assert lines(scope.registry) == lines(registry)
