"""Processes of an engine that would not notice the death of the worker: with it, they are ended too (Linux).

vLLM's core process does not look at its parent: after a SIGKILL of the worker it would keep the device and its memory.
A shell that holds nothing but a pipe to the worker reads its end, and ends them.
"""

import os
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

GRACE_S = 5  # from SIGTERM to SIGKILL
_SCRIPT = f'read -r _; kill "$@"; sleep {GRACE_S}; kill -KILL "$@"'


class Guard:
    """
    Args:
        pids: what ends if this process is gone before ``close``.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        if not pids:
            return
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "engine-guard", *map(str, sorted(pids))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """They end by themselves from now on."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        if shell.stdin is not None:
            shell.stdin.close()


def children() -> frozenset[int]:
    """Processes that this one has started and that still run; none where the system does not say."""
    return frozenset(_children(os.getpid()))


def _children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has just ended
        if int(above) == parent and state != "Z":
            yield int(stat.parent.name)
