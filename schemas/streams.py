"""Streams, buckets and shared consumers as data; applied by ``penstock streams apply``, never deleted.

Retention is by limits (replay is a feature): acks delete nothing, age and bytes do.
"""

from dataclasses import dataclass, field

from schemas.subjects import Subjects

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
MIB = 1 << 20
GIB = 1 << 30

MAX_PAYLOAD = 8 * MIB
HEADROOM = 4096  # the server counts headers too; beyond max_payload it cuts the connection
LONGEST_DEADLINE_S = HOUR  # nothing unfinished is older than this


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream. ``live``: republish what was stored, so that readers without a consumer can follow."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    dedup_s: float = 2 * MINUTE
    live: tuple[str, str] | None = None  # (source subject, destination)
    live_headers_only: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One key-value bucket; a key that is not renewed within its own TTL leaves a marker."""

    name: str
    live: tuple[str, str]
    marker_ttl_s: float = 1.0
    max_bytes: int = 64 * MIB


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
    filter_subject: str
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
        """Upper bound of what the store will hold."""
        parts: tuple[StreamSpec | BucketSpec | ObjectSpec, ...] = (*self.streams, *self.buckets, *self.objects)
        return sum(part.max_bytes for part in parts)


def topology(s: Subjects) -> Topology:
    """The streams of one namespace."""

    def stream(name: str, *kinds: str, age: float, size: int, **more: object) -> StreamSpec:
        return StreamSpec(s.stream(name), tuple(s.all(k) for k in kinds), age, size, **more)  # type: ignore[arg-type]

    def live(kind: str) -> tuple[str, str]:
        return s.all(kind), s.live(s.all(kind))

    streams = (
        stream("SUBMIT", "submit", age=DAY, size=GIB, description="OpenAI bodies from NATS clients"),
        stream("REQUESTS", "request", age=DAY, size=4 * GIB, description="accepted requests"),
        stream(
            "WORK",
            "work",
            age=DAY,
            size=4 * GIB,
            live=live("work"),
            live_headers_only=True,
            description="jobs with the decisions behind them",
        ),
        stream("KV", "kv", age=HOUR, size=GIB, live=live("kv"), description="KV-cache events"),
        stream("HANDOFF", "handoff", age=HOUR, size=GIB // 4, description="ledger of blocks handed between workers"),
        stream("TOKENS", "tokens", age=HOUR, size=4 * GIB, live=live("tokens"), description="token output"),
        StreamSpec(
            s.stream("DONE"),
            (s.all("done"), s.all("returned")),
            7 * DAY,
            4 * GIB,
            dedup_s=5 * MINUTE,
            live=(f"{s.namespace}.>", f"{s.namespace}.live.>"),
            description="terminal events",
        ),
    )
    workers = s.bucket("workers")
    buckets = (BucketSpec(workers, live=(f"$KV.{workers}.>", s.live(f"$KV.{workers}.>"))),)
    objects = (
        # A request that names an object may be as old as the object's half life, and then run this long.
        ObjectSpec(s.bucket("media"), 2 * HOUR + 5 * MINUTE, 4 * GIB),
        ObjectSpec(s.bucket("snapshots"), DAY, GIB),
        ObjectSpec(s.bucket("batches"), 7 * DAY, 4 * GIB),
        ObjectSpec(s.bucket("results"), 6 * HOUR, 8 * GIB),  # pictures, until they are fetched
    )
    routers = (
        ConsumerSpec(s.stream("REQUESTS"), f"router-{c}", f"{s.namespace}.request.*.{c}", ack_wait_s=10)
        for c in ("interactive", "standard", "batch")
    )
    consumers = (*routers, ConsumerSpec(s.stream("SUBMIT"), "gateway", s.all("submit"), ack_wait_s=5))
    return Topology(streams, buckets, objects, consumers, s)
