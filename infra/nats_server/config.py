"""Generates the nats-server configuration: a pure function from settings and secrets to text.

The account ``APP`` holds the application. It has two users per role, which may use only the subjects that the role
needs. The account ``SYS`` sees connects and disconnects, and each tenant of the NATS API has an account of its own
(``accounts``). A process of role ``r`` connects with the inbox prefix ``_INBOX_r``, so that no role can read another's
replies.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.infra.nats_server.permissions import (
    BROKER_ROLES,
    SECOND,
    Permissions,
    account,
    exports,
    in_all,
    permissions,
    role_of,
)
from penstock.schemas.streams import MAX_PAYLOAD
from penstock.schemas.subjects import DEFAULT_TENANT, Subjects, cell_namespace

USERS = tuple(f"{role}{second}" for role in (*BROKER_ROLES, "sys") for second in ("", SECOND))

ROUTE, ROUTE_BEFORE = "route", "route_before"  # keys of secrets.json, once ``sys`` or ``route`` was changed

# Each stream has its own max_bytes. These limits only must not be below the sums of them, for any number of namespaces.
# By default, the server limits memory storage to three quarters of the machine's memory.
STORE_BYTES = 1 << 50
LAME_DUCK_S, LAME_DUCK_GRACE_S = 30, 5  # the shortest; the grace period ends when the first client is sent away
SYNC_S = 120  # between two syncs of the store, unless each write is synced; the server's default, made explicit
# A stream that falls behind silently drops what exceeds its queue. The default of 100,000 messages is a single burst of
# a large fleet.
BUFFERED_MESSAGES, BUFFERED_BYTES = 1_000_000, 512 << 20
CONSUMERS = -1  # per stream: unlimited; the default is 1,000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server's place in a cluster. All servers share name, secrets and routes; ``node`` and ``port`` differ.

    A server has its name as a tag, by which streams are placed on it (``penstock streams apply --placement-tags``).

    With passwords from the environment, ``node`` and each route are the ``$NAME`` of a variable that holds the server's
    name, or the route's URL.
    """

    name: str
    node: str
    port: int
    routes: tuple[str, ...]  # host:port of every server's cluster port
    advertise: str = ""  # this server's; "": servers tell each other the IP address that they see


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of the server's certificate and key, and of the authority that signs those of others, servers and users."""

    cert: str
    key: str
    ca: str

    def block(self, more: str = "") -> str:
        files = (("cert_file", self.cert), ("key_file", self.key), ("ca_file", self.ca))
        return "tls { " + ", ".join(f"{name}: {_quote(path)}" for name, path in files if path) + f"{more} }}"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that the text depends on.

    Attributes:
        sync_always: a publish is acknowledged once it is on the disk, not as soon as the operating system has it.
        cluster: None for a single server.
        secrets: passwords by user, one per entry of ``USERS``. ``client`` is the user of the tenant ``default``.
        tenants_file: the file with the tenants' accounts (``tenant_accounts``), to be included. Empty: only the account
            of ``default``, inline.
        passwords_from_environment: the secrets are ``$NAME``s of variables that the server reads.
        passwords_file: the file with the passwords (``passwords``), to be included, so that they can be changed alone.
            Empty: they are inline, or from the environment.
        nkeys: public keys by user. If there are any, only these users exist, and log in by their nkeys.
        client_certs: users log in with certificates that have their names as DNS names. One user per role is enough,
            since a certificate is replaced without a change here.
        cells: of the deployment that use the server. ``subjects`` are those of the first.
    """

    name: str
    port: int
    store_dir: str
    secrets: Mapping[str, str]
    subjects: Subjects
    monitor_port: int = 0
    monitor_host: str = "127.0.0.1"  # independent of ``host``, because it asks for no password
    jetstream: bool = True
    host: str = "127.0.0.1"
    passwords_from_environment: bool = False
    sync_always: bool = False
    cluster: Cluster | None = None
    tenants_file: str = ""
    tls: Tls | None = None
    lame_duck_s: int = 0
    passwords_file: str = ""
    nkeys: Mapping[str, str] = field(default_factory=dict)
    client_certs: bool = False
    cells: int = 1

    def users(self) -> list[str]:
        """In the order of ``USERS``."""
        if self.nkeys:
            return [user for user in USERS if user in self.nkeys]
        return [user for user in USERS if user == role_of(user) or not self.client_certs]

    def identity(self, user: str) -> str:
        """How a user logs in, as it stands in the file."""
        if self.nkeys:
            return f"nkey: {_quote(self.nkeys[user])}"
        return f"user: {_quote(user)}" + ("" if self.client_certs else f", password: {self.password(user)}")

    def password(self, user: str) -> str:
        """A user's password as it stands in the file."""
        if self.passwords_file:
            return f"${variable(user)}"
        return self.secrets[user] if self.passwords_from_environment else _quote(self.secrets[user])


def variable(user: str) -> str:
    """The name of the variable that holds a user's password."""
    return f"{user.upper().replace('-', '_')}_PASSWORD"


def passwords(secrets: Mapping[str, str]) -> str:
    """All passwords as variables, to be included at the beginning of a configuration."""
    return "".join(f"{variable(user)}: {_quote(secrets[user])}\n" for user in USERS if role_of(user) != "client")


def route_passwords(secrets: Mapping[str, str]) -> tuple[str, ...]:
    """The passwords among the servers of a cluster: the present one, and that of servers not restarted yet, if any."""
    before = secrets.get(ROUTE_BEFORE, "")
    return (secrets.get(ROUTE) or secrets["sys"], *([before] if before else []))  # at first, it is that of sys


def tenant_user(tenant: str) -> str:
    """The name of a tenant's user at the broker. No role's name begins like this."""
    return f"tenant-{tenant}"


def second_tenant_user(tenant: str) -> str:
    """The name of the tenant's second user. It cannot be the first user of any tenant."""
    return f"tenant2-{tenant}"


def render(config: ServerConfig) -> str:
    """The text of the configuration file. It holds passwords, so only its owner may read it."""
    monitor = f'http: "{config.monitor_host}:{config.monitor_port}"\n' if config.monitor_port else ""
    lame_duck = ""
    if config.lame_duck_s:  # the default is two minutes, for thousands of clients
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
    tls = f"{config.tls.block(', verify_and_map: true' if config.client_certs else '')}\n" if config.tls else ""
    included = f"include {_quote(config.passwords_file)}\n" if config.passwords_file else ""
    return f"""# Generated by penstock at every start; edits are lost.
{included}server_name: {_server_name(config)}
host: "{config.host}"
port: {config.port}
{tls}{monitor}{lame_duck}{_limits()}{jetstream}{_cluster(config)}
{_accounts(config)}"""


def included(config: ServerConfig) -> str:
    """Limits and accounts, which are the same for every server, to be included in a configuration of its own."""
    return f"{_limits()}\n{_accounts(config)}"


def _limits() -> str:
    return f"""\
max_payload: {MAX_PAYLOAD}
max_pending: {64 << 20}
write_deadline: "5s"

# A peer that misses two pings is disconnected, so a hung process is noticed within 3 s.
ping_interval: "1s"
ping_max: 2
"""


def _accounts(config: ServerConfig) -> str:
    cells = [Subjects(cell_namespace(config.subjects.namespace, cell)) for cell in range(config.cells)]

    def written(user: str) -> str:
        sys = role_of(user) == "sys"
        allowed = None if sys else in_all([permissions(user, each, config.nkeys) for each in cells])
        return (f"      # {user}\n" if config.nkeys else "") + _user(config.identity(user), allowed)

    users = "\n".join(written(user) for user in config.users() if role_of(user) not in ("client", "sys"))
    sys = "\n".join(written(user) for user in config.users() if role_of(user) == "sys")
    if config.tenants_file:
        accounts = f"  include {_quote(config.tenants_file)}\n"
    else:
        clients = [config.identity(user) for user in config.users() if role_of(user) == "client"]
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
        # A server accepts one password, and in each pair of servers one has to know what the other accepts. Servers are
        # restarted in the order of their routes: those before this one already accept the new password, and those after
        # it log in here with the new one. Trying both passwords at one server is no way out: the connections that it
        # refuses would displace good ones in nats-server's pool for good.
        new, *before = route_passwords(config.secrets)
        password = _quote(new)
        later = False
        urls = []
        for at in cluster.routes:
            urls.append(_quote(f"nats-route://route:{before[0] if before and later else new}@{at}"))
            later = later or cluster.node in (at, at.rpartition(":")[0])
        routes = ", ".join(urls)
    tls = f"  {config.tls.block()}\n" if config.tls else ""
    # Servers connect to every address that they hear of, and certificates are for names, not for IP addresses.
    advertise = f"  advertise: {_quote(cluster.advertise)}\n" if cluster.advertise else ""
    return f"""
server_tags: [{_server_name(config)}]
cluster {{
  name: {_quote(cluster.name)}
  listen: "{config.host}:{cluster.port}"
  authorization {{ user: "route", password: {password}, timeout: 5 }}
{advertise}{tls}  routes: [{routes}]
}}
"""


def tenant_accounts(client_passwords: tuple[str, str], passwords: Mapping[str, tuple[str, str]], s: Subjects) -> str:
    """The accounts of all tenants, ``default`` among them, to be included in the ``accounts`` block.

    Args:
        passwords: the passwords of each tenant's two users. An empty second one: the tenant has one user only.
    """
    clients = zip(("client", f"client{SECOND}"), client_passwords, strict=True)
    tenants = {DEFAULT_TENANT: [_by_password(user, password) for user, password in clients if password]}
    for name, both in passwords.items():
        users = zip((tenant_user(name), second_tenant_user(name)), both, strict=True)
        tenants[name] = [_by_password(user, password) for user, password in users if password]
    return "".join(account(name, logins, s) for name, logins in tenants.items())


def _by_password(user: str, password: str) -> str:
    return f"user: {_quote(user)}, password: {_quote(password)}"


def _user(identity: str, allowed: Permissions | None) -> str:
    rights = ""
    if allowed is not None:
        respond = '\n        allow_responses: { max: 1, expires: "1m" }' if allowed.respond else ""
        deny = f", deny: {_list(allowed.deny)}" if allowed.deny else ""
        rights = f"""
      permissions: {{
        publish: {{ allow: {_list(allowed.publish)}{deny} }}
        subscribe: {{ allow: {_list(allowed.subscribe)} }}{respond}
      }}"""
    return f"      {{ {identity}{',' if rights else ''}{rights} }}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(_quote(subject) for subject in dict.fromkeys(subjects)) + "]"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
