"""``penstock tenants``: manages tenants of the NATS API and their limits.

On the broker of a data folder everything is done at once. With ``--nats-url`` (a broker of your own) streams, limits
and accounts are kept there. ``tenants.conf`` is made of them, for the ``accounts`` block of the servers' configuration.
"""

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from configs.flags import Parser
from infra.broker import tenants
from infra.broker.apply import apply_submissions
from infra.broker.config import USERS, second_tenant_user, tenant_user
from infra.broker.datadir import load_secrets
from infra.broker.jetstream_api import BrokerProblem
from infra.broker.main import as_operator
from infra.broker.passwords import client_passwords, user_in_use
from infra.broker.reload import reload, running_pid
from infra.broker.tenants import Accounts, Tenant, Tenants
from infra.bus.audit import recorded
from infra.launch.state import read_state
from schemas import wire
from schemas.subjects import DEFAULT_TENANT, Subjects
from schemas.tenants import LEAST_WEIGHT, MAX_PENDING, MOST_WEIGHT, check_name


@dataclass(frozen=True, slots=True)
class Place:
    """Which deployment. ``own``: the broker is not that of the data folder."""

    data_dir: Path
    operator_url: str
    subjects: Subjects
    own: bool


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    try:
        place = _place(args)
        with tenants.held(place.data_dir):
            if args.verb == "list" and not place.own:
                _list(tenants.load(place.data_dir))
                return 0
            name = check_name(args.name) if "name" in args else ""
            if name == DEFAULT_TENANT:
                where = "credentials are" if place.own else "clients use client_nats_url of state.json;"
                raise ValueError(f"{DEFAULT_TENANT!r} is always there: its {where} in the data folder")
            asyncio.run(_do(place, name, args))
    except (BrokerProblem, ValueError, OSError) as error:
        print(f"penstock tenants: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock tenants", description="manage tenants of both APIs, their limits and their passwords for NATS"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{add,list,rotate,remove,conf}")
    for verb, about in (
        ("add", "add a tenant or change its limits, and write its credentials"),
        ("list", "list all tenants but the default one"),
        ("rotate", "give a tenant a new password; the old one ends at once, or with --keep-old later"),
        ("remove", "end the access of a tenant; its submissions stay until they expire"),
        ("conf", "write tenants.conf again, from the accounts that a broker of your own keeps"),
    ):
        one = verbs.add_parser(verb, help=about, description=about)
        if verb not in ("list", "conf"):
            one.add_argument("name", metavar="NAME", help="lower-case letters, digits and '-'")
        if verb == "add":
            about_models = "models it may use, '' for all; default: as it was, or all"
            one.add_argument("--models", metavar="A,B", help=about_models)
            one.add_argument(
                "--max-pending",
                type=_positive,
                metavar="N",
                help=f"submissions that may wait, beyond which it gets errors; default: as it was, or {MAX_PENDING}",
            )
            one.add_argument(
                "--weight",
                type=_weight,
                metavar="X",
                help="share of the work while requests wait, against tenants with 1; default: as it was, or 1",
            )
            one.add_argument(
                "--shared-cache",
                action=argparse.BooleanOptionalAction,
                default=None,
                help="share KV with the default tenant and others that share; default: as it was, or not",
            )
        if verb == "rotate":
            either = one.add_mutually_exclusive_group()
            either.add_argument("--keep-old", action="store_true", help="the old one stays valid until --end-old")
            either.add_argument("--end-old", action="store_true", help="make no new one; end the one before it")
        one.add_argument(
            "--data-dir",
            default=".penstock",
            metavar="FOLDER",
            help="data folder of `penstock up` or `penstock nats` (default: %(default)s)",
        )
        one.add_argument("--nats-url", default="", metavar="URL", help="your own broker, with operator's credentials")
        one.add_argument(
            "--namespace", default="", metavar="TEXT", help="prefix of all subjects; default: the deployment's, or ps"
        )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_PENDING:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_PENDING}")
    return int(text)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return weight


def _place(args: argparse.Namespace) -> Place:
    """
    Raises:
        BrokerProblem: no broker runs on the data folder, and no other is named.
        ValueError: no such namespace.
    """
    data_dir = Path(args.data_dir).resolve()
    namespace = args.namespace
    with contextlib.suppress(OSError, msgspec.DecodeError):
        namespace = namespace or read_state(data_dir / "state.json").namespace
    subjects = Subjects(namespace or "ps")
    if args.nats_url:
        return Place(data_dir, args.nats_url, subjects, own=True)
    running_pid(data_dir)
    secrets = load_secrets(data_dir / "secrets.json", USERS)
    user = user_in_use(secrets, "operator")
    port = int((data_dir / "nats.port").read_text())
    return Place(data_dir, f"nats://{user}:{secrets[user]}@127.0.0.1:{port}", subjects, own=False)


async def _do(place: Place, name: str, args: argparse.Namespace) -> None:
    """
    Raises:
        BrokerProblem: the broker refuses it.
        ValueError: there is no such tenant, or another operator changes it, too.
    """
    async with as_operator(place.operator_url, f"tenants {args.verb}") as nc:
        try:
            await _asked(nc, place, name, args)
        except (NatsError, TimeoutError) as error:
            raise BrokerProblem(f"the broker does not take it: {error}") from error


async def _asked(nc: Client, place: Place, name: str, args: argparse.Namespace) -> None:
    """
    Raises:
        NatsError, TimeoutError: the broker refuses it.
        ServingError, ValueError: as ``_do``.
    """
    accounts: Accounts | None = None
    earlier = tenants.load(place.data_dir)
    client_password = load_secrets(place.data_dir / "secrets.json", USERS)["client"]
    if place.own:
        accounts = await Accounts.open(nc, place.subjects, earlier, client_password)
    elif args.verb == "conf":
        raise ValueError("the broker of a data folder reads its accounts itself; --nats-url names one of your own")
    existing = earlier if accounts is None else accounts.tenants
    if args.verb == "list":
        _list(existing)
    elif args.verb == "conf":
        _write_accounts(place, accounts, existing)
    else:
        async with recorded(nc, place.subjects, f"tenants {args.verb}", name, _detail(args)):
            await _change(nc, place, accounts, existing, name, args)


def _detail(args: argparse.Namespace) -> str:
    return ", ".join(f"{name}: {value}" for name, value in _named_limits(args).items())


async def _change(
    nc: Client, place: Place, accounts: Accounts | None, existing: Tenants, name: str, args: argparse.Namespace
) -> None:
    """
    Raises:
        BrokerProblem, ValueError: as ``_do``.
    """
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
    _write_accounts(place, accounts, existing)  # last: when it can connect, everything is there
    password, second = tenant.login
    user = second_tenant_user(name) if second else tenant_user(name)
    url = tenants.with_user(place.operator_url, user, password)
    path = tenants.write_credentials(place.data_dir, name, url)
    print(f"{'changed' if old is not None else 'added'} {name}; credentials: {path}")


def _changed(old: Tenant | None, args: argparse.Namespace) -> Tenant:
    """
    Raises:
        ValueError: the tenant has not the passwords that the flags are about.
    """
    tenant = old or Tenant(password=tenants.new_password())
    if args.verb == "add":
        return msgspec.structs.replace(tenant, **_named_limits(args))
    if args.end_old:
        return tenant.without_old()
    return tenant.with_password(tenants.new_password(), keep_old=args.keep_old)


def _named_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Those that flags name; the others stay, so that a change of one does not let a tenant use more models."""
    if args.verb != "add":
        return {}
    models = None if args.models is None else tuple(model for model in args.models.split(",") if model)
    limits = {
        "models": models,
        "max_pending": args.max_pending,
        "weight": args.weight,
        "shared_cache": args.shared_cache,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _write_accounts(place: Place, accounts: Accounts | None, existing: Tenants) -> None:
    if accounts is None:
        tenants.save(place.data_dir, existing)
        secrets = load_secrets(place.data_dir / "secrets.json", USERS)
        tenants.write_accounts(place.data_dir, client_passwords(secrets), place.subjects)
        reload(place.data_dir)
        return
    tenants.write_accounts(place.data_dir, (accounts.client_password, ""), place.subjects, accounts.tenants)
    url = tenants.with_user(place.operator_url, "client", accounts.client_password)
    tenants.write_credentials(place.data_dir, DEFAULT_TENANT, url)
    path = place.data_dir / tenants.INCLUDE
    print(f"include {path} in the accounts block of each server and reload it twice (see docs/nats.md)")


async def _publish(nc: Client, subjects: Subjects, name: str, value: bytes, **headers: str) -> None:
    named = {key.replace("_", "-"): text for key, text in headers.items()}
    await nc.jetstream().publish(f"$KV.{subjects.bucket('tenants')}.{name}", value, headers=named or None)


async def _forget(nc: Client, subjects: Subjects, name: str) -> None:
    await _publish(nc, subjects, name, b"", KV_Operation="DEL")


def _list(existing: Tenants) -> None:
    if not existing:
        print("there is no tenant but 'default'")
        return
    print(f"{'tenant':<32}  {'max-pending':>11}  {'weight':>6}  {'cache':<6}  models")
    for name, tenant in sorted(existing.items()):
        cache, models = "shared" if tenant.shared_cache else "own", ",".join(tenant.models) or "all"
        print(f"{name:<32}  {tenant.max_pending:>11}  {tenant.weight:>6g}  {cache:<6}  {models}")
