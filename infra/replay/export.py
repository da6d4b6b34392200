"""``penstock export``: recorded requests as a file: every message about them, one line of JSON each."""

import argparse
import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, BinaryIO, NamedTuple

import msgspec

from configs.flags import Parser
from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, format_time, get, get_last, read, read_backwards
from infra.counts import counted
from infra.replay.bulk_read import NeedsTls, read_bulk
from infra.replay.files import STDIO, writing
from infra.replay.log_line import (
    FORMAT,
    STREAMS,
    VERSION,
    FileHeader,
    LogLine,
    ModelInfo,
    StreamLimits,
    encode_line,
    header_line,
)
from infra.replay.media import Exported, export_media, media_of
from infra.replay.redaction import VOCABULARY, Redactor
from infra.replay.selection import Selection
from infra.sizes import parse_size, show_size
from infra.timeline.find_requests import of_entry
from infra.timeline.log_copy import MEDIA
from infra.timeline.moments import moment_ns
from infra.timeline.open_log import Log, Source, add_flags, open_log, run_command
from schemas import fleet
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.requests import GenerateRequest
from schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S

SAMPLED = 200  # records from which the models are known
GROUP = 256  # lines per write
NS = 1_000_000_000
_SERVERS_HEADERS = "Nats-"
_KEPT_HEADERS = ("Nats-Msg-Id",)


class Counted(NamedTuple):
    """What was written."""

    requests: int
    messages: int
    seconds: float
    left_out: int = 0
    media: Exported | None = None  # None: the requests have none


def run(argv: Sequence[str]) -> int:
    """Export messages; returns the exit status."""
    parser = Parser(
        prog="penstock export",
        description="write recorded requests to a file: every message about them, one line of JSON each",
    )
    add_selection_flags(parser)
    parser.add_argument("--all", action="store_true", help="every message that the log keeps")
    parser.add_argument(
        "--output", "-o", default=STDIO, metavar="FILE", help="name.jsonl or .jsonl.gz; default: stdout"
    )
    parser.add_argument("--kv", action=argparse.BooleanOptionalAction, help="with the KV events; default: not with ids")
    parser.add_argument(
        "--media-bytes",
        default="256MiB",
        metavar="SIZE",
        help="images of the requests, up to so many bytes together; 0: none (default: %(default)s)",
    )
    parser.add_argument("--redact", action="store_true", help="placeholders of the same length for tokens and text")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCABULARY,
        metavar="N",
        help="of --redact: ids are below (default: %(default)s)",
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("export", lambda: _run(args))


def add_selection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select requests, for ``export`` and ``replay``."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="requests: the X-Request-Id header or id of each answer")
    parser.add_argument("--since", default="", help="accepted since: 15m, 2h, 7d ago, or 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="accepted before; written like --since")
    parser.add_argument("--from-seq", type=int, default=0, metavar="N", help="from this sequence of REQUESTS on")


async def selection(args: argparse.Namespace, bus: Bus, *, everything: bool) -> Selection:
    """The selection by the flags of ``add_selection_flags``.

    Raises:
        ValueError: they select nothing, or contradict each other.
        ServingError: the log cannot be read.
    """
    ids = frozenset(each.removeprefix("chatcmpl-").removeprefix("cmpl-") for each in args.ids)
    ranged = bool(args.since or args.until or args.from_seq)
    if (bool(ids) + ranged + everything) != 1:
        raise ValueError(
            "name requests by their ids, or give --since, --until or --from-seq, or ask for all with --all"
        )
    for each in ids:
        time_of(each)  # raises before anything is read
    now_ns = time.time_ns()
    since = moment_ns(args.since, now_ns) if args.since else 0
    until = moment_ns(args.until, now_ns) if args.until else 0
    if args.from_seq:
        entry = await get(bus, bus.subjects.stream("REQUESTS"), args.from_seq)
        if entry is None:
            raise ValueError(f"--from-seq {args.from_seq}: REQUESTS has no message with this sequence")
        since = max(since, time_of(entry.headers.get("Nats-Msg-Id", "")))
    return Selection(ids, since, until)


async def _run(args: argparse.Namespace) -> None:
    media_bytes = parse_size(args.media_bytes) if not args.redact else 0
    async with open_log(Source.of(args), name="export", streams=(*STREAMS, MEDIA), role="operator") as log:
        chosen = await selection(args, log.bus, everything=args.all)
        chosen = chosen._replace(kv=not chosen.ids if args.kv is None else args.kv)
        redactor = Redactor(args.vocabulary) if args.redact else None
        header = await _header(log.bus, args, redacted=args.redact)
        with writing(args.output) as file:
            written = await export(log, chosen, header, file, redactor, media_bytes=media_bytes)
            if chosen.ids and not written.requests:
                raise ValueError("the log has none of these requests")  # and no file is written
    if chosen.ids and written.requests < len(chosen.ids):
        missing = len(chosen.ids) - written.requests
        print(
            f"penstock export: {missing} of {counted(len(chosen.ids), 'request')} are not in the log", file=sys.stderr
        )
    left = f"; {written.left_out} that cannot be read were left out" if written.left_out else ""
    print(
        f"{counted(written.requests, 'request')}, {counted(written.messages, 'message')} "
        f"in {written.seconds:.1f} s{left}{_about_media(written.media, args)}",
        file=sys.stderr,
    )


def _about_media(media: Exported | None, args: argparse.Namespace) -> str:
    """A sentence about the exported images; "": the requests have none."""
    if media is None:
        return ""
    if args.redact:
        return f"; {counted(media.too_large, 'image')} left out, since a redacted file has none"
    text = f"; {counted(media.objects, 'image')} ({show_size(media.size)})" if media.objects else ""
    if media.gone:
        text += f"; {counted(media.gone, 'image')} left out: the deployment keeps images for 2 h"
    if media.too_large:
        text += f"; {counted(media.too_large, 'image')} left out: larger together than --media-bytes {args.media_bytes}"
    return text


async def export(
    log: Log,
    chosen: Selection,
    header: FileHeader,
    file: BinaryIO,
    redactor: Redactor | None = None,
    *,
    media_bytes: int = 0,
) -> Counted:
    """Write the header and the selected messages, stream by stream, each in its own order, and the requests' images.

    Raises:
        ServingError: the log cannot be read.
    """
    began = time.perf_counter()
    file.write(header_line(header))
    writer = _Writer(chosen, file, redactor)
    with _without_gc():
        for stream, limits in header.streams.items():
            if limits.messages and (stream != "KV" or chosen.kv):
                await copy_messages(log, stream, limits.last_seq, chosen, writer.add)
    media = await _export_media(log.bus, writer, media_bytes) if writer.media else None
    writer.flush()
    return Counted(len(writer.requests), writer.messages, time.perf_counter() - began, writer.left_out, media)


async def _export_media(bus: Bus, writer: "_Writer", limit: int) -> Exported:
    if not limit:
        return Exported(0, 0, 0, len(writer.media))
    return await export_media(bus, writer.media, limit, writer.write)


class _Writer:
    """Selected messages as lines of a file."""

    def __init__(self, chosen: Selection, file: BinaryIO, redactor: Redactor | None) -> None:
        self._chosen = chosen
        self._file = file
        self._redactor = redactor
        self._lines: list[bytes] = []
        self.requests: set[str] = set()
        self.messages = 0
        self.left_out = 0
        self.media: dict[bytes, None] = {}  # digests, in the order of the requests

    def add(self, record: LogLine) -> None:
        part: LogLine | None = record
        if not self._chosen.everything:
            part = self._chosen.part(record)
            if part is None:
                return
        if part is not None and self._redactor is not None:
            part = self._redactor.record(part)
        if part is None:
            self.left_out += 1
            return
        if record.stream in ("REQUESTS", "DONE"):
            self.requests.add(record.headers.get("Nats-Msg-Id", "")[:36])
            self.media.update(dict.fromkeys(each.digest for each in media_of(record)))
        self.write(part)

    def write(self, record: LogLine) -> None:
        self._lines.append(encode_line(record))
        self.messages += 1
        if len(self._lines) == GROUP:
            self.flush()

    def flush(self) -> None:
        self._file.write(b"".join(self._lines))
        self._lines.clear()


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Pause garbage collection: nothing here makes cycles, and a collection would visit everything that was read."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def copy_messages(
    log: Log, stream: str, until_seq: int, chosen: Selection, add: Callable[[LogLine], None]
) -> None:
    """Pass the messages of a stream that may be about selected requests to ``add``.

    Raises:
        ServingError: the stream cannot be read.
    """
    since, until = span(chosen)
    if stream == "KV":
        since = 0  # routers know what workers held from its beginning on
    before = format_time(until) if until else ""
    subjects = log.bus.subjects
    name, subject = subjects.stream(stream), f"{subjects.namespace}.>"
    if log.url and not log.bus.clustered:
        with contextlib.suppress(NeedsTls):
            await asyncio.to_thread(_copy_bulk, log.url, stream, name, subject, since, until_seq, before, add)
            return
    async for entry in read(log.bus, name, subject, since_ns=since, until_seq=until_seq):
        record = of_entry_as_record(stream, entry)
        if before and record.time > before:
            return
        add(record)


def _copy_bulk(
    url: str,
    stream: str,
    name: str,
    subject: str,
    since: int,
    until_seq: int,
    before: str,
    add: Callable[[LogLine], None],
) -> None:
    for stored in read_bulk(url, name, subject, since_ns=since, until_seq=until_seq):
        if before and stored.time > before:
            return
        add(LogLine(stream, stored.seq, stored.time, stored.subject, stored.headers, stored.data))


def of_entry_as_record(stream: str, entry: Entry) -> LogLine:
    headers = {
        name: value
        for name, value in entry.headers.items()
        if name in _KEPT_HEADERS or not name.startswith(_SERVERS_HEADERS)
    }
    return LogLine(stream, entry.seq, entry.headers["Nats-Time-Stamp"], entry.subject, headers, entry.data)


def span(chosen: Selection) -> tuple[int, int]:
    """When the messages of the selected requests were stored, at the earliest and at the latest; 0: open."""
    first = min(map(time_of, chosen.ids), default=0) or chosen.since_ns
    last = max(map(time_of, chosen.ids), default=0) or chosen.until_ns
    longest = int(LONGEST_DEADLINE_S * NS) + CLOCK_SKEW_NS
    return max(0, first - CLOCK_SKEW_NS), last + longest if last else 0


async def _header(bus: Bus, args: argparse.Namespace, *, redacted: bool) -> FileHeader:
    asked = [
        *args.ids,
        *(
            f"--{name.replace('_', '-')} {value}"
            for name in ("since", "until", "from_seq")
            if (value := getattr(args, name))
        ),
    ]
    return FileHeader(
        FORMAT,
        VERSION,
        _version(),
        format_time(time.time_ns()),
        bus.subjects.namespace,
        " ".join(asked) or "--all",
        redacted,
        tuple(await models(bus)),
        {stream: limits for stream in STREAMS if (limits := await limits_of(bus, stream)) is not None},
    )


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"


async def limits_of(bus: Bus, stream: str) -> StreamLimits | None:
    with contextlib.suppress(Exception):  # nats-py: many kinds; a deployment of an earlier build lacks some streams
        info = await bus.js.stream_info(bus.subjects.stream(stream))
        state, config = info.state, info.config
        return StreamLimits(
            state.first_seq, state.last_seq, state.messages, config.max_age or 0.0, config.max_bytes or -1
        )
    return None


async def models(bus: Bus) -> list[ModelInfo]:
    """The models of the last requests, with what their workers have registered."""
    by_name: dict[str, ModelInfo] = {}
    count = 0
    async for entry in read_backwards(bus, bus.subjects.stream("DONE"), bus.subjects.all("done")):
        ended = of_entry(entry)
        if ended is not None and ended.request is not None and ended.request.model not in by_name:
            by_name[ended.request.model] = _model(ended.request)
        count += 1
        if count >= SAMPLED:
            break
    for worker in await workers(bus):
        model = by_name.get(worker.model, ModelInfo(worker.model))
        by_name[worker.model] = msgspec.structs.replace(
            model,
            revision=model.revision or worker.revision,
            tokenizer=model.tokenizer or worker.tokenizer,
            block_size=model.block_size or worker.block_size,
            engine=worker.engine,
            workers=model.workers + 1,
        )
    return list(by_name.values())


def _model(request: GenerateRequest) -> ModelInfo:
    return ModelInfo(request.model, request.revision, request.tokenizer, request.block_size)


async def workers(bus: Bus) -> list[fleet.Registration]:
    """The workers that are registered now; none if the deployment is stopped."""
    by_id: dict[str, Any] = {}
    stream = f"KV_{bus.subjects.bucket('workers')}"
    try:
        if await get_last(bus, stream, f"$KV.{bus.subjects.bucket('workers')}.>") is None:
            return []
        async for entry in read(bus, stream, f"$KV.{bus.subjects.bucket('workers')}.>"):
            by_id[entry.subject] = fleet.decode(entry.data) if entry.data else None
    except (ServingError, msgspec.MsgspecError):
        return []
    return [each for each in by_id.values() if each is not None]
