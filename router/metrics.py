"""Metrics of a router; names end in their unit."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MOST_COUNTERS = 256
WAIT_BUCKETS = (0.001, 0.01, 0.1, 1, 10, 60, 600)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._placed: dict[
            tuple[str, str, bool], tuple[Counter, Counter]
        ] = {}  # finding a child takes longer than this
        self.decisions = Counter("penstock_router_decisions", "jobs published", ["reason"], registry=registry)
        self.routes = Counter(
            "penstock_router_routes", "jobs published, by kind of route", ["kind", "encode"], registry=registry
        )
        self.overlap = Counter(
            "penstock_router_overlap_tokens", "prompt tokens cached at the chosen worker", registry=registry
        )
        self.prompt = Counter("penstock_router_prompt_tokens", "prompt tokens placed", registry=registry)
        self.wait = Histogram(
            "penstock_router_wait_seconds", "time from arrival to decision", buckets=WAIT_BUCKETS, registry=registry
        )
        self.ended = Counter("penstock_router_ended", "requests ended by the router", ["code"], registry=registry)
        self.revision_moves = Counter(
            "penstock_router_revision_moves",
            "requests moved to another revision before their first token",
            registry=registry,
        )
        self.stalled = Counter(
            "penstock_router_stalled_requests",
            "requests whose worker's engine made no step for --stalled-after-s",
            ["stage"],
            registry=registry,
        )
        self.lost = Counter("penstock_router_workers_lost", "workers declared dead", registry=registry)
        self.waiting = Gauge("penstock_router_waiting_requests", "requests without a worker", registry=registry)
        self.workers = Gauge("penstock_router_workers", "registered workers", registry=registry)
        self.blocks = Gauge("penstock_router_index_blocks", "distinct blocks in the prefix index", registry=registry)
        self.index_sequence = Gauge(
            "penstock_router_index_sequence",
            "KV stream sequence that penstock_router_index_checksum is of: every 4,096th, and the last when it rests",
            registry=registry,
        )
        self.index_checksum = Gauge(
            "penstock_router_index_checksum",
            "48 bits of what is known of all caches: equal in routers that show the same sequence",
            registry=registry,
        )
        self.tasks = Gauge("penstock_router_tasks", "asyncio tasks", registry=registry)

    def placed(
        self, reason: str, kind: str, encode: bool, cached_tokens: int, prompt_tokens: int, waited_ns: int
    ) -> None:
        counters = self._placed.get((reason, kind, encode))
        if counters is None:
            counters = (
                self.decisions.labels(reason.partition(":")[0]),
                self.routes.labels(kind, "yes" if encode else "no"),
            )
            if len(self._placed) < _MOST_COUNTERS:
                self._placed[reason, kind, encode] = counters
        for counter in counters:
            counter.inc()
        self.overlap.inc(cached_tokens)
        self.prompt.inc(prompt_tokens)
        self.wait.observe(waited_ns / 1e9)
