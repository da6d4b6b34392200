"""Records the requests that a worker runs in a small file, which its supervisor or the restarted worker reads.

A killed process cannot report anything. So a worker writes the begin and end of each request to a file in its state
folder, which the kernel keeps when the process is gone. The reader of the file returns the unfinished requests to the
routers. Only an end that the process or its engine caused counts against those requests (``judge``).
"""

import contextlib
import faulthandler
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.process.user_folder import locked
from penstock.schemas import done, wire
from penstock.schemas.subjects import HEADER_GONE, Subjects

if TYPE_CHECKING:  # `penstock up` reads journals, and need not load what runs requests
    from penstock.workers.session.requests import RunningRequest

log = structlog.get_logger("worker")

COMPACT_BYTES = 256 << 10
_TRACE_BYTES = 64 << 10
# Signals of a program's own faults. Operators and the kernel send SIGKILL; others ask a process to stop.
_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
_VMSTAT = Path("/proc/vmstat")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Ran(msgspec.Struct, frozen=True, omit_defaults=True, tag="began"):
    """A request that the worker runs. ``alone``: no other request runs beside it."""

    request: str
    attempt: int
    model: str
    worker: str
    alone: bool = False


class End(msgspec.Struct, frozen=True, tag="end"):
    """How a process ended. ``crashed``: by its own or its engine's fault, which its requests may have caused."""

    crashed: bool
    reason: str


class _Process(msgspec.Struct, frozen=True, tag="life"):
    boot: str
    pid: int


class _Ended(msgspec.Struct, frozen=True, tag="ended"):
    request: str


class _Killed(msgspec.Struct, frozen=True, tag="killed"):
    """Number of processes that the kernel had killed for lack of memory."""

    count: int


class _Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The worker was asked to stop."""


_decode = msgspec.json.Decoder(Ran | End | _Process | _Ended | _Killed | _Stopping).decode


class LastProcess(NamedTuple):
    """The process that wrote a journal, according to it.

    Attributes:
        killed: processes of the machine that were killed for lack of memory, when it was last noted; -1: unknown.
        end: as an earlier reader judged it.
    """

    boot: str
    pid: int
    running: Mapping[str, Ran]
    killed: int = -1
    stopping: bool = False
    end: End | None = None


def read_journal(data: bytes) -> LastProcess | None:
    """Read a journal; None: it names no process. A truncated last line is skipped."""
    boot, pid, killed, stopping, end = "", 0, -1, False, None
    running: dict[str, Ran] = {}
    for line in data.splitlines():
        try:
            note = _decode(line)
        except msgspec.MsgspecError:
            continue
        match note:
            case _Process():
                boot, pid = note.boot, note.pid
            case Ran():
                running[note.request] = note
            case _Ended():
                running.pop(note.request, None)
            case _Killed():
                killed = note.count
            case _Stopping():
                stopping = True
            case End():
                end = end or note
    return LastProcess(boot, pid, running, killed, stopping, end) if pid else None


def judge(process: LastProcess, *, boot: str, killed: int, trace: str = "", status: int | None = None) -> End:
    """Judge whether a process ended by its own fault.

    Args:
        boot: id of the machine's present boot; "": unknown.
        killed: processes of the machine that the kernel has killed for lack of memory since; -1: unknown.
        trace: what the process wrote on a fatal signal.
        status: exit status, negative for a signal; None: unknown.
    """
    if process.end is not None:
        return process.end
    if process.boot != boot and status is None:
        return End(False, "its machine was restarted")
    if status is not None and status < 0 and -status in _FAULTS:
        return End(True, f"crashed: {signal.Signals(-status).name}")
    if trace and status is None:
        return End(True, f"crashed: {trace.splitlines()[0][:100]}")
    if status in (None, -signal.SIGKILL) and killed > process.killed >= 0:
        return End(True, "crashed: killed by the kernel for lack of memory")
    if process.stopping:
        return End(False, "it was stopped")
    if status is not None and status >= 0:
        return End(True, f"crashed: exit status {status}")
    return End(False, f"it was killed ({signal.Signals(-status).name})" if status else "it was killed")


class EndMessage(NamedTuple):
    """A message for DONE."""

    subject: str
    payload: bytes
    id: str
    headers: dict[str, str]


def returns(process: LastProcess, end: End, subjects: Subjects) -> list[EndMessage]:
    """Messages that return the requests of an ended process to the routers."""
    return [_returned(ran, end, subjects) for ran in process.running.values()]


def _returned(ran: Ran, end: End, subjects: Subjects) -> EndMessage:
    crashed = ("alone" if ran.alone else "shared") if end.crashed else done.KILLED
    event = done.Returned(ran.request, ran.model, ran.attempt, ran.worker, end.reason, end.crashed, crashed)
    headers = done.returned_headers(event) | {HEADER_GONE: ran.worker}
    return EndMessage(subjects.returned(ran.model), wire.encode(event), done.returned_id(event), headers)


def state_folder(settings: WorkerSettings, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the worker keeps its journal; None: nowhere."""
    folder = settings.state_dir or environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder).expanduser() if folder else None


def boot_id() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def killed_for_memory() -> int:
    """Processes that this machine's kernel has killed for lack of memory; -1: unknown."""
    with contextlib.suppress(OSError, ValueError):
        _, found, rest = _VMSTAT.read_text().partition("\noom_kill ")
        return int(rest.split(maxsplit=1)[0]) if found else -1
    return -1


def paths(folder: Path, name: str) -> tuple[Path, Path]:
    """The journal of a worker, and what the interpreter writes when a fatal signal comes."""
    return folder / f"{name or 'worker'}.journal", folder / f"{name or 'worker'}.fault"


class CrashJournal:
    """The journal of this process. A folder that cannot be written is logged, and nothing is noted.

    Args:
        folder: of this machine; None: nothing is noted.
        name: of the worker, the same after a restart.

    Attributes:
        last: the journal of the previous process, with its end judged; None: there is none.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self.last: LastProcess | None = None
        self._path = Path()
        self._boot = boot_id()
        self._fd = -1
        self._faults: TextIO | None = None
        self._to_stderr = False
        self._size = 0
        self._killed = -1
        self._running: dict[str, Ran] = {}
        if folder is not None:
            try:
                self._open(*paths(folder, name))
            except OSError as error:
                log.warning("crash_journal_unusable", folder=str(folder), error=str(error))
                self._close()

    def _open(self, path: Path, faults: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._fd = path, _locked(path)
        last = read_journal(path.read_bytes())
        trace = faults.read_text(errors="replace")[:_TRACE_BYTES] if faults.exists() else ""
        if last is not None and last.running:
            end = judge(last, boot=self._boot, killed=killed_for_memory(), trace=trace)
            if last.end is None:  # this process may end before reporting it, with other signs
                self._write(end)
            self.last = last._replace(end=end)
            log.warning("last_life_ended", reason=end.reason, requests=len(last.running), trace=trace or None)
        self._faults = faults.open("w")
        self._to_stderr = faulthandler.is_enabled()
        faulthandler.enable(self._faults)

    def begin(self) -> None:
        """The previous process was reported: from now on, the journal is about this one."""
        if self._fd >= 0:
            self.last = None
            self.compact()

    def began(self, running: "RunningRequest", worker: str) -> None:
        request = running.request
        ran = Ran(request.id, running.attempt, request.model, worker, running.alone)
        self._running[request.id] = ran
        self._write(ran)

    def ended(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._write(_Ended(request_id))
            if self._size > COMPACT_BYTES:
                self.compact()

    def stopping(self) -> None:
        """The process was asked to stop: from now on, only a fatal signal indicates a fault."""
        self._write(_Stopping())

    def failing(self, end: End) -> None:
        """The process ends for this reason. Requests that it does not return itself are returned for it."""
        self._write(end)

    def note_memory(self) -> None:
        """Call it once a second, so that processes that were killed before are not taken for this one."""
        if self._fd >= 0 and (killed := killed_for_memory()) != self._killed:
            self._killed = killed
            self._write(_Killed(killed))

    def close(self) -> None:
        """The process ends in order: nothing is left to report, except an unreported previous process."""
        if self._fd >= 0 and self.last is None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._close()

    def compact(self) -> None:
        """Begin a new file. It replaces the old one whole: the engine may crash in its own thread meanwhile."""
        fresh, old = self._path.with_suffix(".new"), self._fd
        try:
            fresh.unlink(missing_ok=True)
            self._fd = _locked(fresh)
            self._size = 0
            for note in (_Process(self._boot, os.getpid()), _Killed(self._killed), *self._running.values()):
                self._write(note)
            fresh.replace(self._path)
        except OSError as error:
            log.warning("crash_journal_unusable", error=str(error))
            self._close()
        os.close(old)

    def _write(self, note: msgspec.Struct) -> None:
        if self._fd < 0:
            return
        line = msgspec.json.encode(note) + b"\n"
        try:
            self._size += os.write(self._fd, line)  # into the kernel's cache, which outlives the process
        except OSError as error:  # a full disk, for example
            log.warning("crash_journal_unusable", error=str(error))
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._faults is not None:
            faulthandler.disable()
            if self._to_stderr:
                faulthandler.enable()
            self._faults.close()
            self._faults = None


def _locked(path: Path) -> int:
    if (fd := locked(path, os.O_APPEND)) < 0:
        raise OSError(f"another worker of this name uses {path}: give each a --name of its own")
    return fd
