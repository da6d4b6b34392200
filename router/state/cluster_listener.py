"""Callbacks of a router for changes of the cluster."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.router.state.load import ActiveRequest


class ClusterListener(NamedTuple):
    """The callbacks, by change.

    Attributes:
        capacity_changed: a worker may have capacity again.
        attempt_returned: a worker returned an attempt: request, attempt, reason.
        worker_lost: a worker left: its id, why, its active requests. Requests of models that another router owns are
            not among them.
        request_stranded: a request was sent to a worker that had left, or will be by an earlier stage.
    """

    capacity_changed: Callable[[], None]
    attempt_returned: Callable[[str, int, str], None]
    worker_lost: Callable[[str, str, list[ActiveRequest]], None]
    request_stranded: Callable[[ActiveRequest], None]
