"""The generated nats-server configuration: a pure function from settings and secrets to text.

One account (``APP``) holds the application, with two users per role that may use only the subjects its role
needs; a second (``SYS``) sees connects and disconnects; each tenant of the NATS API has its own (``accounts``).
A process of role ``r`` connects with the inbox prefix ``_INBOX_r``, so that no role can read another's replies.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.infra.nats_server.permissions import (
    BROKER_ROLES,
    SECOND,
    Login,
    Permissions,
    account,
    exports,
    permissions,
    role_of,
)
from penstock.schemas.streams import MAX_PAYLOAD
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects

USERS = tuple(f"{role}{second}" for role in (*BROKER_ROLES, "sys") for second in ("", SECOND))

ROUTE, ROUTE_BEFORE = "route", "route_before"  # keys of secrets.json, once ``sys`` or ``route`` was changed

# Each stream has its own max_bytes; the limits of both kinds of storage only must not be below their sums, for any
# number of namespaces. The server's own default for memory storage is three quarters of the machine's memory.
STORE_BYTES = 1 << 50
LAME_DUCK_S, LAME_DUCK_GRACE_S = 30, 5  # the least; from the word that it stops to the first client sent away
SYNC_S = 120  # between two syncs of the store, unless it syncs always: the server's own default, made explicit
# A stream that falls behind drops silently beyond its queue; the default of 100,000 messages is one burst of a
# large fleet.
BUFFERED_MESSAGES, BUFFERED_BYTES = 1_000_000, 512 << 20
CONSUMERS = -1  # of a stream: unlimited, where the default is 1,000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server's place among others: the same name, secrets and all routes on each; ``node`` and ``port`` its own.

    With passwords from the environment, ``node`` is the ``$NAME`` of a variable with the server's name, and each route
    that of one with its URL.
    """

    name: str
    node: str
    port: int
    routes: tuple[str, ...]  # host:port of every server's cluster port
    advertise: str = ""  # that of this one; "": servers tell each other by which IP address they see it


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server's certificate, which clients verify, and of who signs those of the other servers."""

    cert: str
    key: str
    ca: str

    def block(self) -> str:
        files = (("cert_file", self.cert), ("key_file", self.key), ("ca_file", self.ca))
        return "tls { " + ", ".join(f"{name}: {_quote(path)}" for name, path in files if path) + " }"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the text depends on.

    Attributes:
        sync_always: a publish is acknowledged once it is on the disk, not only with the operating system.
        cluster: None: a server of its own.
        secrets: user -> password, one per entry of USERS. ``client`` is the user of the tenant ``default``.
        tenants_file: what to include for the tenants' accounts (``tenant_accounts``); empty: ``default`` alone, inline.
        passwords_from_environment: the secrets are ``$NAME``s of variables that the server reads.
        passwords_file: what to include for the passwords (``passwords``), so that they can be changed without the rest;
            empty: they are inline, or from the environment.
    """

    name: str
    port: int
    store_dir: str
    secrets: Mapping[str, str]
    subjects: Subjects
    monitor_port: int = 0
    monitor_host: str = "127.0.0.1"  # whatever ``host`` is: it asks for no password
    jetstream: bool = True
    host: str = "127.0.0.1"
    passwords_from_environment: bool = False
    sync_always: bool = False
    cluster: Cluster | None = None
    tenants_file: str = ""
    tls: Tls | None = None
    lame_duck_s: int = 0
    passwords_file: str = ""

    def password(self, user: str) -> str:
        """As it is written in the file."""
        if self.passwords_file:
            return f"${variable(user)}"
        return self.secrets[user] if self.passwords_from_environment else _quote(self.secrets[user])


def variable(user: str) -> str:
    """The variable with a user's password."""
    return f"{user.upper().replace('-', '_')}_PASSWORD"


def passwords(secrets: Mapping[str, str]) -> str:
    """The variables with all passwords, to be included at the beginning of a configuration."""
    return "".join(f"{variable(user)}: {_quote(secrets[user])}\n" for user in USERS if role_of(user) != "client")


def route_passwords(secrets: Mapping[str, str]) -> tuple[str, ...]:
    """With which the servers of a cluster log in to each other; the second one is that of servers not restarted yet."""
    before = secrets.get(ROUTE_BEFORE, "")
    return (secrets.get(ROUTE) or secrets["sys"], *([before] if before else []))  # until it is changed, that of sys


def tenant_user(tenant: str) -> str:
    """The broker's name for a tenant's user; role names have no such beginning."""
    return f"tenant-{tenant}"


def second_tenant_user(tenant: str) -> str:
    """The name of its other user; no tenant's first one is called so."""
    return f"tenant2-{tenant}"


def render(config: ServerConfig) -> str:
    """The configuration file's text. It holds the passwords: keep it readable by its owner only."""
    monitor = f'http: "{config.monitor_host}:{config.monitor_port}"\n' if config.monitor_port else ""
    lame_duck = ""
    if config.lame_duck_s:  # the server's own is two minutes, for thousands of clients
        lame_duck = f'lame_duck_duration: "{config.lame_duck_s}s"\nlame_duck_grace_period: "{LAME_DUCK_GRACE_S}s"\n'
    jetstream = ""
    if config.jetstream:
        jetstream = f"""
jetstream {{
  store_dir: {_quote(config.store_dir)}
  max_file_store: {STORE_BYTES}
  max_memory_store: {STORE_BYTES}
  sync_interval: {"always" if config.sync_always else f'"{SYNC_S}s"'}
  max_buffered_msgs: {BUFFERED_MESSAGES}
  max_buffered_size: {BUFFERED_BYTES}
  limits {{ default_max_consumers: {CONSUMERS} }}
}}
"""
    tls = f"{config.tls.block()}\n" if config.tls else ""
    included = f"include {_quote(config.passwords_file)}\n" if config.passwords_file else ""
    return f"""# Generated by penstock at every start; edits are lost.
{included}server_name: {_server_name(config)}
host: "{config.host}"
port: {config.port}
{tls}{monitor}{lame_duck}{_limits()}{jetstream}{_cluster(config)}
{_accounts(config)}"""


def included(config: ServerConfig) -> str:
    """What every server has, wherever it runs: its limits and accounts, for a configuration file that includes this."""
    return f"{_limits()}\n{_accounts(config)}"


def _limits() -> str:
    return f"""\
max_payload: {MAX_PAYLOAD}
max_pending: {64 << 20}
write_deadline: "5s"

# A peer that answers two pings late is cut off: a hung process is noticed within 3 s.
ping_interval: "1s"
ping_max: 2
"""


def _accounts(config: ServerConfig) -> str:
    app = (user for user in USERS if role_of(user) not in ("client", "sys"))
    users = "\n".join(_user(user, config.password(user), permissions(user, config.subjects)) for user in app)
    sys = "\n".join(_user(user, config.password(user), None) for user in USERS if role_of(user) == "sys")
    if config.tenants_file:
        accounts = f"  include {_quote(config.tenants_file)}\n"
    else:
        clients = [Login(user, config.password(user)) for user in USERS if role_of(user) == "client"]
        accounts = account(DEFAULT_TENANT, clients, config.subjects)
    return f"""\
system_account: SYS
accounts {{
  SYS {{
    users: [
{sys}
    ]
  }}
  APP {{
    jetstream: {"enabled" if config.jetstream else "disabled"}
    users: [
{users}
    ]
{exports(config.subjects)}  }}
{accounts}}}
"""


def _server_name(config: ServerConfig) -> str:
    if config.cluster is None:
        return _quote(config.name)
    return config.cluster.node if config.passwords_from_environment else _quote(config.cluster.node)


def _cluster(config: ServerConfig) -> str:
    if config.cluster is None:
        return ""
    cluster = config.cluster
    if config.passwords_from_environment:
        password, routes = config.password("sys"), ", ".join(cluster.routes)
    else:
        # A server takes one password, and of each pair one server has to know what the other takes. They are restarted
        # in the order of their routes: those before this one have the new password by then, and those after it come
        # with it to this one. With both passwords for a server, the connections that it refuses displace good ones of
        # nats-server's pool for good.
        new, *before = route_passwords(config.secrets)
        password = _quote(new)
        later = False
        urls = []
        for at in cluster.routes:
            urls.append(_quote(f"nats-route://route:{before[0] if before and later else new}@{at}"))
            later = later or cluster.node in (at, at.rpartition(":")[0])
        routes = ", ".join(urls)
    tls = f"  {config.tls.block()}\n" if config.tls else ""
    # A server connects to each address that it is told of, and certificates have names, not IP addresses.
    advertise = f"  advertise: {_quote(cluster.advertise)}\n" if cluster.advertise else ""
    return f"""
cluster {{
  name: {_quote(cluster.name)}
  listen: "{config.host}:{cluster.port}"
  authorization {{ user: "route", password: {password}, timeout: 5 }}
{advertise}{tls}  routes: [{routes}]
}}
"""


def tenant_accounts(client_passwords: tuple[str, str], passwords: Mapping[str, tuple[str, str]], s: Subjects) -> str:
    """The accounts of ``default`` and of all others, to be included in the ``accounts`` block.

    Args:
        passwords: of each tenant's two users; of the second "": it has one user only.
    """
    clients = zip(("client", f"client{SECOND}"), client_passwords, strict=True)
    tenants = {DEFAULT_TENANT: [Login(user, _quote(password)) for user, password in clients if password]}
    for name, both in passwords.items():
        users = zip((tenant_user(name), second_tenant_user(name)), both, strict=True)
        tenants[name] = [Login(user, _quote(password)) for user, password in users if password]
    return "".join(account(name, logins, s) for name, logins in tenants.items())


def _user(name: str, password: str, allowed: Permissions | None) -> str:
    rights = ""
    if allowed is not None:
        respond = '\n        allow_responses: { max: 1, expires: "1m" }' if allowed.respond else ""
        deny = f", deny: {_list(allowed.deny)}" if allowed.deny else ""
        rights = f"""
      permissions: {{
        publish: {{ allow: {_list(allowed.publish)}{deny} }}
        subscribe: {{ allow: {_list(allowed.subscribe)} }}{respond}
      }}"""
    return f"      {{ user: {_quote(name)}, password: {password}{',' if rights else ''}{rights} }}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(_quote(subject) for subject in dict.fromkeys(subjects)) + "]"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
