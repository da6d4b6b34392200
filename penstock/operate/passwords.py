"""``penstock passwords``: new passwords for the users of the broker, while processes and clients are connected.

Each role has two users. Processes log in as one of them; the other gets a new password, processes are restarted one
after the other and log in as that, and then the first one's password is replaced by one that nobody knows.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nats
from nats.errors import Error as NatsError

from penstock.configs.flags import Parser
from penstock.infra.broker.config import ROUTE, ROUTE_BEFORE, USERS, route_passwords
from penstock.infra.broker.datadir import load_secrets
from penstock.infra.broker.jetstream_api import BrokerProblem, reload, running_pid
from penstock.infra.broker.roles import ROLES
from penstock.infra.broker.tenants import (
    SECOND_IN_USE,
    held,
    new_password,
    other_user,
    store,
    user_in_use,
    write_passwords,
)
from penstock.schemas.subjects import Subjects

EVERY = (*ROLES, "sys")
NAMED = ("client", ROUTE)  # what is changed only if it is named
RESTART = (
    "`penstock nats --print-config` for each server of the cluster; put it there and restart that, one server after "
    "the other, each when the one before has caught up (docs/several-machines.md)"
)
SHOWN = 10  # connections that an error names
ASK_S = 3.0


def run(argv: Sequence[str]) -> int:
    """Do what the first argument says; the exit status."""
    args = _parser().parse_args(argv)
    data_dir = Path(args.data_dir).resolve()
    try:
        if not (data_dir / "secrets.json").exists():
            raise ValueError(f"{data_dir} has no passwords: name the folder of `penstock up` or `nats` with --data-dir")
        with held(data_dir):
            if args.verb == "list":
                _list(data_dir)
            else:
                roles = _roles(args.roles)
                (_rotate if args.verb == "rotate" else _retire)(data_dir, roles, args)
    except (BrokerProblem, ValueError, OSError, NatsError, TimeoutError) as error:
        print(f"penstock passwords: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(prog="penstock passwords", description="change the passwords of the broker's users without a gap")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{list,rotate,retire}")
    about_roles = f"{', '.join(EVERY)}, or {ROUTE}, among the servers of a cluster; default: all but client and {ROUTE}"
    for verb, about in (
        ("list", "show as which of its two users each role logs in, and how many connections each has"),
        ("rotate", "give the user that is not in use a new password; what starts from now on logs in as that"),
        ("retire", "end the password of the user that is no longer in use, and every connection that still uses it"),
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
    return parser


def _roles(named: Sequence[str]) -> tuple[str, ...]:
    if unknown := [role for role in named if role not in (*EVERY, ROUTE)]:
        raise ValueError(f"no role {unknown[0]!r}: there are {', '.join(EVERY)}, {ROUTE}")
    if ROUTE in named and len(named) > 1:
        raise ValueError(f"{ROUTE}: name it alone, for servers are restarted, and for the others reloaded")
    return tuple(named) or tuple(role for role in EVERY if role not in NAMED)


def _runs(data_dir: Path) -> bool:
    """Whether the folder's own broker runs. False: none does, or the passwords are for servers elsewhere."""
    try:
        running_pid(data_dir)
    except BrokerProblem:
        return False
    return True


def _rotate(data_dir: Path, roles: Sequence[str], args: argparse.Namespace) -> None:
    secrets = _with_route(load_secrets(data_dir / "secrets.json", USERS))
    running = _runs(data_dir)
    if ROUTE in roles:
        if running:
            raise ValueError(f"{ROUTE}: the broker of a data folder is one server; it is for those of a cluster")
        if ROUTE_BEFORE in secrets:
            raise ValueError(f"{ROUTE}: the password before is still tried; `penstock passwords retire {ROUTE}` first")
        store(data_dir, secrets | {ROUTE: new_password(), ROUTE_BEFORE: secrets[ROUTE]})
        print(f"a new password among the servers is in {data_dir / 'secrets.json'}; the one before is tried, too")
        print(f"1. {RESTART}")
        print(f"2. `penstock passwords retire {ROUTE}`, and 1. once more")
        return
    in_use = set(secrets.get(SECOND_IN_USE, "").split())
    for role in roles:
        secrets[other_user(secrets, role)] = new_password()
        in_use ^= {role}
    store(data_dir, secrets | {SECOND_IN_USE: " ".join(sorted(in_use))})
    users = ", ".join(user_in_use({SECOND_IN_USE: " ".join(in_use)}, role) for role in roles)
    if not running:
        print(f"new passwords of {users} are in {data_dir / 'secrets.json'}")
        print("1. `penstock nats --print-config` with the flags of before; put it on each server and reload that")
        print("2. restart processes and clients one after the other, with the new users in their URLs")
        print("3. `penstock passwords retire`, and 1. once more")
        return
    _apply(data_dir, secrets)
    print(f"the broker has new passwords of {users}; those before are valid, too")
    print("1. `penstock restart --rolling`, and each process and client elsewhere with its new user")
    print("2. `penstock passwords retire`")


def _retire(data_dir: Path, roles: Sequence[str], args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: a connection still uses a password that would end.
    """
    secrets = _with_route(load_secrets(data_dir / "secrets.json", USERS))
    running = _runs(data_dir)
    if ROUTE in roles:
        if not secrets.pop(ROUTE_BEFORE, ""):
            raise ValueError(
                f"{ROUTE}: no password is there from before; `penstock passwords rotate {ROUTE}` makes a new one"
            )
        store(data_dir, secrets)
        print(f"the password before is no longer tried: {RESTART}")
        return
    ending = [other_user(secrets, role) for role in roles]
    if running and not args.force:
        used = [each for each in asyncio.run(connections(data_dir, secrets)) if each["authorized_user"] in ending]
        if used:
            names = ", ".join(f"{each.get('name') or each['cid']} ({each['authorized_user']})" for each in used[:SHOWN])
            more = f" and {len(used) - SHOWN} more" if len(used) > SHOWN else ""
            raise ValueError(
                f"still connected with a password that would end: {names}{more}; restart them first "
                "(`penstock restart --rolling`), or --force"
            )
    for user in ending:
        secrets[user] = new_password()
    store(data_dir, secrets)
    if running:
        _apply(data_dir, secrets)
        print(f"the earlier passwords have ended: {', '.join(ending)}")
    else:
        print(f"{', '.join(ending)}: put `penstock nats --print-config` on each server again, and reload it")


def _with_route(secrets: dict[str, str]) -> dict[str, str]:
    """With the password among servers as an entry of its own, so that it stays as it is when that of ``sys`` ends."""
    return secrets | {ROUTE: route_passwords(secrets)[0]}


def _list(data_dir: Path) -> None:
    secrets = load_secrets(data_dir / "secrets.json", USERS)
    counts: dict[str, int] = {}
    running = _runs(data_dir)
    for each in asyncio.run(connections(data_dir, secrets)) if running else ():
        counts[each["authorized_user"]] = counts.get(each["authorized_user"], 0) + 1
    print(f"{'role':<10}{'logs in as':<14}{'connections':>11}{'of the other':>14}")
    for role in EVERY:
        user, other = user_in_use(secrets, role), other_user(secrets, role)
        numbers = (str(counts.get(each, 0)) if running else "-" for each in (user, other))
        print(f"{role:<10}{user:<14}{next(numbers):>11}{next(numbers):>14}")


def _apply(data_dir: Path, secrets: Mapping[str, str]) -> None:
    """
    Raises:
        BrokerProblem: the broker does not take it.
    """
    found = re.search(r'server_name: "penstock-([^"]+)"', (data_dir / "nats.conf").read_text())
    assert found is not None
    write_passwords(data_dir, secrets, Subjects(found[1]))
    reload(data_dir)


async def connections(data_dir: Path, secrets: Mapping[str, str]) -> list[dict[str, Any]]:
    """The connections of the folder's broker, each with its ``authorized_user``.

    Raises:
        NatsError, TimeoutError, OSError: it does not answer.
    """
    port = int((data_dir / "nats.port").read_text())
    user = user_in_use(secrets, "sys")
    options: dict[str, Any] = {"allow_reconnect": False, "connect_timeout": ASK_S, "name": "passwords"}
    nc = await nats.connect(f"nats://127.0.0.1:{port}", user=user, password=secrets[user], **options)
    try:
        found: list[dict[str, Any]] = []
        while True:
            query = json.dumps({"auth": True, "limit": 1000, "offset": len(found)}).encode()
            page = json.loads((await nc.request("$SYS.REQ.SERVER.PING.CONNZ", query, timeout=ASK_S)).data)["data"]
            found += page["connections"]
            if not page["connections"] or len(found) >= page["total"]:
                return [each for each in found if each.get("name") != "passwords" and each.get("authorized_user")]
    finally:
        await nc.close()
