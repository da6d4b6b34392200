"""How Linux schedules the processes of a deployment.

The broker, routers, gateways and workers of one machine wake each other for every message. As ordinary processes they
also interrupt each other: a gateway that has read one of twenty messages loses its core to the broker, which passes on
one more. Batch processes (``SCHED_BATCH``) finish what they have read first, so each wake-up does more. Nothing changes
where a core is idle. What it costs: other busy programs are not interrupted either, and keep a core for a few ms.
"""

import contextlib
import os
from collections.abc import Callable


def batch() -> None:
    """Make this thread a batch thread, and with it the processes that it starts."""
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def ordinary(then: Callable[[], None] | None) -> Callable[[], None]:
    """What a child of a batch process runs between fork and exec (``preexec_fn``), to be an ordinary one."""
    parameters = os.sched_param(0) if hasattr(os, "sched_param") else None

    def apply() -> None:
        if parameters is not None:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, parameters)
        if then is not None:
            then()

    return apply
