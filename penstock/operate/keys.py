"""``penstock keys``: API keys of the HTTP API: who may use it, as which tenant, and how much."""

import argparse
import datetime
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from rich.console import Console

from penstock.cli.figures import duration_ns
from penstock.cli.terminal import Column, escape, fitting_table, stdout, write_json
from penstock.configs.flags import Parser, add_broker_flags, or_none, whole_number
from penstock.infra.bus.audit import person
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import registrations
from penstock.log_tools.sources.open_log import LogSource, open_log, run_command
from penstock.operate import key_store
from penstock.operate.key_store import copy_into, line_of, read_keys
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import Registration
from penstock.schemas.keys import MOST_CONCURRENT, MOST_PER_MINUTE, MOST_PER_MONTH, ApiKey, check_id, digest_of, new_key
from penstock.schemas.requests import Priority
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import check_name

VERBS = {
    "create": "make a key and print it, once; as soon as there is a key, every request needs one",
    "list": "list the keys that are valid",
    "show": "show everything about a key except its secret, which is not stored",
    "set": "change limits of a key on every gateway; the others stay",
    "revoke": "end a key for good, on every gateway; running requests finish",
    "export": "write all keys without their secrets, one JSON object per line, for `penstock keys import`",
    "import": "read the output of `penstock keys export` from standard input: add new keys, update older ones, and "
    "revoke revoked ones; may be repeated",
}
_OPERATOR = "may list and read the requests and answers of all tenants"
MAX_ABOUT = 200  # characters
NEVER = "never"


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
    for verb, about in VERBS.items():
        one = verbs.add_parser(verb, help=about, description=about)
        if verb in ("show", "set", "revoke"):
            one.add_argument("key", metavar="PREFIX", help="as `penstock keys list` shows it: pst-0a1b2c3d4e5f")
        if verb in ("create", "set"):
            _limit_flags(one, new=verb == "create")
        if verb == "create":
            one.add_argument("--quiet", "-q", action="store_true", help="print the key alone")
        if verb == "list":
            one.add_argument("--all", "-a", action="store_true", help="revoked and expired ones, too")
            one.add_argument("--json", action="store_true", help="one JSON object per line")
        add_broker_flags(
            one, folder="data folder of `penstock up`", broker="broker instead, with credentials of the role keys"
        )
    return parser


def _limit_flags(parser: argparse.ArgumentParser, *, new: bool) -> None:
    """Those of ``create``, or of ``set``, where a flag that is not named is None."""
    add, empty = parser.add_argument, "" if new else None
    if new:
        add("--tenant", default=DEFAULT_TENANT, metavar="NAME", help="whose key it is; default: %(default)s")
        add("--operator", action="store_true", help=_OPERATOR)
    else:
        add("--tenant", help=argparse.SUPPRESS)  # refused with the way to do it
        add("--operator", action=argparse.BooleanOptionalAction, help=f"whether it {_OPERATOR}")
    all_models = "default: all, of its tenant" if new else "all: those of its tenant"
    add("--models", default=empty, metavar="A,B", help=f"models it may name; {all_models}")
    for flag, most, about in (
        ("--rpm", MOST_PER_MINUTE, "requests per minute"),
        ("--tpm", MOST_PER_MINUTE, "tokens per minute, prompts and answers"),
        ("--monthly-tokens", MOST_PER_MONTH, "tokens of a month (UTC), prompts and answers"),
        ("--max-concurrent", MOST_CONCURRENT, "requests at a time"),
    ):
        number = whole_number(most) if new else or_none(whole_number(most))
        unlimited = "default" if new else key_store.NONE
        add(flag, type=number, default=0 if new else None, metavar="N", help=f"{about}; {unlimited}: no limit")
    classes = [each.value for each in Priority]
    add(
        "--priority",
        choices=classes if new else [*classes, key_store.NONE],
        help="class of requests without one, and the highest class allowed; "
        f"{'default' if new else key_store.NONE}: standard, and any",
    )
    never = "default: never" if new else NEVER
    add("--expires", default=empty, metavar="WHEN", help=f"12h, 90d, or 2027-01-31; {never}")
    add("--about", default=empty, metavar="TEXT", help="what it is for, shown in lists")


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


@asynccontextmanager
async def _broker(args: argparse.Namespace) -> AsyncIterator[Bus]:
    """
    Raises:
        ValueError: the deployment is stopped.
    """
    source = LogSource.of(argparse.Namespace(**vars(args), file="", skip_bad=False))
    async with open_log(source, name="keys", role="keys", streams=()) as log:
        if log.stopped:
            raise ValueError("the deployment is stopped: start it first")
        yield log.bus


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
    async with _broker(args) as bus:
        await key_store.check_tenant(bus, key.tenant)
        first = not await key_store.all_keys(bus)
        await key_store.add(bus, key)
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
    async with _broker(args) as bus:
        before, after = await key_store.change(bus, key_id, **fields)
    changes = key_store.changes(before, after, now_ns)
    console.print(f"{after.prefix}: {escape(changes) or 'as it was'}", highlight=False, soft_wrap=True)
    if args.models is not None:
        await _warn_of(args, after.models)


async def _warn_of(args: argparse.Namespace, models: Sequence[str]) -> None:
    """Say which models of a key no worker serves; they may come later."""
    if not models:
        return
    try:
        async with _broker(args) as bus:
            warning = unserved(await registrations(bus), models)
    except ServingError:  # the broker has just gone: the key is made
        return
    if warning:
        print(f"warning: {warning}", file=sys.stderr)


def _check_about(text: str | None) -> None:
    if len(text or "") > MAX_ABOUT:
        raise ValueError(f"--about has {len(text or '')} characters; the limit is {MAX_ABOUT}")


def _unreadable(key_id: str) -> None:
    text = f"the entry of pst-{key_id} cannot be read: no gateway admits anyone with it, nor anyone without a key"
    print(text, file=sys.stderr)


async def _keys(args: argparse.Namespace, *, whole: bool = False) -> list[ApiKey]:
    async with _broker(args) as bus:
        return await key_store.all_keys(bus, _unreadable, whole=whole)


# In narrow terminals, those with high numbers are left out.
_COLUMNS = (
    *(Column("key"), Column("tenant"), Column("models", 1), Column("rpm", 4, right=True), Column("tpm", 4, right=True)),
    *(Column("monthly", 5, right=True), Column("at a time", 6, right=True), Column("priority", 2), Column("expires")),
    *(Column("state"), Column("about", 7)),
)


async def _list(args: argparse.Namespace, console: Console) -> None:
    now_ns = time.time_ns()
    keys = [key for key in await _keys(args) if args.all or key_store.state(key, now_ns) == "valid"]
    if args.json:
        for key in keys:
            write_json(console, key_store.public(key, now_ns))
        return
    if not keys:
        console.print("there are no keys" if args.all else "there are no valid keys; --all also shows others")
        return
    rows = [
        (
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
        for key in keys
    ]
    console.print(fitting_table(_COLUMNS, rows, console.width))


async def _show(args: argparse.Namespace, console: Console) -> None:
    key_id, now_ns = check_id(args.key), time.time_ns()
    async with _broker(args) as bus:
        key, _ = await key_store.find(bus, key_id)
    for name, value in key_store.public(key, now_ns).items():
        shown = "–" if value is None else ("no", "yes")[value] if isinstance(value, bool) else value
        console.print(f"{name:<20} {escape(str(shown))}", highlight=False, soft_wrap=True)


async def _revoke(args: argparse.Namespace, console: Console) -> None:
    key_id = check_id(args.key)
    async with _broker(args) as bus:
        key, was_valid = await key_store.revoke(bus, key_id)
    when = "revoked" if was_valid else f"was revoked already, {key_store.day(key.revoked_ns)}"
    console.print(f"{key.prefix} of tenant {key.tenant}: {when}", highlight=False)


async def _export(args: argparse.Namespace) -> None:
    sys.stdout.writelines(map(line_of, await _keys(args, whole=True)))


async def _import(args: argparse.Namespace) -> None:
    keys = read_keys(sys.stdin)
    async with _broker(args) as bus:
        copied = await copy_into(bus, keys)
    parts = (f"{copied.added} keys added", f"{copied.changed} changed", f"{copied.revoked} revoked")
    print(f"{', '.join(parts)}, {copied.unchanged} as they were")


def unserved(registered: Iterable[Registration], models: Iterable[str]) -> str:
    """A warning about those of ``models`` that no worker serves, which names what is served; "": all are."""
    served = {name for each in registered for name in (each.model, *each.aliases)}
    unknown = [name for name in models if name not in served]
    if not unknown:
        return ""
    there = f"served are {', '.join(sorted(served))}" if served else "no worker is there"
    return f"no worker serves {', '.join(map(repr, unknown))} now ({there}): requests for it get 404 until one does"
