"""Where a command reads the log: from the running broker, a stopped deployment's data folder, or an export."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from penstock.cli.terminal import fail
from penstock.configs.flags import add_broker_flags
from penstock.infra.bus.direct_get import LogFiles, Readable
from penstock.infra.nats_server.binary import NoServerBinary, ServerFailed
from penstock.infra.nats_server.datadir import DataDirBusy, DataDirUnusable, Lock, holder
from penstock.launch.state import DeploymentState, read_state
from penstock.log_tools.sources.data_folder import (
    STREAMS_DIR,
    CopyFailed,
    StoredLog,
    copy_streams,
    namespaces,
    stream_name,
)
from penstock.log_tools.sources.store_files import (
    UnreadableFiles,
    can_verify_much,
    check_server,
    known_form,
    written_by,
)
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import cell_in
from penstock.schemas.subjects import Subjects, cell_namespace

if TYPE_CHECKING:
    from penstock.infra.bus.connection import Bus

CONNECT_S = 3.0  # short, because a person waits at a terminal

REQUEST_STREAMS = ("REQUESTS", "WORK", "DONE", "HANDOFF")

FAILURES = (
    ServingError,
    CopyFailed,
    NoServerBinary,
    ServerFailed,
    ValueError,
)  # of ``open_log``; their text is for users


def run_command(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a command that reads the log; returns its exit status. A failure is one line on stderr, Ctrl-C is none."""
    try:
        with _logs_on_stderr():
            asyncio.run(work())
    except BrokenPipeError:  # the reader of standard output has exited
        raise
    except (*FAILURES, OSError) as error:
        return fail(name, error)
    except KeyboardInterrupt:  # how a command that follows the log ends
        pass
    return 0


@contextlib.contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """Send the connection's log lines to stderr. structlog's default is stdout, which scripts read."""
    if structlog.is_configured():
        yield
        return
    processors = [_without_bus_errors, *structlog.get_config()["processors"]]
    structlog.configure(processors, logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    finally:
        structlog.reset_defaults()


def _without_bus_errors(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Without errors of the connection: what they prevent is said in a sentence."""
    if event.get("event") == "bus_error":
        raise structlog.DropEvent
    return event


class LogSource(NamedTuple):
    """Which log to read. Empty: find it in the data folder.

    ``file``: an export (``penstock export``), read instead of all others; ``skip_bad``: without its damaged lines;
    ``verify``: leave out messages of a stopped deployment whose checksums are wrong; ``cells``: how many the deployment
    has, 0: as the data folder says; ``cell_nats_urls``: brokers of those after the first, as a gateway has them.
    """

    data_dir: Path
    nats_url: str = ""
    namespace: str = ""
    file: str = ""
    skip_bad: bool = False
    verify: bool = False
    cells: int = 0
    cell_nats_urls: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> "LogSource":
        """The source that the flags of ``add_flags`` name."""
        return cls(
            Path(args.data_dir or ""),
            args.nats_url,
            args.namespace,
            getattr(args, "file", ""),
            getattr(args, "skip_bad", False),
            getattr(args, "verify", False),
            getattr(args, "cells", 0),
            tuple(filter(None, getattr(args, "cell_nats_urls", "").split(","))),
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that reads the log."""
    add_broker_flags(
        parser,
        folder="data folder of the deployment, running or stopped",
        broker="a running broker instead of the data folder",
        cells=True,
    )
    parser.add_argument("--file", default="", metavar="FILE", help="an export of `penstock export` instead")
    parser.add_argument("--skip-bad", action="store_true", help="of --file: leave damaged lines out")


def add_verify_flag(parser: argparse.ArgumentParser) -> None:
    """For commands that read with ``open_log(..., files=True)``."""
    parser.add_argument(
        "--verify",
        action="store_true",
        help="of a stopped deployment: verify the checksum of each message; damaged ones are named and left out",
    )


class Log(NamedTuple):
    """An open log.

    Attributes:
        reader: what ``penstock.infra.bus.direct_get`` reads: the broker, or files.
        stopped: of a deployment that does not run, so nothing is added to it.
        url: of the broker; "": there is none.
        cell: whose log it is, by its number.
    """

    reader: Readable
    stopped: bool
    url: str = ""
    cell: int = 0

    @property
    def bus(self) -> "Bus":
        """The broker. Do not ask for it after ``open_log(..., files=True)`` unless the log is not ``stopped``."""
        assert not isinstance(self.reader, LogFiles)
        return self.reader

    @property
    def files(self) -> StoredLog | None:
        """The files of a stopped deployment; None: a broker has the log."""
        return self.reader if isinstance(self.reader, StoredLog) else None


class CellSource(NamedTuple):
    """Where to read the log of one cell.

    Attributes:
        number: as ids of its requests have it.
        cells: how many the deployment has.
    """

    number: int
    source: LogSource
    cells: int = 1


def cells_of(source: LogSource) -> list[CellSource]:
    """The cells of the deployment that ``source`` names, home first.

    A URL has as many as ``source`` says. A data folder says it itself: in the state of what runs, and by the stores
    that are in it. Where ``source`` has the namespace of one cell after the first, it is this cell alone.

    Raises:
        ValueError: there is not one URL for each cell after the first.
    """
    if source.file:
        return [CellSource(0, source)]
    urls = tuple(each.replace(";", ",") for each in source.cell_nats_urls)
    if urls and len(urls) != source.cells - 1:
        raise ValueError(
            f"--cell-nats-urls names {len(urls)} brokers and --cells is {max(1, source.cells)}: name one for each cell "
            "but the first, or none"
        )
    alone = source._replace(cells=0, cell_nats_urls=())
    found = [CellSource(0, alone)] if source.nats_url else _cells_of_folder(alone)
    home = found[0].source.namespace or "ps"
    if len(found) == 1 and source.cells > 1:
        places = [alone.nats_url, *(urls or [alone.nats_url] * (source.cells - 1))]
        return [
            CellSource(cell, alone._replace(nats_url=url, namespace=cell_namespace(home, cell)), source.cells)
            for cell, url in enumerate(places)
        ]
    if not source.namespace or source.namespace == home or len(found) == 1:
        return found
    return [each for each in found if each.source.namespace == source.namespace] or [CellSource(0, alone)]


def _cells_of_folder(source: LogSource) -> list[CellSource]:
    """Those that run on a data folder, or whose stores are in it."""
    data_dir = source.data_dir.resolve()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        cells = read_state(data_dir / "state.json").all_cells
        if len(cells) == 1:
            return [CellSource(cells[0].number, source)]
        places = [{"data_dir": Path(each.data_dir)} if each.data_dir else {"nats_url": each.nats_url} for each in cells]
        return [
            CellSource(each.number, source._replace(namespace=each.namespace, **place), len(cells))
            for each, place in zip(cells, places, strict=True)
        ]
    names = namespaces(data_dir)
    chosen = source.namespace in names
    home = source.namespace if chosen else min(names, key=len, default="")
    found, shared = [source._replace(namespace=home)], {home}
    while home:
        cell = len(found)
        folder, namespace = data_dir / "cells" / str(cell), cell_namespace(home, cell)
        if namespace in namespaces(folder):
            found.append(source._replace(data_dir=folder, namespace=namespace))
        elif namespace in names:
            found.append(source._replace(namespace=namespace))
            shared.add(namespace)
        else:
            break
    if len(found) == 1 or not (chosen or shared == set(names)):  # one cell, or several deployments
        return [CellSource(0, source)]
    return [CellSource(cell, each, len(found)) for cell, each in enumerate(found)]


def cells_for(source: LogSource, request_id: str) -> list[CellSource]:
    """All cells, in the order in which a request is looked for: the one in its id, then home, for older ids."""
    number = cell_in(request_id)
    return sorted(cells_of(source), key=lambda cell: cell.number != number)


def in_order(logs: Sequence[Log], request_id: str) -> list[Log]:
    """The same of open logs."""
    number = cell_in(request_id)
    return sorted(logs, key=lambda log: log.cell != number)


@contextlib.asynccontextmanager
async def open_cells(
    source: LogSource,
    *,
    name: str,
    role: str = "reader",
    streams: Sequence[str] = REQUEST_STREAMS,
    timeout_s: float = CONNECT_S,
    files: bool = False,
    patient: bool = False,
    whole: bool = False,
    left_out: Callable[[CellSource, Exception], None] | None = None,
) -> AsyncIterator[list[Log]]:
    """Open the logs of all cells, as ``open_log`` does each; home is the first, unless it cannot be opened.

    Args:
        whole: every cell is needed; otherwise one that cannot be opened is left out.
        left_out: called with each; default: it is named on standard error.
    Raises:
        ServingError, ValueError, CopyFailed, NoServerBinary, ServerFailed, OSError: as ``open_log``, if no cell can be
            opened, or with ``whole``.
    """
    cells = cells_of(source)
    async with contextlib.AsyncExitStack() as stack:
        logs: list[Log] = []
        failures: list[Exception] = []
        for cell in cells:
            opening = open_log(
                cell.source, name=name, role=role, streams=streams, timeout_s=timeout_s, files=files, patient=patient
            )
            try:
                log = await stack.enter_async_context(opening)
            except FAILURES as error:
                if whole or len(cells) == 1:
                    raise
                failures.append(error)
                if left_out is not None:
                    left_out(cell, error)
                else:
                    print(f"cell {cell.number} is left out: {error}", file=sys.stderr)
            else:
                logs.append(log._replace(cell=cell.number))
        if not logs:
            raise failures[0]
        yield logs


@contextlib.asynccontextmanager
async def open_log(
    source: LogSource,
    *,
    name: str,
    role: str = "reader",
    streams: Sequence[str] = REQUEST_STREAMS,
    timeout_s: float = CONNECT_S,
    files: bool = False,
    patient: bool = False,
) -> AsyncIterator[Log]:
    """Open the log that ``source`` names.

    A file comes first. Then a URL; then the deployment that runs on the data folder; then the folder's own store, if
    nothing runs on it. A file and a stopped store are read as they are with ``files``, else a broker of this process
    serves a copy of them until the context ends. The folder itself is not changed.

    Args:
        name: of the connection, as the broker's monitoring shows it.
        role: the least that suffices. The broker of a data folder is asked as this user, another one as ``source``
            says.
        patient: a refusal of the broker's does not end the context, only what was refused fails.
        streams: what to read, or copy, of a stopped deployment, without the namespace.
        timeout_s: how long the broker may take to answer.
        files: the caller reads with ``penstock.infra.bus.direct_get`` only, so that it needs no broker.
    Raises:
        ServingError: the broker does not answer, or it refuses something to this user; the text names the role needed.
        ValueError: there is no deployment, or several and no namespace was given; the file is damaged.
        CopyFailed, NoServerBinary, ServerFailed, OSError: the copy cannot be made or served.
    """
    _check_verify(source)
    if source.file:
        async with _exported(source, name, role, streams, timeout_s, files) as log:
            yield log
        return
    data_dir = source.data_dir.resolve()
    lock = Lock(data_dir / "nats.lock")
    if not source.nats_url and (data_dir / STREAMS_DIR).is_dir() and _acquired(lock):
        try:
            namespace = _namespace(source, data_dir)
            names = [stream_name(Subjects(namespace), stream) for stream in streams]
            stored = _stored(data_dir, namespace, names, NotStarted(lock.path), source.verify) if files else None
            if stored is None and source.verify:
                raise ValueError(
                    "--verify: only a broker reads these streams: encrypted, compressed or of a later nats-server"
                )
            if stored is not None:
                lock.release()
                yield Log(stored, stopped=True)
                return
            async with contextlib.AsyncExitStack() as stack:
                copy = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-log-", dir=_beside(data_dir)))
                await asyncio.to_thread(copy_streams, data_dir, Path(copy), names)
                lock.release()
                yield await stack.enter_async_context(_served(copy, namespace, name, role, timeout_s))
        finally:
            lock.release()
        return
    url, namespace = running(source, data_dir, role)
    if source.verify:
        raise ValueError("--verify is for a stopped deployment; the broker verifies what it reads")
    async with _asked(url, name, role, namespace, timeout_s, patient) as log:
        yield log


@contextlib.asynccontextmanager
async def _asked(url: str, name: str, role: str, namespace: str, timeout_s: float, patient: bool) -> AsyncIterator[Log]:
    from penstock.infra.bus.connection import refusals

    command = name.partition(":")[0]  # connections of several `penstock trace` have names of their own
    async with await _connect(url, name, role, namespace, timeout_s) as bus:
        with contextlib.nullcontext() if patient else refusals(bus.on_refused, bus.user, command, role):
            yield Log(bus, stopped=False, url=url)


def _check_verify(source: LogSource) -> None:
    if not source.verify:
        return
    if source.file or source.nats_url:
        raise ValueError("--verify is for the data folder of a stopped deployment")
    if not can_verify_much():
        raise ValueError("--verify needs numpy: pip install 'penstock[router]'")


@contextlib.asynccontextmanager
async def _exported(
    source: LogSource, name: str, role: str, streams: Sequence[str], timeout_s: float, files: bool
) -> AsyncIterator[Log]:
    # Modules that no other command which reads the log waits for.
    from penstock.log_tools.sources.export_file import open_export
    from penstock.log_tools.sources.restore import restore

    if not files:
        await asyncio.to_thread(check_server)
    with tempfile.TemporaryDirectory(prefix="penstock-log-") as folder:
        with open_export(source.file, skip_bad=source.skip_bad) as exported:
            namespace = source.namespace or exported.header.namespace
            try:
                await asyncio.to_thread(restore, exported, Path(folder), namespace, streams)
            except OSError as error:
                raise CopyFailed(
                    f"{source.file} cannot be restored in {folder} ({error.strerror}): set TMPDIR to a disk with room"
                ) from error
            if exported.bad:
                print(exported.left_out(), file=sys.stderr)
        if files:
            names = [stream_name(Subjects(namespace), stream) for stream in streams]
            stored = _stored(Path(folder), namespace, names)
            assert stored is not None
            yield Log(stored, stopped=True)
            return
        async with _served(folder, namespace, name, role, timeout_s) as log:
            yield log


def _stored(
    data_dir: Path, namespace: str, names: Sequence[str], check: Callable[[], None] = lambda: None, verify: bool = False
) -> StoredLog | None:
    """The streams of a folder as files; None: only a broker can read them."""
    if not known_form(written_by(data_dir)):
        return None
    try:
        return StoredLog(data_dir / STREAMS_DIR, Subjects(namespace), names, check, verify=verify)
    except UnreadableFiles:
        return None
    except msgspec.MsgspecError as error:
        raise CopyFailed(f"the metadata of a stream in {data_dir} is damaged: {error}") from error


class NotStarted:
    """Raises when called after a broker has started on a data folder: its files change then.

    Args:
        lock: the folder's, held by this process.
    """

    def __init__(self, lock: Path) -> None:
        self._path = lock
        self._mine = self._written()

    def __call__(self) -> None:
        """
        Raises:
            CopyFailed: the deployment was started.
        """
        if self._written() != self._mine and holder(self._path) is not None:
            raise CopyFailed(f"the deployment in {self._path.parent} was started while its log was read: try again")

    def _written(self) -> int:
        """When the lock was taken last; 0: never."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


@contextlib.asynccontextmanager
async def _served(folder: str, namespace: str, name: str, role: str, timeout_s: float) -> AsyncIterator[Log]:
    """Run a broker on ``folder`` until the context ends."""
    from penstock.infra.nats_server.server import EmbeddedNats  # few commands need it

    server = EmbeddedNats(folder, namespace)
    await server.start()
    try:
        async with await _connect(server.url(), name, role, namespace, timeout_s) as bus:
            yield Log(bus, stopped=True, url=server.url())
    finally:
        await server.stop()


async def _connect(url: str, name: str, role: str, namespace: str, timeout_s: float) -> "Bus":
    from penstock.infra.bus.connection import (
        connect,  # a stopped deployment is read without the client, which loads slowly
    )

    return await connect(url, role=role, name=name, namespace=namespace, timeout=timeout_s)


def _acquired(lock: Lock) -> bool:
    """Lock the folder. False: a broker runs on it. A folder that cannot be written to is read without a lock."""
    try:
        lock.acquire("penstock, which reads the log,")
    except DataDirBusy:
        return False
    except DataDirUnusable:
        return holder(lock.path) is None
    return True


def _namespace(source: LogSource, data_dir: Path) -> str:
    names = namespaces(data_dir)
    if source.namespace:
        if source.namespace not in names:
            raise ValueError(f"no streams of namespace {source.namespace} in {data_dir}; it has {', '.join(names)}")
        return source.namespace
    if len(names) != 1:
        raise ValueError(f"{data_dir} has {len(names)} namespaces ({', '.join(names)}); choose one with --namespace")
    return names[0]


def _beside(data_dir: Path) -> str | None:
    """A folder on the same disk, which may share blocks with the original. None: use the system's temporary folder."""
    return str(data_dir) if "TMPDIR" not in os.environ and os.access(data_dir, os.W_OK) else None


def running(source: LogSource, data_dir: Path, role: str = "operator") -> tuple[str, str]:
    """URL and namespace of the broker that ``source`` names, or of that on a data folder, with a role's credentials."""
    if source.nats_url:
        return source.nats_url, source.namespace or "ps"
    state: DeploymentState | None = None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        state = read_state(data_dir / "state.json")
    namespace = source.namespace or (state.namespace if state is not None else "ps")
    # It loads slowly, and a stopped deployment is read without it.
    from penstock.infra.nats_server.tenants import user_in_use

    with contextlib.suppress(OSError, ValueError, KeyError):
        passwords = json.loads((data_dir / "secrets.json").read_text())
        port = int((data_dir / "nats.port").read_text())
        own = rf"nats://operator(-2)?:[^@]+@127\.0\.0\.1:{port}"  # also with a password that was changed since
        if state is None or re.fullmatch(own, state.nats_url):
            user = user_in_use(passwords, role)
            return f"nats://{user}:{passwords[user]}@127.0.0.1:{port}", namespace
    if state is not None:
        return state.nats_url, namespace
    raise ValueError(
        f"no deployment in {data_dir}: name its folder with --data-dir, or its broker with PENSTOCK_NATS_URL or "
        "--nats-url"
    )
