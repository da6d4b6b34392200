"""How many CPU threads an engine should compute with: the machine's cores, less what is limited or busy at start.

Memory for engines that compute on the CPU: how much is free, and how much of it a KV cache may take.
"""

import math
import os
from collections.abc import MutableMapping

# OpenMP threads spin at a barrier by default. When another process holds one of the cores, each of the barriers in a
# step then lasts until the scheduler's next time slice, and decoding is slower than with a single thread by a factor
# of 10 to 20. Passive waiting costs a wake-up of some microseconds instead. Read when torch is imported.
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def wait_passively(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep while they wait; call before torch is imported. Variables that are set win."""
    for name, value in PASSIVE_WAIT.items():
        environ.setdefault(name, value)


def thread_count(cores: int, *, allowed: int, quota: float, load: float) -> int:
    """Threads for work that would fill the machine, at least 1.

    Args:
        cores: of the machine.
        allowed: cores in this process's affinity mask.
        quota: cores' worth of CPU time that the container may use; infinite without a limit.
        load: processes that run or wait for a core, on the whole machine.
    """
    idle = cores - load
    return max(1, round(min(allowed, quota, idle)))


def available_cores() -> int:
    """Cores that this process may use, whoever else does: by its affinity, and by the container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min(allowed, cgroup_cores())))


def usable_cores() -> int:
    """``thread_count`` of this machine now."""
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return thread_count(cores, allowed=allowed, quota=cgroup_cores(), load=load)


def cgroup_cores() -> float:
    """The container's CPU limit in cores (cgroup v2, then v1); infinite without one."""
    for read in (_limit_v2, _limit_v1):
        try:
            return read()
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return math.inf


def _limit_v2(path: str = "/sys/fs/cgroup/cpu.max") -> float:
    with open(path, encoding="ascii") as file:
        quota, period = file.read().split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _limit_v1(folder: str = "/sys/fs/cgroup/cpu") -> float:
    with open(f"{folder}/cpu.cfs_quota_us", encoding="ascii") as quota_file:
        quota = int(quota_file.read())
    with open(f"{folder}/cpu.cfs_period_us", encoding="ascii") as period_file:
        return math.inf if quota < 0 else quota / int(period_file.read())


GIB = 1 << 30
CPU_SHARE = 0.25  # of free memory: other programs run on a laptop
CPU_LIMIT_BYTES = 4 * GIB
_NODES = "/sys/devices/system/node"


def share(free: int) -> int:
    """Default size of a KV cache, in bytes."""
    return min(int(free * CPU_SHARE), CPU_LIMIT_BYTES)


def free_bytes() -> int:
    """Memory that is available now, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return min(int(line.split()[1]) * 1024, _cgroup_free_bytes())
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def numa_nodes() -> int:
    """Number of NUMA nodes."""
    try:
        return max(1, sum(name.startswith("node") and name[4:].isdigit() for name in os.listdir(_NODES)))
    except OSError:
        return 1


def _cgroup_free_bytes() -> int:
    """What the container's limit leaves; without a limit, more than any machine has."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            total = limit.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:
            return max(0, int(total) - int(used.read())) if total != "max" else 1 << 62
    except (OSError, ValueError):
        return 1 << 62
