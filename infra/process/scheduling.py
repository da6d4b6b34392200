"""How Linux schedules the processes of a deployment.

The broker, routers, gateways and workers of one machine wake each other for every message. As ordinary processes they
also interrupt each other: a gateway that has read one of twenty messages loses its core to the broker, which passes on
one more. Batch processes (``SCHED_BATCH``) with long time slices finish what they have read first, so each wake-up does
more. Nothing changes where a core is idle. What it costs: other busy programs are not interrupted either, and keep a
core for a few ms.
"""

import contextlib
import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

TIMER_SLACK_NS = 5_000_000
FEW_CORES = 4
_PR_SET_TIMERSLACK = 29
SLICE_NS = 10_000_000  # saves 6 % of the CPU time at 64 connections on two cores; 50 ms saves no more
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # system calls; older C libraries have no function for it


class _Attributes(ctypes.Structure):
    """``struct sched_attr`` of Linux. From 6.12 on, ``runtime`` is the time slice; before, it has no effect."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def batch() -> None:
    """Make this thread a batch thread, and with it the processes that it starts."""
    if apply := _setting("SCHED_BATCH", SLICE_NS):
        apply()


def ordinary(then: Callable[[], None] | None) -> Callable[[], None]:
    """What a child of a batch process runs between fork and exec (``preexec_fn``), to be an ordinary one."""
    apply = _setting("SCHED_OTHER", 0)

    def both() -> None:
        if apply is not None:
            apply()
        if then is not None:
            then()

    return both


def lax_timers(then: Callable[[], None] | None) -> Callable[[], None] | None:
    """What the broker runs between fork and exec (``preexec_fn``), so that its timers may be ``TIMER_SLACK_NS`` late.

    A thread of Go's runtime looks after the others every 20 µs while one of them runs. A broker that sleeps and wakes a
    few times per request spends a quarter of its CPU time on that. Not on many cores: threads that sleep for 3 µs as
    they look for work keep others from being woken. Nor where the disk is waited for, since that thread also finds
    replacements for those that wait.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) > FEW_CORES:
        return then
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: a forked child may not take locks

    def both() -> None:
        prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
        if then is not None:
            then()

    return both


def _setting(name: str, slice_ns: int) -> Callable[[], None] | None:
    """What gives the calling thread a policy and a time slice (0: the usual one); None: not on this system."""
    if sys.platform != "linux":
        return None
    policy, number = getattr(os, name), _SCHED_SETATTR.get(platform.machine())
    call = ctypes.CDLL(None, use_errno=True).syscall  # looked up here: a forked child may not take locks
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes), policy=policy, nice=os.getpriority(os.PRIO_PROCESS, 0), runtime=slice_ns
    )
    parameters = os.sched_param(0)

    def apply() -> None:
        if number is None or call(number, 0, ctypes.byref(attributes), 0):
            with contextlib.suppress(OSError):  # a sandbox may forbid both
                os.sched_setscheduler(0, policy, parameters)

    return apply


WAITS_S = 10.0  # a span over which waits are averaged; a few waits of a slice each are no shortage


class CoreWaits:
    """For how long the threads of this process could have run and had no core.

    Only Linux counts waits (``schedstat``); elsewhere there are none. At a container's CPU limit its threads wait, too.

    Attributes:
        percent: of the last span of ``WAITS_S``, that of the thread that waited longest.
    """

    def __init__(self, threads: Path = Path("/proc/self/task")) -> None:
        self._threads = threads
        self._waited: dict[str, int] = {}  # ns since each thread began
        self._since = -math.inf
        self.percent = 0

    def look(self, now: float) -> None:
        """Read what was waited if the span is over: 5 µs a thread.

        Args:
            now: monotonic, seconds.
        """
        seconds = now - self._since
        if seconds < WAITS_S:
            return
        waited = dict(self._read())
        longest = max((ns - self._waited[thread] for thread, ns in waited.items() if thread in self._waited), default=0)
        self.percent = min(100, max(0, round(longest / 1e7 / seconds)))
        self._waited, self._since = waited, now

    def _read(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError):
            for thread in os.listdir(self._threads):
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or the kernel counts nothing
                    yield thread, int((self._threads / thread / "schedstat").read_text(encoding="ascii").split()[1])
