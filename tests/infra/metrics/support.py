"""What a metric shows."""

from prometheus_client.metrics import MetricWrapperBase


def value_of(metric: MetricWrapperBase) -> float:
    """The value of a metric with one sample."""
    (family,) = metric.collect()
    return float(family.samples[0].value)
