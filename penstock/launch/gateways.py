"""How many gateways ``penstock up`` runs: what it starts with, and when one more or one fewer helps.

A gateway is one event loop, so a core is what it can use. One more helps when all are busy while cores are idle; one
fewer is enough when the others would still be half idle. Nothing happens in between, so a load never has gateways come
and go.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.infra.process.budgets import cgroup_cpu
from penstock.launch.groups import PlanError

AUTO = "auto"
CORES_PER_GATEWAY = 2  # beside routers, workers and brokers, which take as much together
GATEWAYS_PER_WORKER = 2

LOOK_S = 1.0
BUSY = 0.85  # of a core, on average over the gateways
BUSY_S = 4.0
IDLE_CORES = 0.5  # what one more needs, as it takes work from others that are full; with less it only adds switches
SPARE = 0.5  # of a core: what the others would use if there was one fewer
SPARE_S = 60.0


class GatewayRange(NamedTuple):
    """How many gateways there are at the start, at least and at most."""

    first: int
    fewest: int
    most: int

    @property
    def is_fixed(self) -> bool:
        return self.fewest == self.most


def gateway_range(asked: str, cores: int, workers: int) -> GatewayRange:
    """
    Args:
        asked: ``--gateways``: "auto", a number, or the fewest and the most, such as "2-6".
        cores: that this machine has for the deployment.
        workers: of the deployment.
    Raises:
        PlanError: more are asked for at least than at most.
    """
    chosen = max(1, min(cores // CORES_PER_GATEWAY, GATEWAYS_PER_WORKER * max(1, workers)))
    if asked in (AUTO, "0"):
        return GatewayRange(chosen, chosen, max(chosen, cores))
    low, _, high = asked.partition("-")
    fewest, most = int(low), int(high or low)
    if fewest > most:
        raise PlanError(f"--gateways {asked}: the fewest come first, such as {most}-{fewest}")
    return GatewayRange(min(max(chosen, fewest), most), fewest, most)


class GatewayStep(NamedTuple):
    """A number of gateways that is to be, and why."""

    gateways: int
    why: str


class GatewayScaler:
    """Decides from looks at the gateways' CPU time, about one a second. It has no clock and no processes of its own."""

    def __init__(self, limits: GatewayRange) -> None:
        self._limits = limits
        self._step = 0  # +1, -1: what all looks since have asked for
        self._since = 0.0
        self._gateways = 0

    def forget(self) -> None:
        """A gateway is being started or is not there: what was seen before says nothing about the time after."""
        self._step = 0

    def look(self, now: float, shares: Sequence[float], idle_cores: float) -> GatewayStep | None:
        """
        Args:
            now: monotonic, seconds.
            shares: of a core that each gateway has used since the last look.
            idle_cores: that nothing has used meanwhile, and that this deployment may use.
        """
        number = len(shares)
        step = self._asked(shares, idle_cores)
        if step != self._step or number != self._gateways:
            self._step, self._since, self._gateways = step, now, number
        seconds = now - self._since
        if not step or seconds < (BUSY_S if step > 0 else SPARE_S):
            return None
        self.forget()
        used = sum(shares)
        if step > 0:
            why = f"{used / number:.0%} of a core busy for {seconds:.0f} s, with {idle_cores:.1f} cores idle"
        else:
            why = f"together {used:.1f} cores busy, which {number - 1} had room for during {seconds:.0f} s"
        return GatewayStep(number + step, why)

    def _asked(self, shares: Sequence[float], idle_cores: float) -> int:
        number = len(shares)
        busy = sum(min(1.0, share) for share in shares)
        if number < self._limits.most and idle_cores >= IDLE_CORES and busy >= BUSY * number:
            return 1
        if number > self._limits.fewest and sum(shares) <= SPARE * (number - 1):
            return -1
        return 0


class CpuUse(NamedTuple):
    """``shares``: of a core, by process; ``idle_cores``: of those that this process may use."""

    shares: Mapping[str, float]
    idle_cores: float


class CpuMeter:
    """What processes and the machine have used between two looks. Known on Linux only; elsewhere no core is idle.

    Args:
        proc: where Linux tells.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._at = 0.0
        self._used: dict[tuple[str, int], float] = {}  # s of CPU time, by name and process id
        self._idle: float | None = None
        self._limited: float | None = None

    def look(self, now: float, pids: Mapping[str, int | None]) -> CpuUse | None:
        """
        Args:
            now: monotonic, seconds.
            pids: process ids by name.
        Returns:
            None: a process was not there at the last look, or is not there now.
        """
        seconds, before = now - self._at, self._used
        found = {(name, pid): self._of_process(pid) for name, pid in pids.items() if pid is not None}
        used = {process: value for process, value in found.items() if value is not None}
        idle, (limit, limited) = self._idle_time(), cgroup_cpu()
        idle_before, limited_before = self._idle, self._limited
        self._at, self._used, self._idle, self._limited = now, used, idle, limited
        if len(used) < len(pids) or not used.keys() <= before.keys() or seconds <= 0:
            return None
        idle_cores = 0.0
        if idle is not None and idle_before is not None:
            idle_cores = max(0.0, (idle - idle_before) / seconds)
        if limit < math.inf:
            known = limited is not None and limited_before is not None
            spent = (limited - limited_before) / seconds if known else limit  # type: ignore[operator]
            idle_cores = max(0.0, min(idle_cores, limit - spent))
        shares = {name: (value - before[name, pid]) / seconds for (name, pid), value in used.items()}
        return CpuUse(shares, idle_cores)

    def _of_process(self, pid: int) -> float | None:
        try:
            fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, IndexError, ValueError):
            return None

    def _idle_time(self) -> float | None:
        """Seconds, of the cores that this process may use; waiting for a disk is idle."""
        try:
            allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            lines = [line.split() for line in (self._proc / "stat").read_text().splitlines()]
            return sum(int(line[4]) + int(line[5]) for line in lines if line and line[0] in allowed) / _TICKS
        except (OSError, AttributeError, IndexError, ValueError):
            return None


_TICKS = os.sysconf("SC_CLK_TCK")
