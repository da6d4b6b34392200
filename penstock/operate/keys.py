"""``penstock keys``: API keys of the HTTP API: who may use it, as which tenant, and how much."""

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.figures import duration_ns
from penstock.cli.terminal import escape, stdout
from penstock.configs.flags import Parser, add_broker_flags, or_none, whole_number
from penstock.infra.bus.audit import person
from penstock.infra.bus.connection import Bus
from penstock.log_tools.sources.open_log import LogSource, open_log, run_command
from penstock.operate import key_store
from penstock.operate.key_store import copy_into, line_of, read_keys
from penstock.operate.workers import registrations, unserved
from penstock.schemas.errors import ServingError
from penstock.schemas.keys import MOST_CONCURRENT, MOST_PER_MINUTE, MOST_PER_MONTH, ApiKey, check_id, digest_of, new_key
from penstock.schemas.requests import Priority
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import check_name

VERBS = ("create", "list", "show", "set", "revoke", "export", "import")
USAGE = f"usage: penstock keys {{{','.join(VERBS)}}} [FLAGS]"
MAX_ABOUT = 200  # characters
NEVER = "never"

_per_minute = whole_number(MOST_PER_MINUTE)
_per_month = whole_number(MOST_PER_MONTH)
_concurrent = whole_number(MOST_CONCURRENT)


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    console = stdout()
    work = {
        "create": lambda: _create(args, console),
        "list": lambda: _list(args, console),
        "show": lambda: _show(args, console),
        "set": lambda: _set(args, console),
        "revoke": lambda: _revoke(args, console),
        "export": lambda: _export(args),
        "import": lambda: _import(args),
    }
    return run_command(f"keys {args.verb}", work[args.verb])


def _parser() -> Parser:
    parser = Parser(prog="penstock keys", description="manage the API keys of the HTTP API")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(VERBS)}}}")
    about_create = "make a key and print it, once; as soon as there is a key, every request needs one"
    create = verbs.add_parser("create", help=about_create, description=about_create)
    _create_flags(create)
    about_set = "change limits of a key, at once on every gateway; the others stay"
    change = verbs.add_parser("set", help=about_set, description=about_set)
    change.add_argument("key", metavar="PREFIX", help="as `penstock keys list` shows it: pst-0a1b2c3d4e5f")
    _set_flags(change)
    about_list = "list the keys that are valid"
    shown = verbs.add_parser("list", help=about_list, description=about_list)
    shown.add_argument("--all", "-a", action="store_true", help="revoked and expired ones, too")
    shown.add_argument("--json", action="store_true", help="one JSON object per line")
    for verb, about in (
        ("show", "show everything about a key except its secret, which is not stored"),
        ("revoke", "end a key for good, at once on every gateway; running requests finish"),
    ):
        one = verbs.add_parser(verb, help=about, description=about)
        one.add_argument("key", metavar="PREFIX", help="as `penstock keys list` shows it: pst-0a1b2c3d4e5f")
    about_export = "write all keys without their secrets, one JSON object per line, for `penstock keys import`"
    verbs.add_parser("export", help=about_export, description=about_export)
    about_import = (
        "read the output of `penstock keys export` from standard input: add new keys, update older ones, and revoke "
        "revoked ones; may be repeated"
    )
    verbs.add_parser("import", help=about_import, description=about_import)
    for one in verbs.choices.values():
        add_broker_flags(
            one, folder="data folder of `penstock up`", broker="broker instead, with credentials of the role keys"
        )
    return parser


def _create_flags(create: argparse.ArgumentParser) -> None:
    create.add_argument(
        "--tenant", default=DEFAULT_TENANT, metavar="NAME", help="whose key it is; default: %(default)s"
    )
    create.add_argument("--models", default="", metavar="A,B", help="models it may name; default: all, of its tenant")
    create.add_argument(
        "--rpm", type=_per_minute, default=0, metavar="N", help="requests per minute; default: no limit"
    )
    create.add_argument(
        "--tpm",
        type=_per_minute,
        default=0,
        metavar="N",
        help="tokens per minute, prompts and answers; default: no limit",
    )
    create.add_argument(
        "--monthly-tokens",
        type=_per_month,
        default=0,
        metavar="N",
        help="tokens of a month (UTC), prompts and answers; default: no limit",
    )
    create.add_argument(
        "--max-concurrent", type=_concurrent, default=0, metavar="N", help="requests at a time; default: no limit"
    )
    create.add_argument(
        "--priority",
        choices=[each.value for each in Priority],
        help="class of requests without one, and the highest class allowed; default: standard, and any",
    )
    create.add_argument("--expires", default="", metavar="WHEN", help="12h, 90d, or 2027-01-31; default: never")
    create.add_argument(
        "--operator", action="store_true", help="may list and read the requests and answers of all tenants"
    )
    create.add_argument("--about", default="", metavar="TEXT", help="what it is for, shown in lists")
    create.add_argument("--quiet", "-q", action="store_true", help="print the key alone")


def _set_flags(change: argparse.ArgumentParser) -> None:
    """As those of ``create``; None: not named."""
    change.add_argument("--tenant", help=argparse.SUPPRESS)  # refused with the way to do it
    change.add_argument("--models", metavar="A,B", help="models it may name; all: those of its tenant")
    change.add_argument("--rpm", type=or_none(_per_minute), metavar="N", help="requests per minute; none: no limit")
    change.add_argument(
        "--tpm", type=or_none(_per_minute), metavar="N", help="tokens per minute, prompts and answers; none: no limit"
    )
    change.add_argument(
        "--monthly-tokens",
        type=or_none(_per_month),
        metavar="N",
        help="tokens of a month (UTC), prompts and answers; none: no limit",
    )
    change.add_argument(
        "--max-concurrent", type=or_none(_concurrent), metavar="N", help="requests at a time; none: no limit"
    )
    change.add_argument(
        "--priority",
        choices=[*(each.value for each in Priority), key_store.NONE],
        help="class of requests that name none, and the highest they may name; none: standard, and any",
    )
    change.add_argument("--expires", metavar="WHEN", help="12h, 90d, or 2027-01-31; never")
    change.add_argument(
        "--operator",
        action=argparse.BooleanOptionalAction,
        help="whether may list and read the requests and answers of all tenants",
    )
    change.add_argument("--about", metavar="TEXT", help="what it is for, shown in lists")


def expires_ns(text: str, now_ns: int) -> int:
    """Unix time in ns of "12h" from now, or of an ISO 8601 date or time; without a zone it is local. "": 0.

    Raises:
        ValueError: neither of the two, or it is past.
    """
    if not text:
        return 0
    with suppress(ValueError):
        return now_ns + duration_ns(text)
    try:
        at_ns = int(datetime.datetime.fromisoformat(text.strip()).timestamp() * 1e9)
    except (ValueError, OverflowError):
        raise ValueError(f"--expires {text!r}: write how long (12h, 90d) or a date (2027-01-31)") from None
    if at_ns <= now_ns:
        raise ValueError(f"--expires {text!r} is past")
    return at_ns


def _source(args: argparse.Namespace) -> LogSource:
    return LogSource.of(argparse.Namespace(**vars(args), file="", skip_bad=False))


async def _create(args: argparse.Namespace, console: Console) -> None:
    now_ns = time.time_ns()
    _check_about(args.about)
    key_id, text = new_key()
    key = ApiKey(
        key_id,
        digest_of(text.encode()),
        tenant=check_name(args.tenant),
        models=_models(args.models),
        requests_per_minute=args.rpm,
        tokens_per_minute=args.tpm,
        tokens_per_month=args.monthly_tokens,
        max_concurrent=args.max_concurrent,
        priority=Priority(args.priority) if args.priority else None,
        created_ns=now_ns,
        expires_ns=expires_ns(args.expires, now_ns),
        operator=args.operator,
        about=args.about,
        created_by=person(),
    )
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        if log.stopped:
            raise ValueError("the deployment is stopped: start it, then make its keys")
        await key_store.check_tenant(log.bus, key.tenant)
        first = not await key_store.all_keys(log.bus)
        await key_store.add(log.bus, key)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()  # whatever follows, it is not shown again
    await _warn_of(args, key.models)
    if args.quiet:
        return
    print(f"This is the only time that it is shown. {key.prefix} names it in lists and logs.", file=sys.stderr)
    if first:
        print("It is the first key: from now on, every request to this deployment needs one.", file=sys.stderr)


def _named(args: argparse.Namespace, now_ns: int) -> dict[str, object]:
    """The fields that flags name."""
    if args.tenant is not None:
        raise ValueError(
            f"the tenant of a key cannot change: `penstock keys create --tenant {args.tenant}` makes another one, and "
            f"`penstock keys revoke {args.key}` ends this one"
        )
    fields: dict[str, object] = {
        "models": None if args.models is None else _models(args.models),
        "requests_per_minute": args.rpm,
        "tokens_per_minute": args.tpm,
        "tokens_per_month": args.monthly_tokens,
        "max_concurrent": args.max_concurrent,
        "operator": args.operator,
        "about": args.about,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if args.priority is not None:
        fields["priority"] = None if args.priority == key_store.NONE else Priority(args.priority)
    if args.expires is not None:
        fields["expires_ns"] = 0 if args.expires == NEVER else expires_ns(args.expires, now_ns)
    if not fields:
        raise ValueError("nothing to change: name a limit, such as --rpm 60; --help lists them")
    _check_about(args.about)
    return fields


def _models(text: str) -> tuple[str, ...]:
    """Names; none of them: all models."""
    return () if text == "all" else tuple(filter(None, text.split(",")))


async def _set(args: argparse.Namespace, console: Console) -> None:
    key_id, now_ns = check_id(args.key), time.time_ns()
    fields = _named(args, now_ns)
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        before, after = await key_store.change(_running(log.stopped, log.bus), key_id, **fields)
    old, new = key_store.public(before, now_ns), key_store.public(after, now_ns)
    changes = [
        f"{name}: {_shown(old[name])} → {_shown(new[name])}"
        for name in new
        if old[name] != new[name] and not name.startswith("changed")
    ]
    console.print(f"{after.prefix}: {escape(', '.join(changes)) or 'as it was'}", highlight=False, soft_wrap=True)
    if args.models is not None:
        await _warn_of(args, after.models)


async def _warn_of(args: argparse.Namespace, models: Sequence[str]) -> None:
    """Say which models of a key no worker serves; they may come later."""
    if not models:
        return
    try:
        async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
            warning = unserved(await registrations(log.bus), models)
    except ServingError:  # the broker has just gone: the key is made
        return
    if warning:
        print(f"warning: {warning}", file=sys.stderr)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return key_store.NONE if value in (None, "") else str(value)


def _check_about(text: str | None) -> None:
    if len(text or "") > MAX_ABOUT:
        raise ValueError(f"--about has {len(text or '')} characters; the limit is {MAX_ABOUT}")


def _unreadable(key_id: str) -> None:
    text = f"the entry of pst-{key_id} cannot be read: no gateway admits anyone with it, nor anyone without a key"
    print(text, file=sys.stderr)


async def _keys(args: argparse.Namespace, *, whole: bool = False) -> list[ApiKey]:
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        return await key_store.all_keys(_running(log.stopped, log.bus), _unreadable, whole=whole)


async def _list(args: argparse.Namespace, console: Console) -> None:
    now_ns = time.time_ns()
    keys = [key for key in await _keys(args) if args.all or key_store.state(key, now_ns) == "valid"]
    if args.json:
        for key in keys:
            console.file.write(msgspec.json.encode(key_store.public(key, now_ns)).decode() + "\n")
        return
    if not keys:
        console.print("no key is valid" if not args.all else "there are no keys")
        return
    table = Table(box=None, pad_edge=False)
    numbers = ("rpm", "tpm", "monthly", "at a time")
    for name in ("key", "tenant", "models", *numbers, "priority", "expires", "state", "about"):
        table.add_column(name, justify="right" if name in numbers else "left")
    for key in keys:
        table.add_row(
            key.prefix,
            key.tenant + (" (operator)" if key.operator else ""),
            escape(",".join(key.models) or "all"),
            *(
                str(limit or "–")
                for limit in (key.requests_per_minute, key.tokens_per_minute, key.tokens_per_month, key.max_concurrent)
            ),
            key.priority.value if key.priority else "–",
            key_store.day(key.expires_ns) or "never",
            key_store.state(key, now_ns),
            escape(key.about),
        )
    console.print(table)


async def _show(args: argparse.Namespace, console: Console) -> None:
    key_id, now_ns = check_id(args.key), time.time_ns()
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        key, _ = await key_store.find(_running(log.stopped, log.bus), key_id)
    for name, value in key_store.public(key, now_ns).items():
        shown = "–" if value is None else ("no", "yes")[value] if isinstance(value, bool) else value
        console.print(f"{name:<20} {escape(str(shown))}", highlight=False, soft_wrap=True)


async def _revoke(args: argparse.Namespace, console: Console) -> None:
    key_id = check_id(args.key)
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        key, was_valid = await key_store.revoke(_running(log.stopped, log.bus), key_id)
    when = "revoked" if was_valid else f"was revoked already, {key_store.day(key.revoked_ns)}"
    console.print(f"{key.prefix} of tenant {key.tenant}: {when}", highlight=False)


async def _export(args: argparse.Namespace) -> None:
    sys.stdout.writelines(map(line_of, await _keys(args, whole=True)))


async def _import(args: argparse.Namespace) -> None:
    keys = read_keys(sys.stdin)
    async with open_log(_source(args), name="keys", role="keys", streams=()) as log:
        copied = await copy_into(_running(log.stopped, log.bus), keys)
    parts = (f"{copied.added} keys added", f"{copied.changed} changed", f"{copied.revoked} revoked")
    print(f"{', '.join(parts)}, {copied.unchanged} as they were")


def _running(stopped: bool, bus: Bus) -> Bus:
    if stopped:
        raise ValueError("the deployment is stopped: start it first")
    return bus
