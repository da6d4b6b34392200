"""Metrics of code that users add to a worker, such as a logits processor or an engine's adapter.

    from penstock.workers.metrics import user

    _banned = user.counter("banned_tokens", "tokens that were made impossible", ["list"])

They appear on the worker's page as ``user_banned_tokens_total``, with the labels of its process. A module may ask for
the same metric again and gets the same one. In the ranks of a tensor-parallel engine, which are processes of their own,
they are counted if ``PROMETHEUS_MULTIPROC_DIR`` is set.
"""

import threading
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from penstock.infra.metrics.scope import MetricConflict, label_name, metric_name

PREFIX = "user_"
AUTOMATIC = ("namespace", "component", "process", "model", "role")

_Made = TypeVar("_Made", bound=MetricWrapperBase)
_made: dict[str, tuple[MetricWrapperBase, tuple[str, ...]]] = {}
_lock = threading.Lock()


def counter(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
    """A count that only grows.

    Args:
        name: without prefix; characters that Prometheus does not admit become underscores.
        about: one line for the metrics page.
        labels: names, whose values are given with each count.
    Raises:
        MetricConflict: the name is used for another kind or with other labels, or a label is set automatically.
    """
    return _find(Counter, name, about, labels)


def gauge(name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
    """A value that goes up and down. For arguments and errors see ``counter``."""
    return _find(Gauge, name, about, labels)


def histogram(
    name: str, about: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS
) -> Histogram:
    """A distribution. ``buckets``: upper bounds, ascending. For other arguments and errors see ``counter``."""
    return _find(Histogram, name, about, labels, buckets=buckets)


def _find(kind: type[_Made], name: str, about: str, labels: Sequence[str], **more: object) -> _Made:
    full, names = PREFIX + metric_name(name), tuple(map(label_name, labels))
    if both := set(names) & set(AUTOMATIC):
        raise MetricConflict(f"{full}: the label {min(both)!r} is set automatically; choose another name")
    with _lock:
        metric, before = _made.get(full, (None, ()))
        if metric is None:
            metric = kind(full, about, names, **more)  # type: ignore[arg-type]
            _made[full] = (metric, names)
        elif not isinstance(metric, kind) or before != names:
            was = f"{type(metric).__name__.lower()} with the labels {', '.join(before) or 'none'}"
            raise MetricConflict(f"{full} exists already as a {was}; choose another name")
    return metric
