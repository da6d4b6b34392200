"""Memory for engines that compute on the CPU: how much is free, and how much of it a KV cache may take."""

import os

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
