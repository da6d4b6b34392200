"""One child process of ours: its command, its environment and where its output goes."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.configs.logs import OutputStream
from penstock.infra.process.scheduling import ordinary
from penstock.schemas.control import HURRY, LEAVE

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


LOG_BYTES = 32 << 20  # then a log becomes ``.log.1``, and that one is gone
_LINE_BYTES = 1 << 20


def bound_log(path: Path) -> bool:
    """Move the content of a log that has reached ``LOG_BYTES`` to ``.log.1``; whether it had.

    Its process continues to append to the same file, so what it writes during the copy is lost; if the disk is full, so
    is the rest.
    """
    before = path.with_suffix(".log.1")
    try:
        if path.stat().st_size <= LOG_BYTES:
            return False
        try:
            shutil.copyfile(path, before)
        except OSError:
            before.unlink(missing_ok=True)
        os.truncate(path, 0)
    except OSError:  # it does not exist, or is not ours
        return False
    return True


class Process:
    """A command that can be started, waited for and started again; see ``supervisor.Child``.

    Its output is appended to ``log_path``; with ``echo`` it also goes to our stdout, line by line. It inherits the
    descriptors ``pass_fds``, under the same numbers, and our scheduling policy unless it is ``interactive``. Of
    ``command`` and ``environ``, those that are functions are asked at each start, in this order.
    """

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str] | Callable[[], Sequence[str]],
        environ: Mapping[str, str] | Callable[[], Mapping[str, str]],
        log_path: Path,
        *,
        echo: bool = False,
        pass_fds: Sequence[int] = (),
        interactive: bool = False,
    ) -> None:
        self.name = name
        self.role = role
        self.log_path = log_path
        self._command = command if callable(command) else lambda: command
        self._environ = environ if callable(environ) else lambda: environ
        self._echo = echo
        self._pass_fds = tuple(pass_fds)
        self._interactive = interactive
        self._process: asyncio.subprocess.Process | None = None
        self._copying: asyncio.Task[None] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        assert not self.pid, f"{self.name} is already running"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        bound_log(self.log_path)
        with contextlib.suppress(FileNotFoundError):
            self._log_start = self.log_path.stat().st_size
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if self._echo else log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self._environ()),
                limit=_LINE_BYTES,
                pass_fds=self._pass_fds,
                # Its own session: Ctrl-C on the terminal is for the supervisor, which stops children in order.
                start_new_session=True,
                preexec_fn=ordinary(die_with_parent()) if self._interactive else die_with_parent(),
            )
        if self._process.stdout is not None:
            self._copying = asyncio.create_task(self._copy(self._process.stdout), name=f"log-{self.name}")

    async def wait(self) -> int:
        assert self._process is not None
        status = await self._process.wait()
        if self._copying is not None:
            # A grandchild may hold the pipe open; do not wait for its output.
            await asyncio.wait([self._copying], timeout=1.0)
            self._copying.cancel()
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def hurry(self) -> None:
        if self.role == "worker":
            self._signal(HURRY)

    def leave(self) -> None:
        """A gateway: accept nothing more, and end when the last connection has closed."""
        self._signal(LEAVE)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def last_lines(self, count: int = 8) -> list[str]:
        """The end of what the last run wrote."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                since = self._log_start if self._log_start <= size else 0  # ``bound_log`` has emptied it meanwhile
                log.seek(max(since, size - 65536))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []

    def _signal(self, signum: signal.Signals) -> None:
        if self.pid and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _copy(self, pipe: asyncio.StreamReader) -> None:
        out = OutputStream(sys.stdout)
        with self.log_path.open("ab", buffering=0) as log:
            while chunk := await _lines(pipe):  # whatever becomes of it: the child would wait for its reader
                with contextlib.suppress(OSError):  # a full disk
                    log.write(chunk)
                out.write_bytes(chunk)


async def _lines(pipe: asyncio.StreamReader) -> bytes:
    """The next line, or as much of an overlong one as there is; empty at the end."""
    try:
        return await pipe.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await pipe.readexactly(error.consumed)
