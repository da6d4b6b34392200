"""What each role and each tenant may publish and subscribe, and why: only what it uses, by name where the name is known
in advance.

Permissions are the same for all processes of a role, and cover whole tokens of a subject. So the subjects of one worker
are open to all workers (see ``SHARED``): a client with a worker's password is trusted with the whole pool.

Besides the pipeline's processes and its clients there are roles of people and of what works for them: ``viewer`` sees
the state of everything and no content, ``reader`` the log with prompts and answers, ``planner`` and ``keys`` change
what their names say.

A tenant's account holds its users and its inboxes. The subjects of the NATS API lead from it into the pipeline's
account, with the tenant's name inserted, and back; no other subjects do.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.schemas.streams import memory_streams, topology
from penstock.schemas.subjects import MEMORY, Subjects, inbox_prefix

# An answer may take as long as a request's deadline; the reply subject expires when it has been silent for this long.
REPLY_S = "2h"


def exports(s: Subjects) -> str:
    """The block of the pipeline's account. It names no tenant, so that a new one does not change it."""
    n = s.namespace
    reply = f'response_type: "stream", response_threshold: "{REPLY_S}"'
    lines = (
        f'{{ service: "{n}.submit.*.>" }}',
        f'{{ service: "{n}.ask.*.>", {reply} }}',
        f'{{ service: "{n}.read.*", {reply} }}',
        f'{{ service: "{n}.cancel.*" }}',
        f'{{ stream: "{n}.answer.*.>" }}',
        f'{{ stream: "{n}.to.*.>" }}',
    )
    return "    exports: [\n" + "".join(f"      {line}\n" for line in lines) + "    ]\n"


def publishes(s: Subjects) -> tuple[str, ...]:
    """What a tenant's user may publish."""
    return s.all("submit"), s.all("ask"), f"{s.namespace}.read", s.cancel


def subscribes(s: Subjects) -> tuple[str, ...]:
    return s.all("answer"), s.all("reply"), "_INBOX.>"


def account(tenant: str, logins: Sequence[str], s: Subjects) -> str:
    """One tenant's account, with its users: one, or two while its password is being changed.

    Args:
        logins: how each user logs in, as it is written: ``user: "…", password: "…"`` or ``nkey: …``.
    """
    n = s.namespace
    services = (
        (f"{n}.submit.{tenant}.>", f"{n}.submit.>"),
        (f"{n}.ask.{tenant}.>", f"{n}.ask.>"),
        (f"{n}.read.{tenant}", f"{n}.read"),
        (f"{n}.cancel.{tenant}", s.cancel),
    )
    streams = (
        (f"{n}.answer.{tenant}.>", f"{n}.answer.>"),
        (s.mailbox(tenant, s.all("reply")), s.all("reply")),
        (s.mailbox(tenant, "_INBOX.>"), "_INBOX.>"),
    )
    imports = "".join(
        f'      {{ {kind}: {{ account: APP, subject: "{subject}" }}, to: "{to}" }}\n'
        for kind, pairs in (("service", services), ("stream", streams))
        for subject, to in pairs
    )
    users = "".join(_user(login, s) for login in logins)
    return f"""  T_{tenant.replace("-", "_")} {{
    imports: [
{imports}    ]
    users: [
{users}    ]
  }}
"""


def _user(login: str, s: Subjects) -> str:
    allow, listen = (", ".join(f'"{one}"' for one in list_) for list_ in (publishes(s), subscribes(s)))
    return f"""\
      {{ {login}, permissions: {{
        publish: {{ allow: [{allow}] }}
        subscribe: {{ allow: [{listen}] }}
      }}}}
"""


BROKER_ROLES = ("gateway", "router", "worker", "client", "viewer", "reader", "planner", "keys", "operator")
ADVISORIES = "$JS.EVENT.ADVISORY.API"
WHO = "$SYS.REQ.USER.INFO"  # the broker's answer is about the one who asks
# Each role has two users with the same rights, and each tenant: one can get a new password while the other is in use.
SECOND = "-2"
CONTENT = (
    "REQUESTS",
    "WORK",
    "TOKENS",
    "DONE",
    "KV",
    "HANDOFF",
    "SUBMIT",
    "BATCHES",
)  # streams that only ``reader`` may read
AUDITED = ("gateway", "router", "planner", "keys", "operator")  # who write entries of the audit log
CLIENT_KINDS = ("submit", "ask", "read", "cancel", "pass")  # subjects of NATS clients, and between gateways
CLASSES = ("interactive", "standard", "batch")

SHARED = (
    "A worker may publish tokens, terminal events and returns of any request, jobs to any worker, and any worker's "
    "registration: each is one user, and requests come to any of them. Attempts, leases and the one terminal event per "
    "request limit the harm of a faulty worker, not of a hostile one.",
    "A worker may pull and acknowledge another worker's jobs, and receive its control messages: consumers and subjects "
    "have the names of workers, which are made at start.",
    "A worker may not delete consumers, its own included: the broker removes one that was not used for 120 s.",
    "A gateway or router reads every subject of a stream that it may read: direct gets are allowed by stream only.",
    "A gateway may delete single messages of every tenant's submissions: those with no_store are erased. A rule of the "
    "broker's denies it for all streams of the pipeline itself, by their names.",
    "The operator may do everything but write entries of the audit log in the name of others, and delete that stream.",
    "A gateway may publish below `_R_.`, where the broker expects the answers of services.",
    "Who manages keys can make one for any tenant, also one that sees all tenants, and ask a gateway with it: `keys` "
    "reads no prompts on the broker, but decides who may over HTTP.",
)


class Right(NamedTuple):
    """One permission. ``why`` says what it is used for."""

    why: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()


class Permissions(NamedTuple):
    """What one user may publish and subscribe.

    Attributes:
        respond: it may also publish once to the reply subject of what it received.
        deny: what it may not publish although a wildcard in ``publish`` allows it.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    respond: bool = False
    deny: tuple[str, ...] = ()


def role_of(user: str) -> str:
    """The role of one of its two users."""
    return user.removesuffix(SECOND)


def in_all(each: Sequence[Permissions | None]) -> Permissions | None:
    """What one user may do in several namespaces."""
    known = [permitted for permitted in each if permitted is not None]
    if not known:
        return None
    publish, subscribe, deny = (
        tuple(dict.fromkeys(subject for permitted in known for subject in getattr(permitted, field)))
        for field in ("publish", "subscribe", "deny")
    )
    return Permissions(publish, subscribe, known[0].respond, deny)


def permissions(user: str, s: Subjects, nkeys: Mapping[str, str] | None = None) -> Permissions | None:
    """The least a role needs, for one of its users; None: everything in its account.

    Args:
        nkeys: public keys by user, the names under which the broker lists users with nkeys.
    """
    role, nkeys = role_of(user), nkeys or {}
    if role == "operator":
        names = (f"{each}{second}" for each in AUDITED for second in ("", SECOND))
        others = tuple(
            s.audit(nkeys.get(name, name)) for name in names if name != user and (not nkeys or name in nkeys)
        )
        return Permissions((">",), (">",), deny=(*others, f"$JS.API.STREAM.DELETE.{s.stream('AUDIT')}"))
    granted = rights(role, s, nkeys.get(user, user))
    if granted is None:
        return None
    publish = (subject for right in granted for subject in right.publish)
    subscribe = (subject for right in granted for subject in right.subscribe)
    return Permissions(
        tuple(dict.fromkeys(publish)),
        tuple(dict.fromkeys(subscribe)),
        respond=role in ("router", "worker"),
        deny=_not_submissions(s) if role == "gateway" else (),
    )


def rights(role: str, s: Subjects, user: str = "") -> tuple[Right, ...] | None:
    """In the order of the table in docs/roles.md; None: everything in its account.

    Args:
        user: one of the role's two, by its name at the broker; default: the first.
    Raises:
        ValueError: there is no such role.
    """
    inbox = Right("answers to its own requests", subscribe=(f"{inbox_prefix(role)}.>",))
    audits = Right("write its own entries of the audit log", (WHO, s.audit(user or role)))
    match role:
        case "gateway":
            return (inbox, audits, *_gateway(s))
        case "router":
            return (inbox, audits, *_router(s))
        case "worker":
            return (inbox, *_worker(s))
        case "client":
            return (Right("ask over NATS, in its tenant's account", publishes(s), subscribes(s)),)
        case "viewer":
            return (inbox, *_viewer(s))
        case "reader":
            viewed = Right("the same as a viewer", subscribe=(f"{inbox_prefix('viewer')}.>",))
            return (inbox, viewed, *_viewer(s), *_reader(s))
        case "planner":
            return (inbox, audits, *_planner(s))
        case "keys":
            return (inbox, audits, *_keys(s))
        case "operator" | "sys":
            return None
    raise ValueError(f"no such role: {role!r}")


def _gateway(s: Subjects) -> tuple[Right, ...]:
    requests = s.stream("REQUESTS")
    return (
        Right("accept and cancel requests", (s.all("request"), s.cancel)),
        Right("ask a router to delete a request", (s.erase,)),
        Right(
            "receive from NATS clients and other gateways",
            (),
            (*(s.all(kind) for kind in CLIENT_KINDS), f"{s.namespace}.read"),
        ),
        Right("answer NATS clients", (s.all("answer"), s.all("to"), s.all("pass"), "_R_.>")),
        Right("answer NATS clients in the pipeline's own account", ("_INBOX.>", s.all("reply"))),
        Right(
            "ask other gateways for the progress of answers, and reply",
            (s.progress("*"), f"{inbox_prefix('gateway')}.>"),
            (s.progress("*"),),
        ),
        Right("end reads whose reader reads elsewhere", (s.reading,), (s.reading,)),
        # A stream per tenant, and tenants come and go; the consumer of each is called "gateway".
        Right("take submissions", ("$JS.API.CONSUMER.MSG.NEXT.*.gateway", "$JS.ACK.*.gateway.>")),
        Right(
            "keep contents of requests with no_store in memory, and delete them",
            (f"{s.namespace}.{MEMORY}.>", *(f"$JS.API.STREAM.PURGE.{stream.name}" for stream in memory_streams(s))),
        ),
        _declares(s),
        Right("make their consumers again if they were deleted", ("$JS.API.CONSUMER.CREATE.*.gateway",)),
        Right("erase submissions that must not be stored", ("$JS.API.STREAM.MSG.DELETE.*",)),
        Right("recognise repeats", (f"$KV.{s.bucket('idempotency')}.>",)),
        Right("share the limits of API keys", (f"$KV.{s.bucket('budgets')}.*",)),
        Right(
            "refuse repeats of poisonous requests",
            (f"$KV.{s.bucket('verdicts')}.>", s.verdict),
            (s.verdict,),
        ),
        Right("choose between cells", (s.cost,), (s.loads,)),
        Right("tell routers which cells have room", (f"{inbox_prefix('router')}.>",), (s.room,)),
        Right(
            "run requests of one cell in another: their tokens, ends and returns, and cancellations",
            (s.all("tokens"), s.all("done"), s.all("returned")),
            (s.cancel,),
        ),
        Right("follow the log", (), (s.all("live"),)),
        _reads(*(stream.name for stream in memory_streams(s))),
        _reads(
            *(s.stream(name) for name in ("TOKENS", "REQUESTS", "DONE", "USAGE")), *_buckets(s, "workers", "tenants")
        ),
        _reads(*_buckets(s, "idempotency", "routers", "keys", "budgets", "verdicts", "deleted")),
        Right("have workers load and unload adapters", (f"$KV.{s.bucket('adapters')}.*",)),
        Right("have workers change their weights, sleep and wake", (f"$KV.{s.bucket('weights')}.*", s.drain("*"))),
        _reads(*_buckets(s, "adapters", "weights")),
        Right("read the length of the queue", (f"$JS.API.CONSUMER.INFO.{requests}.*",)),
        _stores(s.bucket("media")),
        Right(
            "run batches: their state, and the log of each, which is deleted once its files are made",
            (f"$KV.{s.bucket('batches')}.>", s.all("batches"), f"$JS.API.STREAM.PURGE.{s.stream('BATCHES')}"),
        ),
        _reads(s.stream("BATCHES"), *_buckets(s, "batches")),
        _stores(s.bucket("batches")),
        _fetches(s.bucket("results")),
    )


def _router(s: Subjects) -> tuple[Right, ...]:
    requests = s.stream("REQUESTS")
    consumers = tuple(f"router-{name}" for name in CLASSES)
    return (
        Right("write to the audit log what the broker says of others", (),
              (ADVISORIES, *(s.live(f"$KV.{s.bucket(name)}.>") for name in ("keys", "tenants")))),
        Right("take requests", (
            *(f"$JS.API.CONSUMER.MSG.NEXT.{requests}.{name}" for name in consumers),
            *(f"$JS.ACK.{requests}.{name}.>" for name in consumers),
        )),
        Right("make their consumers again if they were deleted", tuple(
            f"$JS.API.CONSUMER.CREATE.{requests}.{name}" for name in consumers
        )),
        Right("share models among routers", (f"$KV.{s.bucket('routers')}.*", s.all("routed")), (s.all("routed"),)),
        Right("return what a lost router had read", tuple(f"$JS.API.CONSUMER.INFO.{requests}.{c}" for c in consumers)),
        Right("say what requests cost here, where there are several cells", (s.loads,), (s.cost,)),
        Right("ask gateways which other cells have room", (s.room,)),
        Right("publish again what waits for long", (s.all("request"),)),
        Right("place them, fence lost attempts, end what cannot run", (s.all("work"), s.all("tokens"), s.all("done"))),
        Right("the same for requests with no_store", (f"{s.namespace}.{MEMORY}.>",)),
        _declares(s),
        _reads(*(stream.name for stream in memory_streams(s))),
        Right("ask workers for their blocks, and cancel", (s.all("ctl"), s.cancel), (s.cancel,)),
        Right("fence a dead worker", (f"$KV.{s.bucket('workers')}.*",)),
        Right("forget registrations that a killed broker brought back",
              (f"$JS.API.STREAM.PURGE.KV_{s.bucket('workers')}",)),
        Right("delete requests that gateways ask for",
              tuple(f"$JS.API.STREAM.MSG.DELETE.{s.stream(n)}" for n in ("REQUESTS", "WORK", "DONE")),
              (s.erase,)),
        Right("note which requests are deleted", (f"$KV.{s.bucket('deleted')}.*",)),
        Right("count what ended requests used", (s.all("usage"),)),
        Right("follow the log", (), (s.all("live"),)),
        _reads(*(s.stream(name) for name in ("REQUESTS", "WORK", "TOKENS", "KV", "DONE", "USAGE"))),
        _reads(*_buckets(s, "workers", "routers", "tenants", "deleted")),
        _stores(s.bucket("snapshots")),
    )  # fmt: skip


def _worker(s: Subjects) -> tuple[Right, ...]:
    work = s.stream("WORK")
    return (
        Right("publish its output", tuple(s.all(kind) for kind in ("tokens", "done", "returned", "kv", "handoff"))),
        Right("the same for requests with no_store, and ask their gateways whether they are there",
              (f"{s.namespace}.{MEMORY}.>", s.progress("*"))),
        _declares(s),
        _reads(*(stream.name for stream in memory_streams(s))),
        Right("hand off to the next stage", tuple(s.work(role, "*") for role in ("prefill", "decode", "aggregated"))),
        Right("exchange blocks, and receive control messages", (s.all("ctl"),),
              (f"{s.namespace}.ctl.*", s.drain("*"), s.cancel)),
        Right("be registered, and see the others", (f"$KV.{s.bucket('workers')}.*",),
              (s.live(f"$KV.{s.bucket('workers')}.>"),)),
        Right("take jobs from its own consumer", (
            f"$JS.API.CONSUMER.CREATE.{work}.*.{s.namespace}.work.*.*",  # with one filter: a worker's own subject
            f"$JS.API.CONSUMER.MSG.NEXT.{work}.*",
            f"$JS.ACK.{work}.>",
        )),
        Right("know whether the jobs' stream was lost and recreated", (f"$JS.API.STREAM.INFO.{work}",)),
        _reads(*_buckets(s, "workers")),
        Right("load the adapters and weights that operators name", (),
              tuple(s.live(f"$KV.{s.bucket(name)}.>") for name in ("adapters", "weights"))),
        _reads(*_buckets(s, "adapters", "weights")),
        _fetches(s.bucket("media")),
        _stores(s.bucket("results")),
    )  # fmt: skip


def _viewer(s: Subjects) -> tuple[Right, ...]:
    return (
        Right("see the broker's limits, and all streams' sizes and settings", ("$JS.API.INFO", *_infos(s))),
        _waiting(s),
        _reads(*_buckets(s, "workers", "routers"), *(s.stream(name) for name in ("PLAN", "AUDIT", "USAGE"))),
        Right("follow how requests end: times and counts, in headers without a body", (), (s.ended,)),
    )


def _reader(s: Subjects) -> tuple[Right, ...]:
    streams = tuple(s.stream(name) for name in CONTENT)
    return (
        _reads(*streams, *(stream.name for stream in memory_streams(s))),
        Right("see which requests wait and run", tuple(f"$JS.API.CONSUMER.LIST.{stream}" for stream in streams)),
        _reads(*_buckets(s, "exporters"), f"OBJ_{s.bucket('snapshots')}"),
        Right("keep how far traces are exported", (f"$KV.{s.bucket('exporters')}.*",)),
        _fetches(s.bucket("media")),
    )


def _planner(s: Subjects) -> tuple[Right, ...]:
    return (
        Right("see how long the queue and the log are", tuple(
            f"$JS.API.STREAM.INFO.{s.stream(name)}" for name in ("REQUESTS", "DONE")
        )),
        _waiting(s),
        _reads(*_buckets(s, "workers", "planners"), s.stream("PLAN")),
        Right("follow how requests end: times and counts, in headers without a body", (), (s.ended,)),
        Right("be the one planner of a model, and store its decisions",
              (f"$KV.{s.bucket('planners')}.*", s.all("plan"))),
        Right("have workers drain", (s.drain("*"),)),
    )  # fmt: skip


def _keys(s: Subjects) -> tuple[Right, ...]:
    return (
        Right("make, change and revoke API keys", (f"$KV.{s.bucket('keys')}.*",)),
        _reads(*_buckets(s, "keys", "tenants")),
        Right("see which models are served", _reads(*_buckets(s, "workers")).publish),
    )


def _infos(s: Subjects) -> tuple[str, ...]:
    return tuple(f"$JS.API.STREAM.INFO.{name}" for name in _all_streams(s))


def _all_streams(s: Subjects) -> tuple[str, ...]:
    whole = topology(s)
    return (
        *(stream.name for stream in whole.streams),
        *(f"KV_{bucket.name}" for bucket in whole.buckets),
        *(f"OBJ_{bucket.name}" for bucket in whole.objects),
    )


def _waiting(s: Subjects) -> Right:
    consumers = topology(s).consumers
    return Right("see how many requests wait", tuple(f"$JS.API.CONSUMER.INFO.{c.stream}.{c.name}" for c in consumers))


def _not_submissions(s: Subjects) -> tuple[str, ...]:
    """Deleting messages of any stream but those of submissions, which are made while the server runs, or reading them
    with a consumer of one's own."""
    submissions = [stream.name for stream in topology(s).streams if stream.queue]
    names = [name for name in _all_streams(s) if name not in submissions]
    names.append(f"KV_{s.bucket('accounts')}")  # of a broker of one's own: the tenants' passwords
    return (
        *(f"$JS.API.STREAM.MSG.DELETE.{name}" for name in names),
        *(f"$JS.API.CONSUMER.CREATE.{name}.gateway" for name in names),
    )


def _declares(s: Subjects) -> Right:
    return Right(
        "make the streams with memory storage again after a broker without a cluster has restarted",
        tuple(f"$JS.API.STREAM.CREATE.{stream.name}" for stream in memory_streams(s)),
    )


def _buckets(s: Subjects, *names: str) -> tuple[str, ...]:
    return tuple(f"KV_{s.bucket(name)}" for name in names)


def _reads(*streams: str) -> Right:
    """Look something up, also at the leader (a replica may lag), and know where the stream ends."""
    verbs = ("DIRECT.GET.{}", "DIRECT.GET.{}.>", "STREAM.MSG.GET.{}", "STREAM.INFO.{}")
    return Right(
        f"read {', '.join(streams)}", tuple(f"$JS.API.{verb.format(stream)}" for stream in streams for verb in verbs)
    )


def _fetches(bucket: str) -> Right:
    """Reading an object; NATS clients do it with an ordered push consumer with flow control."""
    stream = f"OBJ_{bucket}"
    consumer = (
        "$JS.API.STREAM.NAMES",
        f"$JS.API.CONSUMER.CREATE.{stream}",  # nats-py's ordered consumers have no name
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.FC.{stream}.>",
    )
    return Right(f"read objects of {bucket}", (*_reads(stream).publish, *consumer))


def _stores(bucket: str) -> Right:
    """Reading and writing; replacing an object purges the old one's chunks."""
    write = (f"$O.{bucket}.>", f"$JS.API.STREAM.PURGE.OBJ_{bucket}")
    return Right(f"read and write objects of {bucket}", (*write, *_fetches(bucket).publish))


def table(s: Subjects) -> str:
    """What docs/roles.md shows."""
    lines = ["| role | to | may publish | may subscribe |", "|---|---|---|---|"]
    for role in BROKER_ROLES:
        for right in rights(role, s) or (Right("administer: everything in the pipeline's account", (">",), (">",)),):
            publish, subscribe = (" ".join(f"`{name}`" for name in names) for names in (right.publish, right.subscribe))
            lines.append(f"| {role} | {right.why} | {publish or '–'} | {subscribe or '–'} |")
    return "\n".join(lines) + "\n\n" + "\n".join(f"- {text}" for text in SHARED) + "\n"
