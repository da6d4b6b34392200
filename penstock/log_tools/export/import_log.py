"""``penstock import``: an export as a data folder, or in a namespace of a running broker."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nats.errors import Error as NatsError

from penstock.cli.figures import counted
from penstock.cli.terminal import fail
from penstock.configs.flags import Parser, add_broker_flags
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server.apply_streams import create_streams, stream_configs
from penstock.infra.nats_server.datadir import Lock
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.log_tools.sources.data_folder import STREAMS_DIR, stream_name
from penstock.log_tools.sources.export_file import ExportFile, open_export
from penstock.log_tools.sources.log_line import BadLine
from penstock.log_tools.sources.open_log import CONNECT_S, FAILURES
from penstock.log_tools.sources.restore import RESTORED, prefix, restore
from penstock.log_tools.sources.store_files import check_server
from penstock.schemas.streams import topology
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_RECORDED_TIME, Subjects

PART = ".import-"  # prefix of an incomplete folder
WHOLE = "whole"  # file in it: its streams are being moved
FLUSH = 500  # messages between two waits for the broker
STORED_S = 30.0
GROWS_S = 5.0  # how long a stream may hold no more than before, until the rest counts as lost
LOOK_S = 0.05
WINDOW_NS = 100_000_000  # how long the broker takes the same message id for a repeat: the shortest that it accepts
REMEMBERED = 100_000  # message ids at least; those before them are out of the window


def run(argv: Sequence[str]) -> int:
    """Import a file; returns the exit status."""
    parser = Parser(
        prog="penstock import",
        description="read an export into a new data folder, which keeps the recorded times and sequences, or into an "
        "unused namespace of a running broker",
    )
    parser.add_argument("file", metavar="FILE", help="of `penstock export`; '-' for standard input")
    add_broker_flags(
        parser,
        folder="a folder without this namespace's streams",
        broker="a running broker, with the operator's credentials",
        default="",
        namespace="the file's own",
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave damaged lines out")
    args = parser.parse_args(argv)
    if bool(args.data_dir) == bool(args.nats_url):
        parser.error("give --data-dir for a data folder, or --nats-url for a running broker")
    began = time.perf_counter()
    try:
        with open_export(args.file, skip_bad=args.skip_bad) as exported:
            namespace = args.namespace or exported.header.namespace
            if args.data_dir:
                counts = _into_folder(exported, Path(args.data_dir).resolve(), namespace)
            else:
                counts = asyncio.run(_into_broker(exported, args.nats_url, namespace))
            if exported.bad:
                print(exported.left_out(), file=sys.stderr)
    except (*FAILURES, BrokerProblem, OSError) as error:
        return fail("import", error)
    parts = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    whole = counted(sum(counts.values()), "message")
    print(f"{whole} in {time.perf_counter() - began:.1f} s into namespace {namespace}: {parts}")
    return 0


def _into_folder(exported: ExportFile, data_dir: Path, namespace: str) -> dict[str, int]:
    check_server()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = Lock(data_dir / "nats.lock")
    lock.acquire("a nats-server of penstock")
    try:
        folders = [data_dir / STREAMS_DIR / stream_name(Subjects(namespace), stream) for stream in RESTORED]
        _undo(data_dir)
        if any(folder.exists() for folder in folders):
            raise ValueError(f"{data_dir} has streams of namespace {namespace}: name another folder or --namespace")
        part = Path(tempfile.mkdtemp(prefix=PART, dir=data_dir))
        try:
            counts = restore(exported, part, namespace)
            (part / WHOLE).touch()
            folders[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in folders:
                (part / STREAMS_DIR / folder.name).rename(folder)
            return counts
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        lock.release()


def _undo(data_dir: Path) -> None:
    """Remove the remains of killed imports: incomplete folders, and streams that were already moved."""
    for part in data_dir.glob(f"{PART}*"):
        names = {folder.name for folder in (part / STREAMS_DIR).glob("*")}
        if (part / WHOLE).exists() and names:
            namespace = next(iter(names)).removeprefix("OBJ_").rpartition("_")[0]
            for name in {stream_name(Subjects(namespace), stream) for stream in RESTORED} - names:
                shutil.rmtree(data_dir / STREAMS_DIR / name, ignore_errors=True)
        shutil.rmtree(part, ignore_errors=True)


async def _into_broker(exported: ExportFile, url: str, namespace: str) -> dict[str, int]:
    """Publish every message; the recorded time goes into a header."""
    subjects = Subjects(namespace)
    async with await connect(url, role="operator", name="import", namespace=namespace, timeout=CONNECT_S) as bus:
        streams = {stream_name(subjects, stream): stream for stream in RESTORED}
        try:
            configs = [each for each in stream_configs(topology(subjects)) if each["name"] in streams]
            await create_streams(bus.nc, [each | {"max_age": 0, "duplicate_window": WINDOW_NS} for each in configs])
        except BrokerProblem as error:
            raise ValueError(
                f"namespace {namespace} cannot be made ({error}); name an unused one: --namespace"
            ) from error
        for name in streams:
            if (await bus.js.stream_info(name)).state.last_seq:  # a deployment's routers would run the requests
                raise ValueError(f"{name} has messages already: name an unused --namespace")
        counts = dict.fromkeys(RESTORED, 0)
        recent, earlier = set[str](), set[str]()
        for record in exported.records():
            if record.stream not in counts:
                continue
            name = stream_name(subjects, record.stream)
            recorded = prefix(exported.header.namespace, name)
            if not record.subject.startswith(recorded):
                exported.reject(BadLine(f"subject {record.subject} does not begin with {recorded}"))
                continue
            headers = {name: value for name, value in record.headers.items() if not name.startswith("Nats-Expected-")}
            headers[HEADER_RECORDED_TIME] = record.time
            subject = prefix(namespace, name) + record.subject[len(recorded) :]
            message_id = f"{name} {headers.get(HEADER_MSG_ID, record.seq)}"
            if message_id in recent or message_id in earlier:
                await _store_repeat(bus, subject, record.data, headers)
            else:
                await bus.nc.publish(subject, record.data, headers=headers)
                recent.add(message_id)
                if len(recent) == REMEMBERED:
                    recent, earlier = set(), recent
            counts[record.stream] += 1
            if not counts[record.stream] % FLUSH:
                await bus.nc.flush()
        await _stored(bus, counts)
        return counts


async def _store_repeat(bus: Bus, subject: str, data: bytes, headers: dict[str, str]) -> None:
    """Store a message whose id was stored before, as by a publisher that got no acknowledgement for minutes."""
    until = time.monotonic() + STORED_S
    while True:
        try:
            stored = await bus.js.publish(subject, data, headers=headers)
        except NatsError as error:
            raise ValueError(f"a message of {subject} could not be stored: {error}") from error
        if not stored.duplicate:
            return
        if time.monotonic() > until:
            raise ValueError(
                f"the broker takes a message of {subject} for a repeat after {STORED_S:.0f} s: import into a folder "
                "(--data-dir)"
            )
        await asyncio.sleep(LOOK_S)


async def _stored(bus: Bus, counts: dict[str, int]) -> None:
    """Wait until the streams hold all published messages: the broker has read them all before it stores the last."""
    async with asyncio.timeout(STORED_S):
        await bus.nc.flush()
    for stream, count in counts.items():
        held, until = -1, time.monotonic() + GROWS_S
        while held != count:
            try:
                info = await bus.js.stream_info(stream_name(bus.subjects, stream))
            except NatsError as error:
                raise ValueError(f"stream {stream} cannot be read: {error}") from error
            if info.state.messages > held:
                held, until = info.state.messages, time.monotonic() + GROWS_S
            elif time.monotonic() > until:
                raise ValueError(
                    f"{stream} holds {held} of {counted(count, 'message')}: its broker was restarted, or has no room"
                )
            else:
                await asyncio.sleep(LOOK_S)
