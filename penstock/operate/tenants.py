"""``penstock tenants``: manages tenants of the NATS API and their limits.

On the broker of a data folder everything is done at once. With ``--nats-url`` or ``PENSTOCK_NATS_URL`` (a broker of
your own) streams, limits and accounts are kept there. ``tenants.conf`` is made of them, for the ``accounts`` block of
the servers' configuration.
"""

import argparse
import asyncio
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from penstock.cli.terminal import fail
from penstock.configs.flags import PREFIX, Parser, add_broker_flags, or_none, whole_number
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import authenticate
from penstock.infra.bus.jetstream import STREAM_NOT_FOUND
from penstock.infra.nats_server import tenants
from penstock.infra.nats_server.apply_streams import apply_submissions
from penstock.infra.nats_server.config import USERS, second_tenant_user, tenant_user
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.nats_server.jetstream_api import BrokerProblem, existing_config, reload, running_pid
from penstock.infra.nats_server.tenants import Accounts, Copies, Tenant, Tenants, client_passwords, user_in_use
from penstock.launch.nats import as_operator, copy_tenants
from penstock.launch.state import read_state
from penstock.log_tools.sources.open_log import LogSource, cells_of, running
from penstock.schemas import wire
from penstock.schemas.audit import KEYS_LOST, decode
from penstock.schemas.keys import MOST_PER_MINUTE, MOST_PER_MONTH
from penstock.schemas.streams import submissions
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects
from penstock.schemas.tenants import LEAST_WEIGHT, MAX_PENDING, MOST_WEIGHT, Limits, check_name

AUDITED = 500  # entries of the audit log that are looked at: the first after its stream was made
_JWTS = (
    "this broker has its users from JWTs (operator mode), so it takes neither tenants.conf nor a tenant's password; "
    "for the NATS API, make each tenant's account and its users with `nsc` (docs/nats.md)"
)


@dataclass(frozen=True, slots=True)
class TenantsPlace:
    """Which deployment. ``own``: the broker is not that of the data folder; ``source``: names its cells."""

    data_dir: Path
    operator_url: str
    subjects: Subjects
    own: bool
    source: LogSource

    @property
    def with_jwts(self) -> bool:
        """Whether the broker has its users from JWTs (operator mode): only such a server takes a credentials file, and
        it takes no accounts or passwords in its configuration."""
        url = self.operator_url.partition(",")[0]
        return self.own and "user_credentials" in authenticate(BusClient(), url, "operator")


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    try:
        place = _place(args)
        # A list writes nothing, not even a lock: it is also for a folder that only its owner may write.
        with contextlib.nullcontext() if args.verb == "list" else tenants.held(place.data_dir):
            name = check_name(args.name) if "name" in args else ""
            if name == DEFAULT_TENANT:
                where = "credentials are" if place.own else "clients use client_nats_url of state.json;"
                raise ValueError(f"{DEFAULT_TENANT!r} always exists: its {where} in the data folder")
            asyncio.run(_do(place, name, args))
    except (BrokerProblem, ValueError, OSError) as error:
        return fail("tenants", error)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock tenants", description="manage tenants of both APIs, their limits and their passwords for NATS"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{add,set,list,rotate,remove,restore,conf}")
    for verb, about in (
        ("add", "add a tenant or change its limits, and write its credentials"),
        ("set", "change limits of a tenant, at once"),
        ("list", "list all tenants but the default one"),
        ("rotate", "give a tenant a new password; the old one ends at once, or with --keep-old later"),
        ("remove", "end the access of a tenant; its submissions stay until they expire"),
        ("restore", "after a broker lost its disk: restore the tenants in the data folder"),
        ("conf", "write tenants.conf again, from the accounts that a broker of your own keeps"),
    ):
        one = verbs.add_parser(verb, help=about, description=about)
        if verb not in ("list", "conf", "restore"):
            one.add_argument("name", metavar="NAME", help="lower-case letters, digits and '-'")
        if verb == "restore":
            one.add_argument("names", nargs="*", metavar="NAME", help="default: all that are listed in the folder")
            about_replace = "also where the broker has the tenant with another password"
            one.add_argument("--replace", action="store_true", help=about_replace)
        if verb in ("add", "set"):
            about_models = "models it may use, '' for all; default: as it was, or all"
            one.add_argument("--models", metavar="A,B", help=about_models)
            one.add_argument(
                "--max-pending",
                type=whole_number(MAX_PENDING),
                metavar="N",
                help=f"submissions that may wait, beyond which it gets errors; default: as it was, or {MAX_PENDING}",
            )
            one.add_argument(
                "--weight",
                type=_weight,
                metavar="X",
                help="share of the work while requests wait, relative to 1; default: as it was, or 1",
            )
            for flag, what in (("--rpm", "requests"), ("--tpm", "tokens, prompts and answers,")):
                one.add_argument(
                    flag,
                    type=or_none(whole_number(MOST_PER_MINUTE)),
                    metavar="N",
                    help=f"{what} per minute, of all its keys and over NATS; none: no limit; default: as it was, or "
                    "none",
                )
            one.add_argument(
                "--monthly-tokens",
                type=or_none(whole_number(MOST_PER_MONTH)),
                metavar="N",
                help="tokens of a month (UTC), prompts and answers, of all its keys and over NATS; none: no limit; "
                "default: as it was, or none",
            )
            one.add_argument(
                "--shared-cache",
                action=argparse.BooleanOptionalAction,
                default=None,
                help="share KV with the default tenant and others that share; default: as it was, or not",
            )
            one.add_argument(
                "--max-waiting",
                type=_number_or_none,
                metavar="N|none",
                help="requests of both APIs that may wait for a worker; further ones are refused with 429 and a "
                "Retry-After; default: as it was, or none",
            )
        if verb == "add":
            about_new = "make a new password for a tenant that the folder has and the broker does not"
            one.add_argument("--new-password", action="store_true", help=about_new)
        if verb == "rotate":
            either = one.add_mutually_exclusive_group()
            either.add_argument("--keep-old", action="store_true", help="the old one stays valid until --end-old")
            either.add_argument("--end-old", action="store_true", help="make no new one; end the one before it")
        add_broker_flags(
            one,
            folder="data folder of `penstock up` or `penstock nats`, or where credentials go",
            broker="your own broker, with operator's credentials",
            cells=True,
        )
    return parser


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return weight


def _number_or_none(text: str) -> int:
    return 0 if text == "none" else whole_number()(text)


def _place(args: argparse.Namespace) -> TenantsPlace:
    data_dir = Path(args.data_dir).resolve()
    namespace = args.namespace
    with contextlib.suppress(OSError, msgspec.DecodeError):
        namespace = namespace or read_state(data_dir / "state.json").namespace
    subjects = Subjects(namespace or "ps")
    source = LogSource.of(argparse.Namespace(**vars(args), file="", skip_bad=False))
    source = source._replace(namespace=subjects.namespace)
    if args.nats_url:
        return TenantsPlace(data_dir, args.nats_url, subjects, own=True, source=source)
    try:
        running_pid(data_dir)
    except BrokerProblem:
        if url := os.environ.get(f"{PREFIX}NATS_URL"):  # the folder is the operator's, for credentials
            subjects = Subjects(namespace or os.environ.get(f"{PREFIX}NAMESPACE") or "ps")
            source = source._replace(nats_url=url, namespace=subjects.namespace)
            return TenantsPlace(data_dir, url, subjects, own=True, source=source)
        raise
    secrets = load_secrets(data_dir / "secrets.json", USERS)
    user = user_in_use(secrets, "operator")
    port = int((data_dir / "nats.port").read_text())
    url = f"nats://{user}:{secrets[user]}@127.0.0.1:{port}"
    return TenantsPlace(data_dir, url, subjects, own=False, source=source)


async def _do(place: TenantsPlace, name: str, args: argparse.Namespace) -> None:
    async with as_operator(place.operator_url, f"tenants {args.verb}") as nc:
        try:
            await _asked(nc, place, name, args)
        except (NatsError, TimeoutError) as error:
            raise BrokerProblem(f"the broker does not take it: {error}") from error
        if args.verb in ("add", "set", "remove", "restore"):
            await _tell_cells(place)


async def _tell_cells(place: TenantsPlace) -> None:
    """Accounts and submissions are at home; the routers of every cell need the tenants' weights."""
    for cell in cells_of(place.source)[1:]:
        url, namespace = running(cell.source, cell.source.data_dir.resolve())
        try:
            await copy_tenants(place.operator_url, place.subjects, url, Subjects(namespace))
        except BrokerProblem as error:
            raise BrokerProblem(
                f"done, but the routers of cell {cell.number} do not know the tenants' weights ({error}): repeat it "
                "when its broker answers"
            ) from error


async def _asked(nc: Client, place: TenantsPlace, name: str, args: argparse.Namespace) -> None:
    accounts: Accounts | None = None
    known = tenants.copies(place.data_dir)
    existing = tenants.load(place.data_dir)
    if place.with_jwts and args.verb in ("rotate", "conf"):
        raise ValueError(f"{args.verb}: {_JWTS}")
    if args.verb == "conf" and not place.own:
        raise ValueError("the broker of a data folder reads its accounts itself; --nats-url names one of your own")
    copied = known.tenants if place.own else existing
    lost = bool(copied) and await Accounts.missing(nc, place.subjects, copied)
    if lost and args.verb != "restore":
        raise ValueError(
            f"the broker has no tenants, and {place.data_dir} has {', '.join(sorted(copied))}: if it "
            "lost its disk, `penstock tenants restore` brings them back; another broker needs another --data-dir"
        )
    if place.own:
        _warn_of_secrets(place)
        accounts = await Accounts.find(nc, place.subjects)
        unknown = accounts is None and not copied and not known.client_password
        if unknown and not getattr(args, "new_password", False):
            await _refuse_if_lost(nc, place)
        if args.verb != "list":
            password = known.client_password or _secrets_of(place).get("client") or tenants.new_password()
            accounts = await Accounts.open(nc, place.subjects, {} if lost else existing, password)
        if accounts is not None:
            existing = accounts.tenants
    match args.verb:
        case "list":
            _list(existing)
        case "conf":
            _write_accounts(place, accounts, existing)
        case "restore":
            await _restore(nc, place, accounts, known, args)
        case _:
            forgotten = name not in existing and name in known.tenants
            if args.verb == "add" and accounts is not None and forgotten and not args.new_password:
                if await accounts.was_removed(name):
                    raise ValueError(
                        f"{name!r} was removed from this broker, and {place.data_dir} has its earlier password: "
                        f"`penstock tenants add {name} --new-password` creates it again; its clients need the new "
                        "credentials"
                    )
                raise ValueError(
                    f"the broker does not know {name!r}, and {place.data_dir} has its password: `penstock tenants "
                    f"restore {name}` keeps that, --new-password makes another one"
                )
            async with recorded(nc, place.subjects, f"tenants {args.verb}", name, _detail(existing.get(name), args)):
                await _change(nc, place, accounts, existing, name, args)


async def _refuse_if_lost(nc: Client, place: TenantsPlace) -> None:
    """With no accounts on the broker and in the folder: fail if gateways have noted a loss of keys."""
    js, stream = nc.jetstream(), place.subjects.stream("AUDIT")
    try:
        state = (await js.stream_info(stream)).state
    except NotFoundError:
        return
    for seq in range(max(1, state.first_seq), min(state.last_seq, state.first_seq + AUDITED) + 1):
        with contextlib.suppress(NotFoundError, msgspec.MsgspecError):
            if decode((await js.get_msg(stream, seq=seq)).data or b"").action == KEYS_LOST:
                raise ValueError(
                    f"the broker has lost its keys, so it may have lost tenants, and {place.data_dir} has none: "
                    "`penstock tenants restore --data-dir` with the folder that they were made with brings them back; "
                    "if there were none, `penstock tenants add NAME --new-password` creates new ones"
                )


def _secrets_of(place: TenantsPlace) -> dict[str, str]:
    """The passwords in the folder; none are made: those of a broker of one's own are made with its configuration."""
    path = place.data_dir / "secrets.json"
    return load_secrets(path, ()) if path.exists() else {}


def _warn_of_secrets(place: TenantsPlace) -> None:
    """Say so if the folder's passwords are not those of this broker, which has let the operator in."""
    parts = urlsplit(place.operator_url.partition(",")[0])
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    stored = _secrets_of(place).get(user)
    if stored is not None and password and stored != password:
        print(
            f"warning: {place.data_dir / 'secrets.json'} has another password of {user} than this broker: it is old, "
            "or of another deployment; `penstock nats --print-config` and `systemd env` would write wrong passwords",
            file=sys.stderr,
        )


async def _restore(
    nc: Client, place: TenantsPlace, accounts: Accounts | None, known: Copies, args: argparse.Namespace
) -> None:
    """Restore tenants that the data folder has and the broker lacks."""
    if unknown := [each for each in args.names if each not in known.tenants]:
        raise ValueError(
            f"{place.data_dir} has no tenant {unknown[0]!r}; it has {', '.join(sorted(known.tenants)) or 'none'}"
        )
    wanted = args.names or sorted(known.tenants.keys() - known.only_credentials)
    existing = known.tenants if accounts is None else accounts.tenants
    for name in wanted:
        tenant, there = known.tenants[name], existing.get(name)
        if there is not None and there.passwords == tenant.passwords and await _is_whole(nc, place, name, there):
            print(f"{name} was there already")
            continue
        if accounts is not None and there is not None and there.login != tenant.login and not args.replace:
            print(f"{name}: left, the broker has another password; --replace takes that of {place.data_dir}")
            continue
        if accounts is not None and there is not None:
            tenant = msgspec.structs.replace(there, **tenant.passwords)
        elif name in known.without_limits and (limits := await tenants.limits_at(nc, place.subjects, name)):
            tenant = msgspec.structs.replace(tenant, **msgspec.structs.asdict(limits))
        async with recorded(nc, place.subjects, "tenants restore", name):
            await apply_submissions(nc, place.subjects, name, tenant.max_pending)
            await _publish(nc, place.subjects, name, wire.encode(tenant.limits))
            if accounts is not None:
                await accounts.put(name, tenant)
        unlimited = name in known.without_limits and (accounts is None or there is None) and tenant.limits == Limits()
        print(f"restored {name}" + ("; its limits are not known: `penstock tenants add` sets them" * unlimited))
    if accounts is not None and known.client_password not in ("", accounts.client_password):
        if args.replace:
            await accounts.put_client(known.client_password)
        else:
            print(f"client: left, the broker has another password; --replace takes that of {place.data_dir}")
    left = sorted(known.only_credentials - {*args.names, *existing})
    if left:
        print(f"left out: {', '.join(left)}, of which the folder has the credentials only: name what is to come back")
    _write_accounts(place, accounts, existing if accounts is None else accounts.tenants)
    if accounts is not None:
        for name in wanted if not place.with_jwts else ():
            _write_login(place, name, accounts.tenants[name])


async def _is_whole(nc: Client, place: TenantsPlace, name: str, tenant: Tenant) -> bool:
    """Whether gateways and routers know this tenant as it is here, and its submissions are stored."""
    stream, _ = submissions(place.subjects, name, tenant.max_pending)
    there = await existing_config(nc, f"STREAM.INFO.{stream.name}", STREAM_NOT_FOUND) is not None
    return there and await tenants.limits_at(nc, place.subjects, name) == tenant.limits


def _detail(old: Tenant | None, args: argparse.Namespace) -> str:
    """What is changed, for the audit log, as in "weight: 1 → 3"; of a new tenant without the values before."""
    if args.verb == "rotate":
        return "the old password ends" if args.end_old else "both passwords are valid" if args.keep_old else ""
    parts = []
    for field, value in _named_limits(args).items():
        before = "" if old is None else f"{_shown(getattr(old, field))} → "
        parts.append(f"{field.replace('_', '-')}: {before}{_shown(value)}")
    return ", ".join(parts)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


async def _change(
    nc: Client, place: TenantsPlace, accounts: Accounts | None, existing: Tenants, name: str, args: argparse.Namespace
) -> None:
    if args.verb != "add" and name not in existing:
        raise ValueError(f"no tenant {name!r}; there are: {', '.join(sorted(existing)) or 'none'}")
    if args.verb == "remove":
        if accounts is not None:
            await accounts.remove(name)
        else:
            del existing[name]
        _write_accounts(place, accounts, existing)  # first: nothing is accepted from it any more
        await _forget(nc, place.subjects, name)
        tenants.credentials_path(place.data_dir, name).unlink(missing_ok=True)
        print(f"removed {name}")
        return
    old = existing.get(name)
    tenant = _changed(old, args)
    await apply_submissions(nc, place.subjects, name, tenant.max_pending)
    await _publish(nc, place.subjects, name, wire.encode(tenant.limits))
    if accounts is not None:
        await accounts.put(name, tenant)
    else:
        existing[name] = tenant
    if args.verb == "set":
        tenants.save(place.data_dir, existing if accounts is None else accounts.tenants)
        print(f"changed {name}")
        return
    _write_accounts(place, accounts, existing)  # last: when it can connect, everything is there
    did = "changed" if old is not None else "added"
    if place.with_jwts:
        print(f"{did} {name} for the HTTP API: `penstock keys create --tenant {name}`")
        print(f"note: {_JWTS}", file=sys.stderr)
        return
    path = _write_login(place, name, tenant)
    print(f"{did} {name}; credentials: {path}")


def _write_login(place: TenantsPlace, name: str, tenant: Tenant) -> Path:
    password, second = tenant.login
    user = second_tenant_user(name) if second else tenant_user(name)
    url = tenants.with_user(place.operator_url, user, password)
    return tenants.write_credentials(place.data_dir, name, url)


def _changed(old: Tenant | None, args: argparse.Namespace) -> Tenant:
    tenant = old or Tenant(password=tenants.new_password())
    if args.verb in ("add", "set"):
        return msgspec.structs.replace(tenant, **_named_limits(args))
    if args.end_old:
        return tenant.without_old()
    return tenant.with_password(tenants.new_password(), keep_old=args.keep_old)


def _named_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Those that flags name; the others stay, so that a change of one does not let a tenant use more models."""
    if args.verb not in ("add", "set"):
        return {}
    models = None if args.models is None else tuple(model for model in args.models.split(",") if model)
    limits = {
        "models": models,
        "max_pending": args.max_pending,
        "weight": args.weight,
        "shared_cache": args.shared_cache,
        "max_waiting": args.max_waiting,
        "requests_per_minute": args.rpm,
        "tokens_per_minute": args.tpm,
        "tokens_per_month": args.monthly_tokens,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _write_accounts(place: TenantsPlace, accounts: Accounts | None, existing: Tenants) -> None:
    if accounts is None:
        tenants.save(place.data_dir, existing)
        secrets = load_secrets(place.data_dir / "secrets.json", USERS)
        tenants.write_accounts(place.data_dir, client_passwords(secrets), place.subjects)
        reload(place.data_dir)
        return
    tenants.save(place.data_dir, accounts.tenants)  # a copy, for a broker that loses its disk
    if place.with_jwts:
        return
    tenants.write_accounts(place.data_dir, (accounts.client_password, ""), place.subjects, accounts.tenants)
    url = tenants.with_user(place.operator_url, "client", accounts.client_password)
    tenants.write_credentials(place.data_dir, DEFAULT_TENANT, url)
    path = place.data_dir / tenants.INCLUDE
    print(
        f"for clients over NATS: include {path} in the accounts block of each server and reload it twice (docs/nats.md)"
    )


async def _publish(nc: Client, subjects: Subjects, name: str, value: bytes, **headers: str) -> None:
    named = {key.replace("_", "-"): text for key, text in headers.items()}
    await nc.jetstream().publish(f"$KV.{subjects.bucket('tenants')}.{name}", value, headers=named or None)


async def _forget(nc: Client, subjects: Subjects, name: str) -> None:
    await _publish(nc, subjects, name, b"", KV_Operation="DEL")


def _list(existing: Tenants) -> None:
    if not existing:
        print("there is no tenant but 'default'")
        return
    heads = f"{'max-pending':>11}  {'max-waiting':>11}  {'weight':>6}  {'rpm':>9}  {'tpm':>10}  {'monthly-tokens':>14}"
    print(f"{'tenant':<32}  {heads}  {'cache':<6}  models")
    for name, tenant in sorted(existing.items()):
        cache, models = "shared" if tenant.shared_cache else "own", ",".join(tenant.models) or "all"
        limits = f"{tenant.max_pending:>11}  {tenant.max_waiting or 'none':>11}  {tenant.weight:>6g}"
        limits += f"  {tenant.requests_per_minute or 'none':>9}  {tenant.tokens_per_minute or 'none':>10}"
        limits += f"  {tenant.tokens_per_month or 'none':>14}"
        print(f"{name:<32}  {limits}  {cache:<6}  {models}")
