"""The generated nats-server configuration: a pure function from settings and secrets to text.

One account (``APP``) holds the application, with one user per role that may use only the subjects its role
needs; a second (``SYS``) hears connects and disconnects. A process of role ``r`` connects with the inbox prefix
``_INBOX_r``, so that no role can read another's replies.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.streams import MAX_PAYLOAD
from schemas.subjects import Subjects

ROLES = ("gateway", "router", "worker", "client", "operator")
USERS = (*ROLES, "sys")

# Each stream has its own max_bytes; the store's limit only must not be below their sum, for any number of namespaces.
STORE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may publish and subscribe; ``respond``: also once to the reply subject of what it received."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    respond: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the text depends on.

    Attributes:
        secrets: user -> password, one per entry of USERS.
        passwords_from_environment: the secrets are ``$NAME``s of variables that the server reads.
    """

    name: str
    port: int
    store_dir: str
    secrets: Mapping[str, str]
    subjects: Subjects
    monitor_port: int = 0
    jetstream: bool = True
    host: str = "127.0.0.1"
    passwords_from_environment: bool = False

    def password(self, user: str) -> str:
        """As it is written in the file."""
        return self.secrets[user] if self.passwords_from_environment else _quote(self.secrets[user])


def inbox_prefix(role: str) -> str:
    """What a process of this role passes to ``nats.connect(inbox_prefix=...)``; NATS clients keep the default."""
    return "_INBOX" if role == "client" else f"_INBOX_{role}"


def permissions(role: str, s: Subjects) -> Permissions | None:
    """The least a role needs; None: everything in its account."""
    inbox = f"{inbox_prefix(role)}.>"
    # Not a stream's content: limits and counts, to check at start that all is there and how far behind a reader is.
    look = ("$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.API.CONSUMER.INFO.>")
    match role:
        case "gateway":
            submit = s.stream("SUBMIT")
            return Permissions(
                publish=(
                    *(s.all("request"), s.cancel),
                    *("_INBOX.>", s.all("reply")),  # answers to NATS clients
                    *look,
                    *("$JS.API.DIRECT.GET.>", f"$JS.API.CONSUMER.MSG.NEXT.{submit}.gateway", f"$JS.ACK.{submit}.>"),
                    *_object_store(s.bucket("media")),
                    *_object_store(s.bucket("batches")),
                    *_object_read(s.bucket("results")),
                ),
                subscribe=(inbox, s.all("live")),
            )
        case "router":
            requests = s.stream("REQUESTS")
            return Permissions(
                publish=(
                    *(s.all("work"), s.all("tokens"), s.all("done"), s.all("ctl"), s.cancel),
                    f"$KV.{s.bucket('workers')}.>",  # to fence a dead worker
                    *look,
                    *("$JS.API.DIRECT.GET.>", f"$JS.API.CONSUMER.MSG.NEXT.{requests}.>", f"$JS.ACK.{requests}.>"),
                    *_object_store(s.bucket("snapshots")),
                ),
                subscribe=(inbox, s.all("live"), s.cancel),
            )
        case "worker":
            work = s.stream("WORK")
            consumer = tuple(f"$JS.API.CONSUMER.{verb}.{work}.>" for verb in ("CREATE", "DELETE", "MSG.NEXT"))
            return Permissions(
                publish=(
                    *(s.all("tokens"), s.all("done"), s.all("returned"), s.all("kv"), s.all("handoff")),
                    *(s.work(role, "*") for role in ("prefill", "decode", "aggregated")),  # to the next stage
                    s.all("ctl"),  # to the owner of its blocks
                    f"$KV.{s.bucket('workers')}.>",
                    *look,
                    *("$JS.API.DIRECT.GET.>", *consumer, f"$JS.ACK.{work}.>"),
                    *_object_read(s.bucket("media")),
                    *_object_store(s.bucket("results")),
                ),
                subscribe=(inbox, f"{s.namespace}.ctl.*", s.cancel, s.live(f"$KV.{s.bucket('workers')}.>")),
                respond=True,
            )
        case "client":
            return Permissions(publish=(s.all("submit"), s.cancel), subscribe=(inbox, s.all("reply")))
        case "operator" | "sys":
            return None
    raise ValueError(f"no such role: {role!r}")


def _object_read(bucket: str) -> tuple[str, ...]:
    """Reading an object is an ordered push consumer with flow control."""
    stream = f"OBJ_{bucket}"
    return (
        "$JS.API.STREAM.NAMES",
        f"$JS.API.CONSUMER.CREATE.{stream}",  # nats-py's ordered consumers have no name
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.FC.{stream}.>",
    )


def _object_store(bucket: str) -> tuple[str, ...]:
    """Reading and writing; replacing an object purges the old one's chunks."""
    return (f"$O.{bucket}.>", f"$JS.API.STREAM.PURGE.OBJ_{bucket}", *_object_read(bucket))


def render(config: ServerConfig) -> str:
    """The configuration file's text. It holds the passwords: keep it readable by its owner only."""
    monitor = f'http: "{config.host}:{config.monitor_port}"\n' if config.monitor_port else ""
    jetstream = ""
    if config.jetstream:
        # A stream that falls behind drops silently beyond its queue; the default of 100,000 messages is one
        # burst of a large fleet. max_consumers -1 means 1,000 unless told otherwise.
        jetstream = f"""
jetstream {{
  store_dir: {_quote(config.store_dir)}
  max_file_store: {STORE_BYTES}
  max_buffered_msgs: 1000000
  max_buffered_size: {512 << 20}
  limits {{ default_max_consumers: -1 }}
}}
"""
    users = "\n".join(_user(role, config.password(role), permissions(role, config.subjects)) for role in ROLES)
    return f"""# Generated by penstock at every start; edits are lost.
server_name: {_quote(config.name)}
host: "{config.host}"
port: {config.port}
{monitor}
max_payload: {MAX_PAYLOAD}
max_pending: {64 << 20}
write_deadline: "5s"

# A peer that answers two pings late is cut off: a hung process is noticed within 3 s.
ping_interval: "1s"
ping_max: 2
{jetstream}
system_account: SYS
accounts {{
  SYS {{
    users: [
{_user("sys", config.password("sys"), None)}
    ]
  }}
  APP {{
    jetstream: {"enabled" if config.jetstream else "disabled"}
    users: [
{users}
    ]
  }}
}}
"""


def _user(name: str, password: str, allowed: Permissions | None) -> str:
    rights = ""
    if allowed is not None:
        respond = '\n        allow_responses: { max: 1, expires: "1m" }' if allowed.respond else ""
        rights = f"""
      permissions: {{
        publish: {{ allow: {_list(allowed.publish)} }}
        subscribe: {{ allow: {_list(allowed.subscribe)} }}{respond}
      }}"""
    return f"      {{ user: {_quote(name)}, password: {password}{',' if rights else ''}{rights} }}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(_quote(subject) for subject in dict.fromkeys(subjects)) + "]"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
