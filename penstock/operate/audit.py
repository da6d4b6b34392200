"""``penstock audit``: who changed what, and who read what of others."""

import argparse
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from rich.console import Console

from penstock.cli.figures import clock, moment_ns
from penstock.cli.terminal import escape, print_hanging, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import Readable, read
from penstock.infra.nats_server.datadir import users_of
from penstock.infra.nats_server.permissions import role_of
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.schemas.audit import AuditEntry, decode
from penstock.schemas.keys import PREFIX

log = structlog.get_logger("audit")

TOGETHER_NS = 30_000_000_000  # the longest time between an entry and what the broker reports about it


class AuditLine(NamedTuple):
    """An entry and its user. The user "*" stands for everyone who may write to that bucket.

    ``cell``: whose log has it; None: the deployment has only one.
    """

    at_ns: int
    user: str
    entry: AuditEntry
    seen_by: str = ""  # the router that heard of it from the broker; "": the user wrote it
    cell: int | None = None


def run(argv: Sequence[str]) -> int:
    """Print the audit log; the exit status."""
    parser = Parser(
        prog="penstock audit",
        description="show who changed keys, tenants, streams and workers, deleted requests, or read those of other "
        "tenants, newest last. A broker user can write entries under its own name only. An asterisk marks entries "
        "that the broker itself reported.",
    )
    parser.add_argument("--since", default="7d", metavar="TIME", help="15m, 2h, 7d ago, or a date (default: 7d)")
    parser.add_argument(
        "--user",
        default="",
        metavar="NAME",
        help="only entries of this user of the broker, of both users of this role, or of this API key",
    )
    parser.add_argument(
        "--all", action="store_true", help="also show the broker's reports of actions that their users recorded"
    )
    parser.add_argument(
        "--nkeys",
        default="",
        metavar="FOLDER",
        help="public keys of users who log in by nkeys (USER.pub, of `penstock nats --print-config`), which are "
        "then shown as users",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("audit", lambda: _run(args, stdout()))


async def _run(args: argparse.Namespace, console: Console) -> None:
    since_ns = moment_ns(args.since, time.time_ns())
    users = users_of(Path(args.nkeys)) if args.nkeys else {}
    shown: list[AuditLine] = []
    async with open_cells(LogSource.of(args), name="audit", role="viewer", streams=("AUDIT",), files=True) as logs:
        for opened in logs:
            cell = opened.cell if len(logs) > 1 else None
            lines = [line async for line in _lines(opened.reader, since_ns, users, cell)]
            shown += lines if args.all else unexplained(lines)
    for line in sorted(shown, key=lambda line: line.at_ns):
        if args.user and args.user not in (line.user, role_of(line.user), line.entry.key):
            continue
        if args.json:
            write_json(console, _fields(line))
        else:
            _print(line, console)


async def _lines(
    reader: Readable, since_ns: int, users: Mapping[str, str], cell: int | None
) -> AsyncGenerator[AuditLine, None]:
    stream, subject = reader.subjects.stream("AUDIT"), reader.subjects.all("audit")
    async for each in read(reader, stream, subject, since_ns=since_ns):
        try:
            entry = decode(each.data)
        except msgspec.MsgspecError as error:
            log.warning("audit_entry_unreadable", seq=each.seq, error=str(error))
            continue
        writer = each.subject.rpartition(".")[2]
        user = entry.user or writer
        yield AuditLine(each.time_ns, users.get(user, user), entry, writer if entry.user else "", cell)


def unexplained(lines: Sequence[AuditLine]) -> list[AuditLine]:
    """Leave out what the broker reported about an action that its user recorded as well."""
    noted = [line for line in lines if not line.seen_by]
    return [line for line in lines if not line.seen_by or not any(_explains(one, line) for one in noted)]


# What the broker reports when a command runs. It sees what a command does, not its name.
_MAKES = {
    "forget": ("stream msg delete", "stream purge"),
    "streams set": ("stream update",),
    "streams apply": ("stream create", "stream update", "stream delete", "consumer create", "consumer durable create"),
    "tenants add": ("stream create", "stream update", "consumer create", "consumer durable create"),
    "tenants remove": ("stream update",),
}


def _explains(noted: AuditLine, seen: AuditLine) -> bool:
    if abs(noted.at_ns - seen.at_ns) > TOGETHER_NS:
        return False
    if seen.entry.action == "stored":
        bucket, _, name = seen.entry.what.partition(".")
        return noted.entry.action.startswith(f"{bucket} ") and noted.entry.what.removeprefix(PREFIX) == name
    return noted.user == seen.user and seen.entry.detail in _MAKES.get(noted.entry.action, ())


def _fields(line: AuditLine) -> dict[str, object]:
    cell = {} if line.cell is None else {"cell": line.cell}
    return {"at_ns": line.at_ns, "user": line.user, "seen_by": line.seen_by, **cell} | {
        name: value for name, value in msgspec.structs.asdict(line.entry).items() if name != "user"
    }


def _print(line: AuditLine, console: Console) -> None:
    entry = line.entry
    who = f"{line.user}{'*' if line.seen_by and line.user != '*' else ''}" + (f" {entry.key}" if entry.key else "")
    action, what, detail = described(entry)
    parts: Iterable[str] = (
        what,
        detail,
        f"{entry.count} times" if entry.count > 1 else "",
        f"by {entry.by}" if entry.by else "",
        "" if line.cell is None else f"in cell {line.cell}",
        f"({entry.connection})" if entry.connection else "",
        f"failed: {entry.error}" if entry.error else "",
    )
    head = f"{clock(line.at_ns, time.time_ns())}  {escape(who)}  [bold]{escape(action)}[/]  "
    print_hanging(console, head, escape("  ".join(part for part in parts if part)))


def described(entry: AuditEntry) -> tuple[str, str, str]:
    """Action, object and detail in the terms of the other commands. The broker's reports have their own terms."""
    if entry.action == "stored":  # something in a bucket, by no command of ours
        bucket, _, name = entry.what.partition(".")
        key = bucket == "keys"
        verb = "deleted" if entry.detail.endswith(", deleted") else "stored"
        return f"{'key' if key else 'tenant'} {verb}", f"{PREFIX if key else ''}{name}", ""
    if entry.action != "api":
        return entry.action, entry.what, entry.detail
    stream, _, rest = entry.what.partition(".")
    if rest and entry.detail.startswith("consumer"):
        consumer, _, subject = rest.partition(".")
        return entry.detail, _stream(stream), f"{consumer}{f' reads {subject}' if subject else ''}"
    return entry.detail or entry.action, _stream(stream), rest


def _stream(name: str) -> str:
    """The name of a stream. For the stream of a bucket, the bucket's kind and name."""
    for prefix, kind in (("KV_", "bucket"), ("OBJ_", "files")):
        if name.startswith(prefix):
            return f"{kind} {name.removeprefix(prefix)}"
    return name
