"""Streams, buckets and shared consumers as data; applied by ``penstock streams apply``, never deleted.

Streams keep acknowledged messages for replay. Limits of age and bytes delete messages: a full stream discards its
oldest. Publishers make sure that those belong to finished requests, and take no new work while a stream is nearly full.
Clients publish to SUBMIT directly, so it is a queue: the server refuses messages when it is full.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from penstock.schemas.cells import CELL
from penstock.schemas.subjects import DEFAULT_TENANT, MEMORY, Subjects
from penstock.schemas.tenants import MAX_PENDING
from penstock.schemas.wire import JSON, MSGPACK

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
WEEK = 7 * DAY
AUDIT_S = 90 * DAY
USAGE_S = 397 * DAY  # 13 months
BATCHES_S = 31 * DAY  # a day more than a batch may run, or a file be kept
MIB = 1 << 20
GIB = 1 << 30

MAX_PAYLOAD = 8 * MIB
LEAST_STREAM = 2 * MAX_PAYLOAD
HEADROOM = 4096  # the server counts headers too, and closes the connection beyond max_payload
# How long the unplaced requests of a lost router wait before another router gets them. Short, because a redelivered
# request costs little: its job is stored once, whichever router publishes it.
ROUTER_ACK_WAIT_S = 1.5
# Time after which another gateway continues the requests that a lost gateway carried between cells.
MIGRATION_ACK_WAIT_S = 3.0
LONGEST_DEADLINE_S = HOUR  # nothing unfinished is older than this
# Beyond its deadline, how long the content of a request with no_store stays in memory storage if no gateway deletes it.
MEMORY_GRACE_S = 60.0
# The margin when a timestamp from one machine is looked up among messages that another machine stored.
CLOCK_SKEW_NS = 2_000_000_000
_NS = 1_000_000_000
# Metadata of a stream: how its messages are encoded, and their kinds as `penstock schema` takes them, between spaces.
ENCODING = "penstock-encoding"
SCHEMA = "penstock-schema"
# Metadata of REQUESTS: gateways store prompts in as few bits as they need. Earlier builds cannot read that, so a stream
# has it from its creation, or from an operator (``penstock streams set REQUESTS --pack-prompts``).
PROMPTS, PACKED = "penstock-prompts", "packed"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream. ``live``: the server republishes stored messages, so that readers follow without a consumer.

    ``messages``: the kinds of its messages, as named by ``penstock schema``. ``packs``: see ``PROMPTS``.
    """

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    dedup_s: float = 2 * MINUTE
    live: tuple[str, str] | None = None  # (source subject, destination)
    live_headers_only: bool = False
    queue: bool = False  # acknowledged messages are deleted, a full stream refuses more; fixed when it is created
    memory: bool = False  # never on a disk; a full stream refuses more; gone when a server without a cluster restarts
    description: str = ""
    lasting: bool = False  # messages leave it only by its limits: none can be deleted
    refuses: bool = False  # a full stream refuses more, rather than discard its oldest
    newest_only: bool = False  # a message replaces the one before on its subject
    messages: tuple[str, ...] = ()
    encoding: str = MSGPACK  # media type
    packs: bool = False


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One key-value bucket. A key that is not renewed within its own TTL expires and leaves a marker.

    ``messages``: as in ``StreamSpec``; empty: its values are for Penstock alone.
    """

    name: str
    live: tuple[str, str] | None = None
    marker_ttl_s: float = 1.0
    max_bytes: int = 64 * MIB
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    name: str
    max_age_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """One durable pull consumer shared by all replicas of a role."""

    stream: str
    name: str
    filter_subjects: tuple[str, ...]
    ack_wait_s: float
    max_ack_pending: int = 20_000


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything that must exist on the server."""

    streams: tuple[StreamSpec, ...]
    buckets: tuple[BucketSpec, ...]
    objects: tuple[ObjectSpec, ...]
    consumers: tuple[ConsumerSpec, ...]
    subjects: Subjects = field(default_factory=Subjects)

    @property
    def reserved_bytes(self) -> int:
        """The upper limit of the store's size."""
        files = (stream for stream in self.streams if not stream.memory)
        parts: tuple[StreamSpec | BucketSpec | ObjectSpec, ...] = (*files, *self.buckets, *self.objects)
        return sum(part.max_bytes for part in parts)

    @property
    def reserved_memory(self) -> int:
        """The upper limit of what lies in memory storage, in bytes."""
        return sum(stream.max_bytes for stream in self.streams if stream.memory)


def limits_bytes(topology: Topology) -> int:
    """What the streams on file may grow to, all together."""
    streams = sum(spec.max_bytes for spec in topology.streams if not spec.memory)
    return streams + sum(b.max_bytes for b in topology.buckets) + sum(o.max_bytes for o in topology.objects)


def scaled(topology: Topology, size_bytes: int) -> Topology:
    """A topology whose streams on file take about this many bytes together, each the same share as before.

    Buckets of keys keep their size: they are small, and a full one refuses.

    Raises:
        ValueError: that is too little; the text says the least.
    """
    fixed = sum(bucket.max_bytes for bucket in topology.buckets)
    parts: list[StreamSpec | ObjectSpec] = [stream for stream in topology.streams if not stream.memory]
    parts += topology.objects
    least = fixed + len(parts) * LEAST_STREAM
    if size_bytes < least:
        raise ValueError(f"the streams take at least {least / GIB:.1f} GiB together, not {size_bytes / GIB:g}")
    left, shared = size_bytes - fixed, sorted(part.max_bytes for part in parts)
    while shared[0] * left < LEAST_STREAM * sum(shared):  # the small ones have the least, and the others share the rest
        left -= LEAST_STREAM
        del shared[0]
    factor = left / sum(shared)

    def size(old: int) -> int:
        return max(LEAST_STREAM, int(old * factor) // MIB * MIB)

    streams = tuple(each if each.memory else replace(each, max_bytes=size(each.max_bytes)) for each in topology.streams)
    objects = tuple(replace(each, max_bytes=size(each.max_bytes)) for each in topology.objects)
    return replace(topology, streams=streams, objects=objects)


def divided(topology: Topology, cells: int) -> Topology:
    """The topology of one of several cells, whose streams take together what those of one cell would."""
    if cells == 1:
        return topology
    parts = [bucket.max_bytes for bucket in topology.buckets] + [each.max_bytes for each in topology.objects]
    parts += [stream.max_bytes for stream in topology.streams if not stream.memory]
    least = sum(bucket.max_bytes for bucket in topology.buckets) + len(parts) * LEAST_STREAM
    part = scaled(topology, max(least, sum(parts) // cells))

    def smaller(stream: StreamSpec) -> StreamSpec:
        return replace(stream, max_bytes=max(LEAST_STREAM, stream.max_bytes // cells)) if stream.memory else stream

    return replace(part, streams=tuple(map(smaller, part.streams)))


def submissions(
    s: Subjects, tenant: str = DEFAULT_TENANT, max_pending: int = MAX_PENDING
) -> tuple[StreamSpec, ConsumerSpec]:
    """A tenant's submissions. Each has its own stream: deduplication is per stream, and a flood fills only one."""
    default = tenant == DEFAULT_TENANT
    name = s.stream("SUBMIT") if default else f"{s.stream('SUBMIT')}_{tenant}"
    own = f"{s.namespace}.submit.{tenant}.>"
    stream = StreamSpec(
        name,
        # The second subject is for clients in the pipeline's own account, where the broker has no accounts per tenant.
        (own, f"{s.namespace}.submit.*") if default else (own,),
        max_age_s=DAY,
        max_bytes=GIB,
        dedup_s=0.1,  # the shortest possible: for a day, gateways themselves decide by Nats-Msg-Id what a repeat means
        queue=True,
        description="OpenAI bodies from NATS clients",
        messages=("ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest"),
        encoding=JSON,
    )
    pending = min(max_pending, MAX_PENDING)
    return stream, ConsumerSpec(name, "gateway", (s.all("submit"),), ack_wait_s=5, max_ack_pending=pending)


def topology(s: Subjects, *, record: bool = False) -> Topology:
    """Everything of one namespace. ``record``: keep all that a replay needs as long as records."""

    def followed(name: str, *messages: str) -> BucketSpec:
        keys = f"$KV.{s.bucket(name)}.>"
        return BucketSpec(s.bucket(name), live=(keys, s.live(keys)), messages=messages)

    submit, gateways = submissions(s)
    return Topology(
        streams=(submit, *_streams(s, record), *memory_streams(s)),
        buckets=(
            followed("workers", "Registration"),
            followed("routers", "Member"),
            followed("tenants", "Limits"),
            followed("keys", "ApiKey"),
            followed("budgets", "Ledger"),
            followed("verdicts"),
            BucketSpec(s.bucket("idempotency")),
            followed("batches", "StoredFile", "Batch"),
            replace(followed("adapters", "AdapterEntry"), max_bytes=4 * MIB),
            replace(followed("weights", "WeightsEntry"), max_bytes=MIB),
            replace(followed("deleted", "Deletion"), max_bytes=8 * MIB),  # 60,000 requests of half an hour
            BucketSpec(s.bucket("planners"), max_bytes=MIB),
            BucketSpec(s.bucket("exporters"), max_bytes=MIB),
        ),
        objects=(
            # A request may name an object up to half the object's age limit later, and then run this long.
            ObjectSpec(s.bucket("media"), 2 * HOUR + 5 * MINUTE, 4 * GIB),
            ObjectSpec(s.bucket("snapshots"), DAY, GIB),
            ObjectSpec(s.bucket("batches"), BATCHES_S, 2 * GIB),  # files that clients upload, and results of batches
            ObjectSpec(s.bucket("results"), 6 * HOUR, 7 * GIB),  # images and videos, until they are fetched
        ),
        consumers=(*_router_consumers(s), gateways, _migrating(s)),
        subjects=s,
    )


def memory_streams(s: Subjects) -> tuple[StreamSpec, StreamSpec]:
    """The contents and the output of requests with ``no_store``. What is left in them expires."""
    contents, tokens = s.all(f"{MEMORY}.contents"), s.all(f"{MEMORY}.tokens")
    return (
        StreamSpec(
            s.stream("MEMORY_CONTENTS"),
            (contents,),
            2 * HOUR + 5 * MINUTE,
            GIB,
            memory=True,
            description="content of requests with no_store",
            messages=("GenerateRequest", "Job", "Encoded", "Prefilled"),
        ),
        StreamSpec(
            s.stream("MEMORY_TOKENS"),
            (tokens,),
            2 * HOUR + 5 * MINUTE,
            GIB // 2,
            live=(tokens, s.live(tokens)),
            memory=True,
            description="token output of requests with no_store",
            messages=("TokenBatch",),
        ),
    )


def stream_config(spec: StreamSpec, replicas: int = 1) -> dict[str, Any]:
    """A stream as the JetStream API takes it."""
    config = common_config(spec.name, spec.subjects, spec.max_bytes, replicas)
    config["description"] = spec.description
    config["max_age"] = int(spec.max_age_s * _NS)
    config["duplicate_window"] = int(min(spec.dedup_s, spec.max_age_s) * _NS)
    if spec.queue:
        config |= {"retention": "workqueue", "discard": "new"}
    if spec.memory:
        config |= {"storage": "memory", "discard": "new", "allow_msg_ttl": True}
    if spec.refuses:
        config["discard"] = "new"
    if spec.newest_only:
        config["max_msgs_per_subject"] = 1
    if spec.lasting:
        config |= {"deny_delete": True, "deny_purge": True}
    if spec.live:
        config["republish"] = republish(spec.live, spec.live_headers_only)
    config |= schema_metadata(spec.messages, spec.encoding)
    if spec.packs:
        config["metadata"] |= {PROMPTS: PACKED}
    return config


def schema_metadata(messages: tuple[str, ...], encoding: str = MSGPACK) -> dict[str, Any]:
    """What a stream's configuration says of its messages."""
    return {"metadata": {ENCODING: encoding, SCHEMA: " ".join(messages)}} if messages else {}


# The server's defaults, named so that `streams apply` takes back a limit that somebody has set. With one, a stream
# would refuse records, or discard requests that no router has read.
UNLIMITED = {"max_msgs": -1, "max_msgs_per_subject": -1, "max_msg_size": -1}


def common_config(name: str, subjects: tuple[str, ...], max_bytes: int, replicas: int) -> dict[str, Any]:
    """What all streams have, those behind buckets included."""
    return {
        "name": name,
        "subjects": list(subjects),
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_bytes": max_bytes,
        **UNLIMITED,
        "num_replicas": replicas,
        "allow_direct": True,
    }


def republish(live: tuple[str, str], headers_only: bool) -> dict[str, Any]:
    return {"src": live[0], "dest": live[1]} | ({"headers_only": True} if headers_only else {})


def _streams(s: Subjects, record: bool) -> tuple[StreamSpec, ...]:
    """The streams that the pipeline's own processes publish to."""
    day, hour = (WEEK, WEEK) if record else (DAY, HOUR)

    def stream(name: str, *kinds: str, age: float, size: int, **more: object) -> StreamSpec:
        return StreamSpec(s.stream(name), tuple(s.all(k) for k in kinds), age, size, **more)  # type: ignore[arg-type]

    def live(kind: str) -> tuple[str, str]:
        return s.all(kind), s.live(s.all(kind))

    return (
        stream(
            "REQUESTS",
            "request",
            age=WEEK,  # records lack their prompts
            size=4 * GIB,
            description="accepted requests",
            messages=("GenerateRequest", "PackedRequest"),
            packs=True,
        ),
        stream(
            "WORK",
            "work",
            age=day,
            size=3 * GIB,
            live=live("work"),
            live_headers_only=True,
            description="jobs with the decisions behind them",
            messages=("Job", "Encoded", "Prefilled", "Revoke"),
        ),
        stream("KV", "kv", age=hour, size=GIB, live=live("kv"), description="KV-cache events", messages=("KvBatch",)),
        stream(
            "HANDOFF",
            "handoff",
            age=HOUR,
            size=GIB // 4,
            description="ledger of blocks handed between workers",
            messages=("Handoffs",),
        ),
        stream("PLAN", "plan", age=WEEK, size=GIB // 16, description="decisions of planners", messages=("Planned",)),
        stream(
            "AUDIT",
            "audit",
            age=AUDIT_S,
            size=GIB // 16,
            lasting=True,
            description="who changed what, and read what of others",
            messages=("AuditEntry",),
        ),
        stream(
            "USAGE",
            "usage",
            age=USAGE_S,
            size=GIB // 2,
            live=live("usage"),
            newest_only=True,
            description="what requests used: hourly sums",
            messages=("UsagePart",),
        ),
        stream(
            "BATCHES",
            "batches",
            age=BATCHES_S,
            size=3 * GIB // 8,
            refuses=True,
            description="requests and results of the lines of batches",
            messages=("BatchOpened", "BatchTaken", "BatchResults"),
        ),
        stream(
            "TOKENS",
            "tokens",
            age=hour,
            size=4 * GIB,
            live=live("tokens"),
            description="token output",
            messages=("TokenBatch",),
        ),
        StreamSpec(
            s.stream("DONE"),
            (s.all("done"), s.all("returned")),
            WEEK,
            3 * GIB,
            live=(f"{s.namespace}.>", f"{s.namespace}.live.>"),
            live_headers_only=True,
            description="terminal events, each the record of its request",
            messages=("Done", "Returned"),
        ),
    )


def _migrating(s: Subjects) -> ConsumerSpec:
    """Of jobs that run in other cells: gateways take them there."""
    return ConsumerSpec(s.stream("WORK"), "gateway", (s.work(CELL, "*"),), MIGRATION_ACK_WAIT_S)


def _router_consumers(s: Subjects) -> tuple[ConsumerSpec, ...]:
    return tuple(
        ConsumerSpec(
            s.stream("REQUESTS"),
            f"router-{c}",
            (f"{s.namespace}.request.*.{c}.*",),
            ROUTER_ACK_WAIT_S,
        )
        for c in ("interactive", "standard", "batch")
    )
