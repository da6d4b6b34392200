"""What one process may take of its machine: threads to compute with, memory, and the part of it for a KV cache on the
CPU.

Threads: the machine's cores, less what is limited or busy at start.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path, PurePosixPath

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


def cgroup_folders(
    controller: str, own: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """The folders of this process's control group and of all above it: a limit of each of them holds.

    Those of a systemd unit are deep below the mounted folder. In a container, the path may be the host's, and what is
    mounted the container's own, so folders may not exist.

    Args:
        controller: of version 1, such as ``cpu``; version 2 has one hierarchy for all.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or (number == "0" and not controllers):
            root, below = top / controller if controllers else top, PurePosixPath(path.lstrip("/"))
            below = PurePosixPath() if ".." in below.parts else below
            yield from (root / each for each in (below, *below.parents))


def cgroup_cores() -> float:
    """The lowest CPU limit in cores; infinite without one."""
    return cgroup_cpu()[0]


def cgroup_cpu(folders: Iterable[Path] | None = None) -> tuple[float, float | None]:
    """The lowest CPU limit in cores, and the CPU seconds that were used in its control group; None: not known."""
    lowest, used = math.inf, None
    for folder in cgroup_folders("cpu") if folders is None else folders:
        try:
            if (file := folder / "cpu.max").exists():
                quota, period = file.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            cores = math.inf if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
        if cores < lowest:
            lowest, used = cores, _cpu_seconds(folder)
    return lowest, used


def _cpu_seconds(folder: Path) -> float | None:
    with contextlib.suppress(OSError, KeyError, ValueError):
        return int(_numbers(folder / "cpu.stat")["usage_usec"]) / 1e6
    accounted = Path(*("cpuacct" if part == "cpu" else part for part in folder.parts))
    with contextlib.suppress(OSError, ValueError):
        return int((accounted / "cpuacct.usage").read_text()) / 1e9
    return None


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}


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


def cgroup_bytes() -> int:
    """The lowest memory limit of the control groups; without one, more than any machine has."""
    return min((most for most, _ in _memory_limits(cgroup_folders("memory"))), default=1 << 62)


def _cgroup_free_bytes(folders: Iterable[Path] | None = None) -> int:
    """What the limits of all control groups leave; without a limit, more than any machine has."""
    limits = _memory_limits(cgroup_folders("memory") if folders is None else folders)
    return min((max(0, most - used) for most, used in limits), default=1 << 62)


def _memory_limits(folders: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Limit and use of each group that has a limit, in bytes.

    Pages of files, such as those of the weights that were just read, are not used: the kernel drops them for others.
    """
    for folder in folders:
        two = (folder / "memory.max").exists()
        limit, used, prefix = ("max", "current", "") if two else ("limit_in_bytes", "usage_in_bytes", "total_")
        with contextlib.suppress(OSError, ValueError):  # ValueError: no limit
            most = int((folder / f"memory.{limit}").read_text())
            taken = int((folder / f"memory.{used}").read_text())
            about = _numbers(folder / "memory.stat")
            files = sum(about.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield most, max(0, taken - files)
