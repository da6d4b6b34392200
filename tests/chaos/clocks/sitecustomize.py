"""Shifts the wall clock of a Python process by ``CHAOS_CLOCK_S`` seconds; its folder is put first into PYTHONPATH.

Python imports it by its name before anything else, in every build and in the processes that ours start. Monotonic
clocks, the kernel's timestamps and other programs (the broker) stay as they are.
"""

import os
import time

SHIFT_S = float(os.environ.get("CHAOS_CLOCK_S") or 0)


def shift(shift_s: float) -> None:
    """Replace the functions of ``time``; what is computed from them (``datetime.now`` is not) is shifted as well."""
    shift_ns = int(shift_s * 1e9)
    true_ns, true_gmtime, true_localtime = time.time_ns, time.gmtime, time.localtime

    def time_ns() -> int:
        return true_ns() + shift_ns

    def now() -> float:
        return time_ns() / 1e9

    def gmtime(seconds: float | None = None, /) -> time.struct_time:
        return true_gmtime(now() if seconds is None else seconds)

    def localtime(seconds: float | None = None, /) -> time.struct_time:
        return true_localtime(now() if seconds is None else seconds)

    time.time_ns, time.time, time.gmtime, time.localtime = time_ns, now, gmtime, localtime


if SHIFT_S:
    shift(SHIFT_S)
