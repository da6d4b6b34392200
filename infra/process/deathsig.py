"""Children that must not outlive their supervisor, even when it is killed with SIGKILL (Linux)."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """What a child runs between fork and exec (``preexec_fn``); None where the system does not support this.

    The kernel sends the signal when the *thread* that forked ends: fork from the main thread only.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: the child may not take locks that another thread held.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def apply() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return apply
