"""``penstock passwords``: changes the passwords of the broker's users while processes and clients are connected.

Each role has two users, and processes log in as one of them. First the other user gets a new password. Then processes
are restarted one by one, and log in as that user. Finally, the first user gets a random password that is not stored.
"""

import argparse
import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser
from penstock.infra.bus.audit import recorded
from penstock.infra.nats_server import tenants
from penstock.infra.nats_server.config import ROUTE, ROUTE_BEFORE, USERS, route_passwords
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.nats_server.jetstream_api import BrokerProblem, reload, running_pid
from penstock.infra.nats_server.permissions import BROKER_ROLES
from penstock.launch.nats import as_operator, connect_operator
from penstock.log_tools.sources.open_log import LogSource, cells_of
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects

EVERY = (*BROKER_ROLES, "sys")
NAMED = ("client", ROUTE)  # changed only if they are given as arguments
RESTART = (
    "run `penstock nats --print-config` for each server of the cluster, install the result and restart the servers one "
    "by one in the order of --cluster, each once the one before has caught up (docs/several-machines.md)"
)
SHOWN = 10  # connections listed in an error
ASK_S = 3.0


@dataclass(frozen=True, slots=True)
class PasswordsPlace:
    """The broker whose passwords change.

    Attributes:
        servers: its URL without credentials; empty if unknown.
        running: it is the broker of the data folder.
    """

    data_dir: Path
    servers: str
    subjects: Subjects
    running: bool


def run(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit status."""
    args = _parser().parse_args(argv)
    data_dir = Path(args.data_dir).resolve()
    try:
        if not (data_dir / "secrets.json").exists():
            raise ValueError(f"{data_dir} has no passwords: name the folder of `penstock up` or `nats` with --data-dir")
        folders = {0: data_dir} if args.nats_url else _folders(data_dir)
        with contextlib.ExitStack() as stack:
            for folder in folders.values():
                stack.enter_context(tenants.held(folder))
            places = {cell: _place(folder, args) for cell, folder in folders.items()}
            asyncio.run(_do(places, args))
    except (BrokerProblem, ValueError, OSError, NatsError, TimeoutError, ServingError) as error:
        return fail("passwords", error)
    return 0


def _folders(data_dir: Path) -> dict[int, Path]:
    """The folder of each cell's broker. A cell that shares another cell's broker has no folder."""
    if not (data_dir / "state.json").exists():
        others = {int(path.parent.name): path.parent for path in (data_dir / "cells").glob("*/secrets.json")}
        return {0: data_dir} | dict(sorted(others.items()))
    folders: dict[int, Path] = {}
    for cell in cells_of(LogSource(data_dir)):
        folder = cell.source.data_dir.resolve()
        if folder not in folders.values() and (folder / "secrets.json").exists():
            folders[cell.number] = folder
    return folders


async def _do(places: Mapping[int, PasswordsPlace], args: argparse.Namespace) -> None:
    """Run the subcommand for every cell, or, if it would fail for one, for none."""
    away = [cell for cell, place in places.items() if not place.running]
    if away and len(away) < len(places):
        raise ValueError(f"the broker of cell {away[0]} does not run, and others do: try again when all run")
    roles = _roles(args.roles) if args.verb != "list" else ()
    if args.verb == "retire" and not args.force:
        for place in places.values():
            await _check_unused(place, roles)
    for cell, place in places.items():
        if len(places) > 1:
            print(f"cell {cell}:")
        match args.verb:
            case "list":
                await _list(place)
            case "rotate":
                await _rotate(place, roles)
            case "retire":
                await _retire(place, roles)


def _parser() -> Parser:
    parser = Parser(prog="penstock passwords", description="change the passwords of the broker's users without a gap")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{list,rotate,retire}")
    about_roles = f"{', '.join(EVERY)}, or {ROUTE}, among the servers of a cluster; default: all but client and {ROUTE}"
    for verb, about in (
        ("list", "show which of its two users each role logs in as, and the connections of both"),
        ("rotate", "give each role's unused user a new password; processes started from now on log in as that user"),
        ("retire", "end the password of each role's unused user, and every connection that still uses it"),
    ):
        one = verbs.add_parser(verb, help=about, description=about)
        if verb != "list":
            one.add_argument("roles", nargs="*", metavar="ROLE", help=about_roles)
        if verb == "retire":
            one.add_argument("--force", action="store_true", help="also while connections use it")
        one.add_argument(
            "--data-dir",
            default=".penstock",
            metavar="FOLDER",
            help="of `penstock up`, `penstock nats` or `penstock nats --print-config` (default: %(default)s)",
        )
        one.add_argument(
            "--nats-url",
            default="",
            metavar="URL",
            help="your own servers, with the passwords of --data-dir: to count connections, and for the audit log",
        )
        one.add_argument(
            "--namespace", default="", metavar="TEXT", help="prefix of all subjects; default: the data folder's, or ps"
        )
    return parser


def _roles(named: Sequence[str]) -> tuple[str, ...]:
    if unknown := [role for role in named if role not in (*EVERY, ROUTE)]:
        raise ValueError(f"no role {unknown[0]!r}; the roles are {', '.join(EVERY)}, {ROUTE}")
    if ROUTE in named and len(named) > 1:
        raise ValueError(f"{ROUTE}: change it alone; it needs restarts of the servers, the others only a reload")
    return tuple(named) or tuple(role for role in EVERY if role not in NAMED)


def _place(data_dir: Path, args: argparse.Namespace) -> PasswordsPlace:
    try:
        running_pid(data_dir)
    except BrokerProblem:  # no broker runs here, or the passwords are for servers elsewhere
        return PasswordsPlace(data_dir, args.nats_url, Subjects(args.namespace or "ps"), running=False)
    if args.nats_url:
        raise ValueError(f"--nats-url: these are the passwords of the broker that runs on {data_dir}; leave it out")
    found = re.search(r'server_name: "penstock-([^"]+)"', (data_dir / "nats.conf").read_text())
    assert found is not None
    port = int((data_dir / "nats.port").read_text())
    return PasswordsPlace(data_dir, f"nats://127.0.0.1:{port}", Subjects(found[1]), running=True)


@contextlib.asynccontextmanager
async def _noted(
    place: PasswordsPlace, secrets: Mapping[str, str], verb: str, what: Sequence[str]
) -> AsyncIterator[None]:
    """Record the changes of the block in the audit log, if the broker is known."""
    if not place.servers:
        yield
        return
    user = tenants.user_in_use(secrets, "operator")
    url = tenants.with_user(place.servers, user, secrets[user])
    async with (
        as_operator(url, f"passwords {verb}") as nc,
        recorded(nc, place.subjects, f"passwords {verb}", ", ".join(what)),
    ):
        yield


async def _rotate(place: PasswordsPlace, roles: Sequence[str]) -> None:
    before = load_secrets(place.data_dir / "secrets.json", USERS)
    secrets = _with_route(before)
    if ROUTE in roles:
        if place.running:
            raise ValueError(f"{ROUTE} is for the servers of a cluster; the broker of a data folder is a single server")
        if ROUTE_BEFORE in secrets:
            raise ValueError(
                f"{ROUTE}: the previous password is still in use; first `penstock passwords retire {ROUTE}`"
            )
        async with _noted(place, before, "rotate", roles):
            tenants.store(place.data_dir, secrets | {ROUTE: tenants.new_password(), ROUTE_BEFORE: secrets[ROUTE]})
        print(f"the servers' new password is in {place.data_dir / 'secrets.json'}; now:")
        print(f"1. {RESTART}")
        print(f"2. run `penstock passwords retire {ROUTE}`, and repeat step 1")
        return
    in_use = set(secrets.get(tenants.SECOND_IN_USE, "").split())
    new = [tenants.other_user(secrets, role) for role in roles]
    for role, user in zip(roles, new, strict=True):
        secrets[user] = tenants.new_password()
        in_use ^= {role}
    async with _noted(place, before, "rotate", new):
        tenants.store(place.data_dir, secrets | {tenants.SECOND_IN_USE: " ".join(sorted(in_use))})
        if place.running:
            _apply(place, secrets)
    users = ", ".join(new)
    if not place.running:
        print(f"the new passwords of {users} are in {place.data_dir / 'secrets.json'}; now:")
        print("1. run `penstock nats --print-config` with the same flags; install it on each server, and reload it")
        print("2. restart processes and clients one by one, with the new users in their URLs")
        print(f"3. run `penstock passwords retire --nats-url {place.servers or 'URL'}`, and repeat step 1;")
        print("   with TLS, the URL is tls://…, and PENSTOCK_NATS_CA names the file of the servers' authority")
        return
    print(f"the broker has new passwords for {users}, and still accepts the other users; now:")
    print("1. run `penstock restart --rolling`, and restart processes and clients elsewhere with their new users")
    print("2. run `penstock passwords retire`")


async def _check_unused(place: PasswordsPlace, roles: Sequence[str]) -> None:
    if ROUTE in roles:
        return
    secrets = _with_route(load_secrets(place.data_dir / "secrets.json", USERS))
    ending = [tenants.other_user(secrets, role) for role in roles]
    if not place.servers:
        raise ValueError(
            f"no broker runs on {place.data_dir}, so it is unknown whether connections still use passwords that "
            "would end: name your servers with --nats-url, or use --force"
        )
    used = [each for each in await connections(place.servers, secrets) if each["authorized_user"] in ending]
    if used:
        names = ", ".join(_named(each) for each in used[:SHOWN])
        more = f" and {len(used) - SHOWN} more" if len(used) > SHOWN else ""
        how = "`penstock restart --rolling`" if place.running else "with the new users in their URLs"
        raise ValueError(
            f"still connected with a password that would end: {names}{more}; restart them first ({how}), or use --force"
        )


async def _retire(place: PasswordsPlace, roles: Sequence[str]) -> None:
    """End the passwords of the users that are no longer in use."""
    before = load_secrets(place.data_dir / "secrets.json", USERS)
    secrets = _with_route(before)
    if ROUTE in roles:
        if not secrets.pop(ROUTE_BEFORE, ""):
            raise ValueError(
                f"{ROUTE}: there is no previous password; `penstock passwords rotate {ROUTE}` makes a new one"
            )
        async with _noted(place, before, "retire", roles):
            tenants.store(place.data_dir, secrets)
        print(f"the previous password is no longer in the configuration; now {RESTART}")
        return
    ending = [tenants.other_user(secrets, role) for role in roles]
    for user in ending:
        secrets[user] = tenants.new_password()
    async with _noted(place, before, "retire", ending):
        tenants.store(place.data_dir, secrets)
        if place.running:
            _apply(place, secrets)
    if place.running:
        print(f"the previous passwords no longer work: {', '.join(ending)}")
    else:
        print(f"{', '.join(ending)}: install `penstock nats --print-config` on each server again, and reload them")


def _named(connection: Mapping[str, Any]) -> str:
    """One connection, with its address and server, since processes of a role have the same name on every host."""
    name = connection.get("name") or connection["cid"]
    address = f"{connection.get('ip')}:{connection.get('port')}"
    return f"{name} ({connection['authorized_user']}) at {address} of server {connection['server']}"


def _with_route(secrets: dict[str, str]) -> dict[str, str]:
    """Add the servers' password as an entry of its own, so that it survives a change of the password of ``sys``."""
    return secrets | {ROUTE: route_passwords(secrets)[0]}


async def _list(place: PasswordsPlace) -> None:
    secrets = load_secrets(place.data_dir / "secrets.json", USERS)
    counts: dict[str, int] = {}
    for each in await connections(place.servers, secrets) if place.servers else ():
        counts[each["authorized_user"]] = counts.get(each["authorized_user"], 0) + 1
    print(f"{'role':<10}{'logs in as':<14}{'connections':>11}{'of the other':>14}")
    for role in EVERY:
        user, other = tenants.user_in_use(secrets, role), tenants.other_user(secrets, role)
        numbers = (str(counts.get(each, 0)) if place.servers else "-" for each in (user, other))
        print(f"{role:<10}{user:<14}{next(numbers):>11}{next(numbers):>14}")


def _apply(place: PasswordsPlace, secrets: Mapping[str, str]) -> None:
    tenants.write_passwords(place.data_dir, secrets, place.subjects)
    reload(place.data_dir)


async def connections(servers: str, secrets: Mapping[str, str]) -> list[dict[str, Any]]:
    """The connections of all servers of the broker, each with its ``authorized_user`` and ``server``, except our own.

    Raises:
        BrokerProblem, NatsError, TimeoutError: no server accepts ``sys``, or one of them does not answer.
    """
    user = tenants.user_in_use(secrets, "sys")
    nc = await connect_operator(tenants.with_user(servers, user, secrets[user]))
    try:
        found: list[dict[str, Any]] = []
        for server in await _servers(nc):
            own = (nc.client_id if server == nc._server_info["server_id"] else None,)
            offset = 0
            while True:
                query = json.dumps({"auth": True, "limit": 1000, "offset": offset}).encode()
                reply = json.loads((await nc.request(f"$SYS.REQ.SERVER.{server}.CONNZ", query, timeout=ASK_S)).data)
                page, name = reply["data"], reply["server"]["name"]
                offset += len(page["connections"])
                found += [each | {"server": name} for each in page["connections"] if each["cid"] not in own]
                if not page["connections"] or offset >= page["total"]:
                    break
        return [each for each in found if each.get("authorized_user")]
    finally:
        await nc.close()


async def _servers(nc: Client) -> list[str]:
    """The ids of all servers of the cluster."""
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    await nc.publish("$SYS.REQ.SERVER.PING", reply=inbox)
    found: list[str] = []
    expected = 1
    try:
        async with asyncio.timeout(ASK_S):
            while len(found) < expected:
                report = json.loads((await replies.next_msg(timeout=ASK_S)).data)
                found.append(report["server"]["id"])
                expected = max(expected, report["statsz"]["active_servers"])
    except (TimeoutError, NatsError):
        raise BrokerProblem(
            f"{len(found)} of {expected} servers have listed their connections; try again when all run, or use --force"
        ) from None
    return found
