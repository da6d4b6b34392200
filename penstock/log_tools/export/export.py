"""``penstock export``: recorded requests as a file: every message about them, one line of JSON each."""

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from penstock.cli.figures import counted, moment_ns, parse_size, show_size
from penstock.configs.flags import Parser
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, Readable, format_time, get, get_last, read, read_backwards
from penstock.log_tools.export.recording import Exported, export_media, media_of
from penstock.log_tools.export.redaction import VOCABULARY, Redactor
from penstock.log_tools.requests.find_requests import of_entry
from penstock.log_tools.sources import log_line
from penstock.log_tools.sources.data_folder import MEDIA, StoredLog
from penstock.log_tools.sources.export_file import STDIO, WrittenRequests, writing
from penstock.log_tools.sources.log_line import LogLine, Selection
from penstock.log_tools.sources.open_log import (
    CellSource,
    Log,
    LogSource,
    add_flags,
    add_verify_flag,
    cells_of,
    open_log,
    run_command,
)
from penstock.log_tools.sources.store_files import message, parse_headers
from penstock.log_tools.timeline.read import stored_at, whole_ids
from penstock.schemas import fleet, jobs
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, cell_in, request_of_answer, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S

SAMPLED = 200  # records from which the models are known
WRITTEN_BYTES = 256 << 10  # together
BATCH = 1_000
FEW = 50  # requests, of which each one's place in the log is looked up
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


class Places(NamedTuple):
    """Where the log has the selected requests.

    Attributes:
        spans: when their messages were stored: times that ascend and do not overlap (Unix, ns). A 0 is an open end.
        requests: themselves, if they were looked up: of a few, each has its own time.
    """

    spans: list[tuple[int, int]]
    requests: list[GenerateRequest] | None = None


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
        help="most bytes of the requests' images together; 0: none (default: %(default)s)",
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
    add_verify_flag(parser)
    args = parser.parse_args(argv)
    return run_command("export", lambda: _run(args))


def add_selection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select requests, for ``export`` and ``replay``."""
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="requests: the X-Request-Id header or id of each answer, or its beginning"
    )
    parser.add_argument("--since", default="", help="accepted since: 15m, 2h, 7d ago, or 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="accepted before; written like --since")
    parser.add_argument("--from-seq", type=int, default=0, metavar="N", help="from this sequence of REQUESTS")


def parts_of(args: argparse.Namespace, source: LogSource) -> list[tuple[CellSource, argparse.Namespace]]:
    """The cells of which the flags select requests, each with the flags for it alone: with the ids that are its own.

    Raises:
        ValueError: --from-seq counts the requests of one cell, and there are several.
    """
    cells = cells_of(source)
    if len(cells) == 1:
        return [(cells[0], args)]
    if args.from_seq:
        raise ValueError("--from-seq counts the requests of one cell: choose it with --namespace")
    if not args.ids:
        return [(cell, args) for cell in cells]
    numbers = {cell.number for cell in cells}
    parts = []
    for cell in cells:
        ids = [
            each
            for each in args.ids
            if (number := cell_in(request_of_answer(each))) == cell.number
            or (cell is cells[0] and number not in numbers)  # of the time before it had cells
        ]
        if ids:
            parts.append((cell, argparse.Namespace(**{**vars(args), "ids": ids})))
    return parts


async def selection(args: argparse.Namespace, bus: Readable, *, everything: bool) -> log_line.Selection:
    """The selection by the flags of ``add_selection_flags``.

    Raises:
        ValueError: they select nothing, or contradict each other.
        ServingError: the log cannot be read.
    """
    ids = frozenset(map(request_of_answer, args.ids))
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
    return log_line.Selection(ids, since, until)


async def _run(args: argparse.Namespace) -> None:
    args.ids = await whole_ids(LogSource.of(args), args.ids)
    parts = parts_of(args, LogSource.of(args))
    if len(parts) > 1 and args.output == STDIO:
        raise ValueError(
            f"each of {len(parts)} cells has a log of its own: give --output, and each gets a file, or choose one cell "
            "with --namespace"
        )
    nothing: list[Exception] = []
    for cell, part in parts:
        try:
            if len(parts) == 1:
                await _export(part, cell.source, args.output)
            else:
                print(f"cell {cell.number} → {(output := output_of(args.output, cell.number))}", file=sys.stderr)
                await _export(part, cell.source, output)
        except NothingChosen as error:
            nothing.append(error)
            if len(parts) > 1:
                print(f"cell {cell.number}: {error}", file=sys.stderr)
    if len(nothing) == len(parts):
        raise nothing[0]


def output_of(name: str, cell: int) -> str:
    """The file of one cell: ``incident.cell-1.jsonl.gz``."""
    path = Path(name)
    stem = path.name.removesuffix("".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]))
    return str(path.with_name(f"{stem}.cell-{cell}{path.name.removeprefix(stem)}"))


class NothingChosen(ValueError):
    """The log has none of the requests."""


async def _export(args: argparse.Namespace, source: LogSource, output: str) -> None:
    media_bytes = parse_size(args.media_bytes) if not args.redact else 0
    async with open_log(source, name="export", streams=log_line.STREAMS, role="reader", files=True) as log:
        chosen = await selection(args, log.reader, everything=args.all)
        chosen = chosen._replace(kv=not chosen.ids if args.kv is None else args.kv)
        redactor = Redactor(args.vocabulary) if args.redact else None
        places = await places_of(log.reader, chosen)
        header = await _header(log.reader, args, places.requests, redacted=args.redact)
        with writing(output) as file:
            exported = await _export_messages(log, chosen, places, header, file, redactor)
            written = await _with_media(exported, log, source, file, media_bytes)
            if not written.requests and not chosen.everything:  # no file is written
                raise NothingChosen(
                    "the log has none of these requests" if chosen.ids else "no request was accepted in this time"
                )
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


async def export(log: Log, chosen: log_line.Selection, header: log_line.FileHeader, file: BinaryIO) -> Counted:
    """Write the header and the selected messages, stream by stream, each in its own order.

    Raises:
        ServingError: the log cannot be read.
    """
    places = await places_of(log.reader, chosen)
    return (await _export_messages(log, chosen, places, header, file, None)).counted


class LineWriter:
    """Writes the selected messages to a file.

    Attributes:
        requests: ids of those written.
        left_out: messages that cannot be redacted.
        media: digests, in the order of the requests.
    """

    def __init__(self, chosen: log_line.Selection, file: BinaryIO, redactor: Redactor | None) -> None:
        self._chosen = chosen
        self._everything = chosen.everything
        self._file = file
        self._redactor = redactor
        self._lines = bytearray()
        self._written = WrittenRequests()
        self.requests: set[str] = set()
        self.messages = 0
        self.left_out = 0
        self.media: dict[bytes, None] = {}
        self._split: dict[str, bool] = {}  # of a few requests, by those with a job: whether one has several stages

    @property
    def handed_off(self) -> bool:
        """Whether there may be ledger lines about the requests, once their jobs are written."""
        few = 0 < len(self._chosen.ids) <= FEW
        return not few or any(self._split.values()) or not self._chosen.ids <= self._split.keys()

    def add(self, record: log_line.LogLine) -> None:
        part: log_line.LogLine | None = record
        if not self._everything:
            part = self._chosen.part(record)
            if part is None:
                return
        if part is not None and self._redactor is not None:
            part = self._redactor.record(part)
        if part is None:
            self.left_out += 1
            return
        if record.stream == "WORK" and 0 < len(self._chosen.ids) <= FEW:
            name, message = log_line.request_id_of(record), jobs.decode(record.data)
            several = not isinstance(message, jobs.Revoke) and not (
                isinstance(message, jobs.Job) and len(message.decision.route) < 2
            )
            self._split[name] = self._split.get(name, False) or several
        if record.stream in ("REQUESTS", "DONE"):
            request = record.headers.get("Nats-Msg-Id", "")[:36]
            self.requests.add(request)
            if record.stream == "REQUESTS":
                self._written.add(request, record.seq, part.data)
            for each in media_of(record):
                self.media[each.digest] = None
        log_line.append_line(part, self._lines, self._written.sequence_of)
        self.messages += 1
        if len(self._lines) >= WRITTEN_BYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(self._lines)
        self._lines.clear()


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Pause garbage collection: nothing here makes cycles, and a collection would visit everything that was read."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Exported(NamedTuple):
    """``media``: digests of the requests' images, which are still to be written."""

    counted: Counted
    media: dict[bytes, None]


async def _export_messages(
    log: Log,
    chosen: log_line.Selection,
    places: Places,
    header: log_line.FileHeader,
    file: BinaryIO,
    redactor: Redactor | None,
) -> _Exported:
    began = time.perf_counter()
    file.write(log_line.header_line(header))
    writer = LineWriter(chosen, file, redactor)
    with without_gc():
        for stream, limits in header.streams.items():
            if limits.messages and (stream != "KV" or chosen.kv) and (stream != "HANDOFF" or writer.handed_off):
                await copy_messages(log, stream, limits.last_seq, places.spans, writer.add)
    writer.flush()
    seconds = time.perf_counter() - began
    return _Exported(Counted(len(writer.requests), writer.messages, seconds, writer.left_out), writer.media)


async def _with_media(exported: _Exported, log: Log, source: LogSource, file: BinaryIO, limit: int) -> Counted:
    """Write the requests' images after their messages."""
    counted, digests = exported
    if not digests:
        return counted
    if not limit:
        return counted._replace(media=Exported(0, 0, 0, len(digests)))

    def write(record: log_line.LogLine) -> None:
        file.write(log_line.encode_line(record))

    if log.files is None:
        media = await export_media(log.bus, digests, limit, write)
    else:  # only a broker knows which object an entry stands for
        async with open_log(source, name="export", streams=(MEDIA,), role="reader") as served:
            media = await export_media(served.bus, digests, limit, write)
    return counted._replace(media=media)


async def _header(
    bus: Readable, args: argparse.Namespace, requests: Sequence[GenerateRequest] | None, *, redacted: bool
) -> log_line.FileHeader:
    selected = [
        *args.ids,
        *(
            f"--{name.replace('_', '-')} {value}"
            for name in ("since", "until", "from_seq")
            if (value := getattr(args, name))
        ),
    ]
    return log_line.FileHeader(
        log_line.FORMAT,
        log_line.VERSION,
        _version(),
        format_time(time.time_ns()),
        bus.subjects.namespace,
        " ".join(selected) or "--all",
        redacted,
        tuple(await models(bus, requests)),
        {stream: limits for stream in log_line.STREAMS if (limits := await limits_of(bus, stream)) is not None},
    )


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"


async def limits_of(bus: Readable, stream: str) -> log_line.StreamLimits | None:
    if not isinstance(bus, Bus):
        kept = bus.state(bus.subjects.stream(stream))
        limits = log_line.StreamLimits(kept.first_seq, kept.last_seq, kept.messages, kept.max_age_s, kept.max_bytes)
        return limits if kept.created else None
    with contextlib.suppress(Exception):  # nats-py: many kinds; a stream may be missing
        info = await bus.js.stream_info(bus.subjects.stream(stream))
        state, config = info.state, info.config
        return log_line.StreamLimits(
            state.first_seq, state.last_seq, state.messages, config.max_age or 0.0, config.max_bytes or -1
        )
    return None


async def models(bus: Readable, requests: Sequence[GenerateRequest] | None) -> list[log_line.RecordedModel]:
    """The models of these requests (None: of the last ones), with what their workers have registered."""
    requests = requests if requests is not None else await _last_requests(bus)
    by_name = {request.model: _model(request) for request in reversed(requests)}
    for worker in await workers(bus):
        known = by_name.get(worker.model, log_line.RecordedModel(worker.model))
        by_name[worker.model] = msgspec.structs.replace(
            known,
            revision=known.revision or worker.revision,
            tokenizer=known.tokenizer or worker.tokenizer,
            block_size=known.block_size or worker.block_size,
            engine=worker.engine,
            workers=known.workers + 1,
        )
    return list(by_name.values())


async def _last_requests(bus: Readable) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    count = 0
    async for entry in read_backwards(bus, bus.subjects.stream("DONE"), bus.subjects.all("done")):
        ended = of_entry(entry)
        requests += [ended.request] if ended is not None and ended.request is not None else []
        count += 1
        if count == SAMPLED:
            break
    return requests


def _model(request: GenerateRequest) -> log_line.RecordedModel:
    return log_line.RecordedModel(request.model, request.revision, request.tokenizer, request.block_size)


async def workers(bus: Readable) -> list[fleet.Registration]:
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


async def copy_messages(
    log: Log, stream: str, until_seq: int, spans: Sequence[tuple[int, int]], add: Callable[[LogLine], None]
) -> None:
    """Pass the messages of a stream that were stored in these times (see ``Places``) to ``add``.

    Raises:
        ServingError: the stream cannot be read.
    """
    name = log.reader.subjects.stream(stream)
    for since, until in spans if stream != "KV" else [(0, spans[-1][1])]:  # routers know KV from its beginning on
        if log.files is not None:
            for record in records_of(log.files, stream, since_ns=since, until_seq=until_seq, until_ns=until):
                add(record)
            continue
        before = format_time(until) if until else ""
        stored = read(log.bus, name, ">", since_ns=since, until_seq=until_seq, batch=BATCH)
        async with contextlib.aclosing(stored) as entries:
            async for entry in entries:
                record = of_entry_as_record(stream, entry)
                if before and record.time > before:
                    break
                add(record)


async def places_of(reader: Readable, chosen: Selection) -> Places:
    """
    Raises:
        ServingError: a stream cannot be read.
    """
    if not 0 < len(chosen.ids) <= FEW:
        return Places([span(chosen)])
    spans: list[tuple[int, int]] = []
    found = [await stored_at(reader, each) for each in chosen.ids]
    for since, until in sorted((each.since_ns, each.until_ns) for each in found):
        if spans and since <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], until)
        else:
            spans.append((since, until))
    return Places(spans, [each.request for each in found if each.request is not None])


def records_of(
    log: StoredLog, stream: str, *, since_ns: int = 0, until_seq: int = 0, until_ns: int = 0
) -> Iterator[LogLine]:
    """The messages of a stopped deployment's stream (without the namespace), between two times and up to a sequence."""
    stored = log.stream(log.subjects.stream(stream))
    for data, places in stored.by_block(since_ns=since_ns, until_ns=until_ns) if stored is not None else ():
        for seq, time_ns, at in places:
            if (until_seq and seq > until_seq) or (until_ns and time_ns > until_ns):
                return
            yield record_of(stream, data, seq, time_ns, at)


def record_of(stream: str, block: bytes, seq: int, time_ns: int, at: int) -> LogLine:
    """The message at a place of a block."""
    stored = message(block, at)
    headers = parse_headers(stored.headers) if stored.headers else {}
    return LogLine(stream, seq, format_time(time_ns), stored.subject, headers, stored.data)


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
