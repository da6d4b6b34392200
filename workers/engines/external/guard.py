"""Ends an engine's child processes when the worker dies (Linux).

vLLM's core process does not watch its parent: after a SIGKILL of the worker it would keep the device and its memory.
A shell blocks on a pipe from the worker; when the pipe closes it terminates them.
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
        pids: processes to terminate if this process dies before ``close``.
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
        """Stop guarding: the processes end on their own."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        if shell.stdin is not None:
            shell.stdin.close()


def children() -> frozenset[int]:
    """Ids of running child processes of this process; empty without ``/proc``."""
    return frozenset(_children(os.getpid()))


def _children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has just ended
        if int(above) == parent and state != "Z":
            yield int(stat.parent.name)
