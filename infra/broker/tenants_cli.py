"""``penstock tenants``: manages tenants of the NATS API and their limits.

On the broker of a data folder everything is done at once. With ``--nats-url`` (a broker of your own) streams and limits
are made there, and ``tenants.conf`` is written, for the ``accounts`` block of the server's configuration.
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

from configs.flags import Parser
from infra.broker import tenants
from infra.broker.apply import apply_submissions
from infra.broker.config import USERS, tenant_user
from infra.broker.datadir import load_secrets
from infra.broker.jetstream_api import BrokerProblem
from infra.broker.main import connect_operator
from infra.broker.reload import reload, running_pid
from infra.broker.tenants import Tenant, Tenants
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

    @property
    def server(self) -> str:
        """Host and port, for the credentials."""
        return self.operator_url.rpartition("@")[2].removeprefix("nats://")


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    try:
        place = _place(args)
        with tenants.held(place.data_dir):
            existing = tenants.load(place.data_dir)
            if args.verb == "list":
                _list(existing)
                return 0
            name = check_name(args.name)
            if name == DEFAULT_TENANT:
                raise ValueError(f"{DEFAULT_TENANT!r} is always there: its clients use client_nats_url of state.json")
            asyncio.run(_change(place, existing, name, args))
    except (BrokerProblem, ValueError, OSError) as error:
        print(f"penstock tenants: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock tenants", description="manage tenants of both APIs, their limits and their passwords for NATS"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{add,list,rotate,remove}")
    for verb, about in (
        ("add", "add a tenant or change its limits, and write its credentials"),
        ("list", "list all tenants but the default one"),
        ("rotate", "give a tenant a new password; the old one ends at once"),
        ("remove", "end the access of a tenant; its submissions stay until they expire"),
    ):
        one = verbs.add_parser(verb, help=about, description=about)
        if verb != "list":
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
    password = load_secrets(data_dir / "secrets.json", USERS)["operator"]
    port = int((data_dir / "nats.port").read_text())
    return Place(data_dir, f"nats://operator:{password}@127.0.0.1:{port}", subjects, own=False)


async def _change(place: Place, existing: Tenants, name: str, args: argparse.Namespace) -> None:
    """
    Raises:
        BrokerProblem: the broker refuses it.
        ValueError: there is no such tenant.
    """
    if args.verb != "add" and name not in existing:
        raise ValueError(f"no tenant {name!r}; there are: {', '.join(sorted(existing)) or 'none'}")
    nc = await connect_operator(place.operator_url)
    try:
        if args.verb == "remove":
            del existing[name]
            _write_accounts(place, existing)  # first: nothing is accepted from it any more
            await _forget(nc, place.subjects, name)
            tenants.credentials_path(place.data_dir, name).unlink(missing_ok=True)
            print(f"removed {name}")
            return
        old = existing.get(name)
        password = old.password if old is not None and args.verb == "add" else tenants.new_password()
        tenant = msgspec.structs.replace(old or Tenant(password=password), password=password, **_named_limits(args))
        await apply_submissions(nc, place.subjects, name, tenant.max_pending)
        await _publish(nc, place.subjects, name, wire.encode(tenant.limits))
        existing[name] = tenant
        _write_accounts(place, existing)  # last: when it can connect, everything is there
        url = f"nats://{tenant_user(name)}:{password}@{place.server}"
        path = tenants.write_credentials(place.data_dir, name, url)
        print(f"{'changed' if old is not None else 'added'} {name}; credentials: {path}")
    finally:
        await nc.close()


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


def _write_accounts(place: Place, existing: Tenants) -> None:
    tenants.save(place.data_dir, existing)
    secrets = load_secrets(place.data_dir / "secrets.json", USERS)
    tenants.write_accounts(place.data_dir, secrets["client"], place.subjects)
    if place.own:
        path = place.data_dir / tenants.INCLUDE
        print(f"include {path} in the broker's accounts block and reload it twice (see docs/nats.md)")
    else:
        reload(place.data_dir)


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
