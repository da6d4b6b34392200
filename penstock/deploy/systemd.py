"""``penstock systemd``: units of systemd for one process of each role, and the files with their broker URLs."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlsplit

from msgspec import Meta, Struct

from penstock.configs.flags import BadFlags, Parser, read
from penstock.configs.settings import Common, GatewaySettings, RouterSettings, WorkerSettings, about
from penstock.infra.nats_server.config import USERS
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.nats_server.permissions import BROKER_ROLES
from penstock.infra.nats_server.server import GARBAGE, GARBAGE_VARIABLE
from penstock.infra.nats_server.tenants import user_in_use
from penstock.launch.nats import CLIENTS_PORT, ROUTES_PORT
from penstock.schemas.control import DRAINED
from penstock.schemas.subjects import Namespace

OK, USAGE = 0, 2
GRACE_S = 15  # from the end of a drain to SIGKILL; processes end 4.5 s after it by themselves
LAME_DUCK_S = 150  # nats-server's own bound is 2 minutes
_NO_RESTART = 2  # a wrong flag or file: another start fails as well
CONFIG = "/etc/penstock"


class Role(NamedTuple):
    """``files``: open files that it may have at once."""

    settings: type[Common]
    about: str
    user: str
    files: int = 65536


USER_ROLES = tuple(role for role in BROKER_ROLES if role != "client")  # a client's user is its tenant's
ROLES: Mapping[str, Role] = {
    "router": Role(RouterSettings, "places requests", "router"),
    "gateway": Role(GatewaySettings, "OpenAI-compatible API", "gateway"),
    "worker": Role(WorkerSettings, "runs a model", "worker"),
}


class Where(Struct, frozen=True, kw_only=True):
    """What a unit names of its machine. ``instances``: it is a template, and ``%i`` the name of an instance."""

    program: str
    user: str = "penstock"
    instances: bool = False


class Urls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock systemd env``."""

    data_dir: Annotated[str, about("folder with the broker's passwords, as of `penstock nats --print-config`")] = (
        "./operator"
    )
    servers: Annotated[
        tuple[str, ...], about("the broker's servers, comma-separated, as HOST or HOST:PORT (of clients; 4222)")
    ] = ()
    ca: Annotated[str, about("file with the authority of the servers' certificates; without it there is no TLS")] = ""
    namespace: Annotated[Namespace, Meta(description="prefix of all subjects and streams")] = "ps"


def run(argv: Sequence[str]) -> int:
    """Print a unit, or the variables of a role."""
    parser = Parser(
        prog="penstock systemd",
        description="a unit for one process, printed: the role's own flags are checked and go into it. `env` prints "
        "the file of variables that it reads, with the broker's URLs; `nats` is for a nats-server of your own",
    )
    parser.add_argument("what", choices=[*ROLES, "nats", "env"])
    parser.add_argument("--user", default="penstock", help="that the process runs as (default: %(default)s)")
    parser.add_argument("--instances", action="store_true", help="a template: %%i in flags is the instance's name")
    parser.add_argument("--config", default="/etc/nats/nats.conf", help="of nats (default: %(default)s)")
    parser.add_argument("--program", default="", help="default: the absolute path of this penstock, or of nats-server")
    args, rest = parser.parse_known_args(argv)
    if args.what == "nats":
        args, rest = parser.parse_args(argv), []  # it has no flags but these
    try:
        print(_made(args, rest), end="")
    except (BadFlags, ValueError) as error:
        print(f"penstock systemd {args.what}: {error}", file=sys.stderr)
        return USAGE
    return OK


def _made(args: argparse.Namespace, rest: Sequence[str]) -> str:
    if args.what == "env":
        if any(each.partition("=")[0] == "--cluster" for each in rest):
            raise ValueError(
                "--cluster: of `penstock nats`, with ports among servers; --servers names those of clients"
            )
        role, *flags = rest or [""]
        return env_file(role, read(Urls, flags))
    program = args.program or _found("nats-server" if args.what == "nats" else "penstock")
    where = Where(program=program, user=args.user, instances=args.instances)
    return nats_unit(where, args.config) if args.what == "nats" else unit(args.what, rest, where)


def _found(name: str) -> str:
    """Beside the running command, as it was called, so that a link to an installation stays one; beside the
    interpreter, where pip puts both; else on the PATH.
    """
    for beside in (sys.argv[0], sys.executable):
        path = Path(beside).absolute().with_name(name)
        if os.access(path, os.X_OK) and path.is_file():
            return str(path)
    found = shutil.which(name)
    if not found:
        raise ValueError(
            f"--program: no {name} beside this command, beside {sys.executable} or on the PATH; "
            "name the one that is to run"
        )
    return str(Path(found).absolute())


def unit(name: str, argv: Sequence[str], where: Where) -> str:
    """The unit of a gateway, router or worker.

    Args:
        argv: the role's flags. Without ``--name``, it is the host's, and of a template the instance's, too.

    Raises:
        ValueError: as ``_made``.
    """
    role = ROLES[name]
    # Of a template, numbers are known per instance only.
    settings = read(role.settings, [word.replace("%i", "1") if where.instances else word for word in argv])
    if any(urlsplit(url).password for url in settings.nats_url.split(",")):
        raise ValueError(f"--nats-url: others may read units; write PENSTOCK_NATS_URL to {CONFIG}/{name}.env")
    drain_s = float(getattr(settings, "drain_s", 0.0))
    stay_down = [_NO_RESTART, *([DRAINED] if name == "worker" else [])]
    files = [f"EnvironmentFile={CONFIG}/{name}.env"]
    if not settings.name:  # files of variables, and flags, go before it; %l is the host's name without its domain
        files.insert(0, f"Environment=PENSTOCK_NAME={name}-%l{'-%i' if where.instances else ''}")
    if where.instances:
        files.append(f"EnvironmentFile=-{CONFIG}/{name}-%i.env")
    lines = [
        # Nothing fails without the broker: processes wait for it, and are started again until it is there.
        *_head(f"Penstock {name}{' %i' if where.instances else ''}: {role.about}", " penstock-nats.service"),
        "[Service]",
        "Type=exec",
        f"User={where.user}",
        *files,
        f"ExecStart={' '.join(map(_quoted, [where.program, name, *argv]))}",
        # The worker notes there what it runs, and the gateway that keys existed.
        f"StateDirectory=penstock/{name}{'-%i' if where.instances else ''}",
        "StateDirectoryMode=0700",
        "# SIGTERM drains. Processes of an engine get no signal of their own before they are left over.",
        "KillMode=mixed",
        f"TimeoutStopSec={drain_s + GRACE_S:g}",
        "Restart=always",
        "RestartSec=2",
        f"RestartPreventExitStatus={' '.join(map(str, stay_down))}",
        f"LimitNOFILE={role.files}",
        *(["# memory for RDMA is pinned", "LimitMEMLOCK=infinity"] if name == "worker" else []),
        *_sandbox(),
    ]
    return "\n".join(lines)


def nats_unit(where: Where, config: str) -> str:
    """The unit of a nats-server with a configuration of its own."""
    lines = [
        *_head("nats-server, the broker of Penstock", ""),
        "[Service]",
        "Type=exec",
        f"User={where.user}",
        "# GOMEMLIMIT: about half of the memory",
        f"Environment={GARBAGE_VARIABLE}={GARBAGE}",
        f"EnvironmentFile=-{CONFIG}/nats.env",
        f"ExecStart={_quoted(where.program)} -c {_quoted(config)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# Lame duck: it hands its leaders over and sends its clients away, one after the other.",
        "KillSignal=SIGUSR2",
        f"TimeoutStopSec={LAME_DUCK_S}",
        "StateDirectory=nats",
        "StateDirectoryMode=0700",
        "Restart=always",
        "RestartSec=2",
        "LimitNOFILE=800000",
        *_sandbox(),
    ]
    return "\n".join(lines)


def _head(text: str, after: str) -> list[str]:
    return [
        "# Made by `penstock systemd`.",
        "[Unit]",
        f"Description={text}",
        "Wants=network-online.target",
        f"After=network-online.target{after}",
        "StartLimitIntervalSec=0",
        "",
    ]


def _sandbox() -> list[str]:
    return [
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=full",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]


def _quoted(word: str) -> str:
    """As systemd reads it: ``%i`` is kept, a ``$`` is none of a variable."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    plain = word and all(char.isalnum() or char in "/._-=:,%+@$" for char in word)
    return escaped if plain else f'"{escaped}"'


def env_file(name: str, urls: Urls) -> str:
    """The variables of a role: where its broker is, with its password.

    Args:
        name: a role of the broker's users.

    Raises:
        ValueError: there is no such role, or no password for it.
    """
    if name not in USER_ROLES:
        raise ValueError(f"env: of which role? {', '.join(USER_ROLES)}")
    if not urls.servers:
        raise ValueError("--servers: name the broker's servers, as HOST or HOST:PORT")
    if own := [each for each in urls.servers if each.endswith(f":{ROUTES_PORT}")]:
        raise ValueError(
            f"--servers: {own[0]} is the port among servers (`penstock nats --cluster`); clients use {CLIENTS_PORT}"
        )
    file = Path(urls.data_dir) / "secrets.json"
    if not file.is_file():
        raise ValueError(f"--data-dir: {file} does not exist; `penstock nats --print-config` makes it")
    secrets = load_secrets(file, USERS)
    lines = ["# Made by `penstock systemd env`. It holds a password."]
    lines.append(f"PENSTOCK_NATS_URL={_urls(user_in_use(secrets, name), secrets, urls)}")
    if name == "router":  # sees at once whose connection is gone
        lines.append(f"PENSTOCK_SYS_NATS_URL={_urls(user_in_use(secrets, 'sys'), secrets, urls)}")
    if urls.ca:
        lines.append(f"PENSTOCK_NATS_CA={urls.ca}")
    if urls.namespace != "ps":
        lines.append(f"PENSTOCK_NAMESPACE={urls.namespace}")
    return "\n".join([*lines, ""])


def _urls(user: str, secrets: Mapping[str, str], urls: Urls) -> str:
    scheme = "tls" if urls.ca else "nats"
    hosts = [each if ":" in each else f"{each}:{CLIENTS_PORT}" for each in urls.servers]
    return ",".join(f"{scheme}://{user}:{quote(secrets[user], safe='')}@{host}" for host in hosts)
