"""``penstock backup`` and ``penstock restore``: all brokers of a deployment as a folder of snapshots, and back.

Each stream is a snapshot of its own, taken while the deployment runs, so they are of slightly different moments. DONE
is the last: what ended meanwhile has its record, and what has none in it counts as open. ``restore`` ends such requests
before any router can see them, and lets routers begin after all that was restored.
"""

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from nats.aio.client import Client
from rich.console import Console

from penstock.cli.figures import counted, show_size
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser, add_broker_flags
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.jetstream import STREAM_NOT_FOUND
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import config_of
from penstock.infra.nats_server.apply_streams import stream_configs
from penstock.infra.nats_server.datadir import DataDirBusy, DataDirUnusable
from penstock.infra.nats_server.jetstream_api import (
    BrokerProblem,
    Config,
    SnapshotHead,
    existing_info,
    request,
    restore_snapshot,
    take_snapshot,
)
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.log_tools.requests.find_requests import LoggedRequest, unfinished
from penstock.log_tools.sources.open_log import CONNECT_S, LogSource, cells_of, open_cells, run_command
from penstock.schemas import done, summary
from penstock.schemas.errors import Code
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from penstock.schemas.summary import Criteria

MANIFEST = "backup.json"  # written last: a folder without it is not a backup
FORM = 1
PIECE_BYTES = 128 << 10
END_S = 30.0  # for the end of one request to be stored
# What says who runs now, what their caches hold, or waits for a gateway that asked: nothing of it holds afterwards.
LEFT_OUT = ("SUBMIT",)
LEFT_OUT_BUCKETS = ("workers", "routers", "planners", "exporters")
LEFT_OUT_OBJECTS = ("snapshots",)
LAST = ("AUDIT", "DONE")  # of a backup


class StreamBackup(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. ``file``: relative to the folder; ``size`` in bytes."""

    name: str
    file: str
    size: int
    sha256: str
    messages: int
    config: Config
    state: Config


class CellBackup(msgspec.Struct, frozen=True, kw_only=True):
    """The streams of one cell; home is number 0."""

    cell: int
    namespace: str
    streams: tuple[StreamBackup, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup has. ``made_ns``: when it was begun, Unix time."""

    form: int = FORM
    made_ns: int
    cells: tuple[CellBackup, ...]


def run_backup(argv: Sequence[str]) -> int:
    """Back up; the exit status."""
    parser = Parser(
        prog="penstock backup",
        description="write the streams and buckets of a running deployment to a folder, home first, then the other "
        "cells, while it serves requests. The folder has prompts and answers: keep it as safe as the broker's disk. "
        "It has neither passwords nor the content of requests with no_store.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new one")
    add_broker_flags(
        parser,
        folder="data folder of the running deployment",
        broker="its broker instead, with the operator's credentials",
        cells=True,
    )
    args = parser.parse_args(argv)
    args.folder = Path(args.folder).resolve()
    return run_command("backup", lambda: _reported(_backup(args, stdout())))


def run_restore(argv: Sequence[str]) -> int:
    """Restore; the exit status."""
    parser = Parser(
        prog="penstock restore",
        description="restore the streams and buckets of a backup: to a new data folder for `penstock up`, or to "
        "brokers without streams of its namespaces, before other processes start. Requests that were unfinished in "
        "the backup end with an error that says so.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="of `penstock backup`")
    add_broker_flags(
        parser,
        folder="a new data folder",
        broker="the broker of the first cell, with the operator's credentials",
        default="",
        namespace="the backup's; it cannot be changed",
        cells=True,
    )
    args = parser.parse_args(argv)
    if bool(args.data_dir) == bool(args.nats_url):
        parser.error("give --data-dir for a new data folder, or --nats-url for a running broker")
    args.folder = Path(args.folder).resolve()
    args.data_dir = Path(args.data_dir).resolve() if args.data_dir else None
    return run_command("restore", lambda: _reported(_restore(args, stdout())))


async def _reported(work: Any) -> None:
    try:
        await work
    except (BrokerProblem, DataDirBusy, DataDirUnusable) as error:
        raise ValueError(str(error)) from error


# --- backup ---


async def _backup(args: argparse.Namespace, console: Console) -> None:
    folder: Path = args.folder
    source = LogSource.of(args)
    began, made_ns = time.monotonic(), time.time_ns()
    async with open_cells(source, name="backup", role="operator", streams=(), whole=True) as logs:
        if any(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: copy its data folder, or start it first")
        _make_empty(folder)
        cells = []
        for log in logs:
            bus = log.bus
            async with recorded(bus.nc, bus.subjects, "backup", f"namespace {bus.subjects.namespace}", str(folder)):
                cells.append(await back_up_cell(bus, log.cell, folder))
    manifest = Manifest(made_ns=made_ns, cells=tuple(cells))
    _write_manifest(folder, manifest)
    streams = [stream for cell in cells for stream in cell.streams]
    console.print(
        f"{counted(sum(each.messages for each in streams), 'message')} of {counted(len(streams), 'stream')} in "
        f"{counted(len(cells), 'cell')}, {show_size(sum(each.size for each in streams))}, in "
        f"{time.monotonic() - began:.1f} s: {folder}",
        highlight=False,
        soft_wrap=True,
    )


def backed_up(subjects: Subjects) -> list[str]:
    """The streams that a backup has, in the order in which they are read."""
    left_out = {
        *map(subjects.stream, LEFT_OUT),
        *(f"KV_{subjects.bucket(name)}" for name in LEFT_OUT_BUCKETS),
        *(f"OBJ_{subjects.bucket(name)}" for name in LEFT_OUT_OBJECTS),
    }
    last = [subjects.stream(name) for name in LAST]
    kept = [each["name"] for each in stream_configs(topology(subjects)) if each["storage"] == "file"]
    return [*(name for name in kept if name not in left_out and name not in last), *last]


async def back_up_cell(bus: Bus, cell: int, folder: Path) -> CellBackup:
    """Write the streams of a cell to a folder of its own in ``folder``.

    Raises:
        BrokerProblem: a stream cannot be read.
        OSError: a file cannot be written.
    """
    place = folder / str(cell)
    place.mkdir(mode=0o700)
    streams = []
    for name in backed_up(bus.subjects):
        if await existing_info(bus.nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND) is None:
            continue  # of a later release than the one that made the streams
        with _SnapshotFile(place / f"{name}.snapshot") as file:
            head = await take_snapshot(bus.nc, name, file.write)
        made = StreamBackup(
            name=name,
            file=f"{cell}/{name}.snapshot",
            size=file.size,
            sha256=file.sha256,
            messages=int(head.state.get("messages", 0)),
            config=head.config,
            state=head.state,
        )
        streams.append(made)
    return CellBackup(cell=cell, namespace=bus.subjects.namespace, streams=tuple(streams))


class _SnapshotFile:
    """A new file that only its owner can read, and what a manifest says of it."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> "_SnapshotFile":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _make_empty(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder")


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with _SnapshotFile(folder / f"{MANIFEST}.part") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
    (folder / f"{MANIFEST}.part").rename(folder / MANIFEST)


# --- restore ---


def read_manifest(folder: Path) -> Manifest:
    """What a backup has; every file is checked.

    Raises:
        ValueError: the folder is not a backup, of a later release, or damaged.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a complete backup: it has no {MANIFEST}, which is written last") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{folder / MANIFEST} is damaged: {error}") from error
    if manifest.form != FORM:
        raise ValueError(f"{folder} is of another release of Penstock (form {manifest.form}, not {FORM})")
    if not manifest.cells:
        raise ValueError(f"{folder / MANIFEST} names no cell")
    for stream in (stream for cell in manifest.cells for stream in cell.streams):
        found = hashlib.sha256()
        for piece in _pieces(folder / stream.file):
            found.update(piece)
        if found.hexdigest() != stream.sha256:
            raise ValueError(f"{folder / stream.file} is damaged: its checksum is not the one in {MANIFEST}")
    return manifest


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class _Place(NamedTuple):
    """Where a cell is restored. ``alone``: one server, which keeps one copy of each stream."""

    url: str
    alone: bool


async def _restore(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    folder: Path = args.folder
    manifest = await asyncio.to_thread(read_manifest, folder)
    home = manifest.cells[0].namespace
    if args.namespace not in ("", home):
        raise ValueError(f"the backup is of namespace {home}, and streams keep their names: leave --namespace out")
    places = _in_folder(args.data_dir, manifest) if args.data_dir else _on_brokers(args, manifest)
    async with places as found:
        ended = await restore_cells(folder, manifest, found)
    made = datetime.datetime.fromtimestamp(manifest.made_ns / 1e9)
    count = sum(each.messages for cell in manifest.cells for each in cell.streams)
    console.print(
        f"{counted(count, 'message')} in {counted(len(manifest.cells), 'cell')} as of {made:%Y-%m-%d %H:%M:%S}, in "
        f"{time.monotonic() - began:.1f} s; ended {counted(ended, 'request')} that {'was' if ended == 1 else 'were'} "
        "open then",
        highlight=False,
        soft_wrap=True,
    )


@contextlib.asynccontextmanager
async def _in_folder(data_dir: Path, manifest: Manifest) -> AsyncIterator[list[_Place]]:
    """A broker for each cell, where ``penstock up`` will have it. If restoring fails, their stores go."""
    folders = [data_dir / "cells" / str(each.cell) if each.cell else data_dir for each in manifest.cells]
    if any((each / "nats").exists() for each in folders):
        raise ValueError(f"{data_dir} has a broker's store: stop the deployment and name a new folder")
    servers: list[EmbeddedNats] = []
    try:
        for place, cell in zip(folders, manifest.cells, strict=True):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            server = EmbeddedNats(place, cell.namespace)
            await server.start()
            servers.append(server)
        yield [_Place(server.url("operator"), alone=True) for server in servers]
    except BaseException:
        for server in servers:
            server.kill()
            shutil.rmtree(server.data_dir / "nats", ignore_errors=True)
        raise
    finally:
        for server in servers:
            await server.stop()


@contextlib.asynccontextmanager
async def _on_brokers(args: argparse.Namespace, manifest: Manifest) -> AsyncIterator[list[_Place]]:
    number = len(manifest.cells)
    if args.cells not in (0, number):
        raise ValueError(f"the backup has {counted(number, 'cell')}, not {args.cells}")
    source = LogSource.of(args)._replace(namespace=manifest.cells[0].namespace, cells=number if number > 1 else 0)
    yield [_Place(cell.source.nats_url, alone=False) for cell in cells_of(source)]


async def restore_cells(folder: Path, manifest: Manifest, places: Sequence[_Place]) -> int:
    """Restore each cell at its place; how many requests were ended.

    Raises:
        BrokerProblem: a broker cannot be reached, has such streams, or does not take them. Those that it had taken
            were deleted, except the audit log, which cannot be deleted.
    """
    async with contextlib.AsyncExitStack() as stack:
        buses = []
        for cell, place in zip(manifest.cells, places, strict=True):
            opening = connect(place.url, role="operator", name="restore", namespace=cell.namespace, timeout=CONNECT_S)
            bus = await stack.enter_async_context(await opening)
            await _check_empty(bus)
            buses.append(bus)
        ended = 0
        for cell, place, bus in zip(manifest.cells, places, buses, strict=True):
            await _restore_streams(bus.nc, folder, cell, alone=place.alone)
            await _begin_behind(bus)
            replicas = 1 if place.alone else max(each.config["num_replicas"] for each in cell.streams)
            await apply_at(place.url, bus.subjects, replicas, cells=len(manifest.cells))
            async with recorded(bus.nc, bus.subjects, "restore", f"namespace {cell.namespace}", str(folder)):
                ended += await end_open(bus, manifest.made_ns)
        return ended


async def _check_empty(bus: Bus) -> None:
    for config in stream_configs(topology(bus.subjects)):
        name = config["name"]
        if await existing_info(bus.nc, f"STREAM.INFO.{name}", STREAM_NOT_FOUND) is not None:
            raise BrokerProblem(
                f"the broker has a stream {name}, and a backup is restored where there is none: stop the deployment "
                "and restore to a new --data-dir, or to another broker"
            )


async def _restore_streams(nc: Client, folder: Path, cell: CellBackup, *, alone: bool) -> None:
    # The audit log is the last: the operator may not delete it if another stream fails.
    audit = Subjects(cell.namespace).stream("AUDIT")
    made: list[str] = []
    try:
        for each in sorted(cell.streams, key=lambda stream: stream.name == audit):
            config = each.config
            if alone:
                config = {key: value for key, value in config.items() if key != "placement"} | {"num_replicas": 1}
            await restore_snapshot(nc, SnapshotHead(config, each.state), _pieces(folder / each.file))
            made.append(each.name)
    except BaseException:
        for name in made:
            with contextlib.suppress(BrokerProblem):
                await request(nc, f"STREAM.DELETE.{name}", {})
        raise


async def _begin_behind(bus: Bus) -> None:
    """Make the consumers of routers and gateways begin after all that was restored.

    Otherwise they would be given every request of the day once more.
    """
    for spec in topology(bus.subjects).consumers:
        if await existing_info(bus.nc, f"STREAM.INFO.{spec.stream}", STREAM_NOT_FOUND) is not None:
            config = config_of(spec) | {"deliver_policy": "new"}
            body = {"stream_name": spec.stream, "config": config}
            await request(bus.nc, f"CONSUMER.CREATE.{spec.stream}.{spec.name}", body)


async def end_open(bus: Bus, made_ns: int) -> int:
    """End the requests that have no record, with the reason; how many there were.

    Args:
        made_ns: when the backup was made, Unix time.
    Raises:
        ServingError: an end cannot be stored.
    """
    found = await unfinished(bus, Criteria(), stopped=True)
    async with Publisher(bus) as publisher:
        for each in found:
            if each.request is not None:
                await _end(bus, publisher, each.request, end_of(each, each.request, made_ns, time.time_ns()))
    return len(found)


def end_of(logged: LoggedRequest, request: GenerateRequest, made_ns: int, now_ns: int) -> done.Done:
    """The record of a request that was open when a backup was made."""
    made = datetime.datetime.fromtimestamp(made_ns / 1e9, datetime.UTC)
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=max(1, logged.summary.attempts),
        worker=logged.summary.worker,
        usage=done.usage_of(request, ()),
        timings=done.Timings(created_ns=request.created_ns, ended_ns=now_ns),
        code=(Code.content_lost if request.no_store else Code.worker_lost).value,
        message=f"the deployment was restored from a backup of {made:%Y-%m-%d %H:%M:%S} UTC, when this request had not "
        "ended: send it again",
        user=request.user,
        submitted=done.recorded(request),
        left_out=done.not_recorded(request),
    )


async def _end(bus: Bus, publisher: Publisher, request: GenerateRequest, event: done.Done) -> None:
    headers = summary.headers_of(event, request)
    if request.no_store:
        event = done.without_content(event)
    subject = bus.subjects.done(request.tenant, request.recorded_under, request.id)
    payload = done.encode_within(event, bus.max_message)
    await publisher.publish(subject, payload, request.id, headers=headers, timeout=END_S, once=True)
