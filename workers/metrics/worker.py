"""What a worker counts. One registry per process; names end in their unit."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from schemas.done import Done
from schemas.transfer import Handoff
from workers.engines.base import EngineStats


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tokens = Counter("penstock_worker_tokens", "output tokens", registry=registry)
        self.pictures = Counter("penstock_worker_pictures", "images and videos made", ["kind"], registry=registry)
        self.requests = Counter("penstock_worker_requests", "ended requests", ["code"], registry=registry)
        self.latency = Histogram(
            "penstock_worker_request_seconds", "from the start on this worker to the end", registry=registry
        )
        self.load_time = Gauge("penstock_worker_model_load_seconds", "time to build the engine", registry=registry)
        self.running = Gauge("penstock_worker_running", "sequences in the batch", registry=registry)
        self.waiting = Gauge("penstock_worker_waiting", "sequences queued in the engine", registry=registry)
        self.used = Gauge("penstock_worker_kv_used_blocks", "KV blocks held by sequences", registry=registry)
        self.cached = Gauge("penstock_worker_kv_cached_blocks", "KV blocks kept for reuse", registry=registry)
        self.free = Gauge("penstock_worker_kv_free_blocks", "KV blocks without content", registry=registry)
        self.preempted = Gauge("penstock_worker_preemptions", "sequences recomputed since start", registry=registry)
        self.hit = Gauge("penstock_worker_prefix_hit_tokens", "prompt tokens taken from the cache", registry=registry)
        self.prompt = Gauge("penstock_worker_prompt_tokens", "prompt tokens admitted", registry=registry)
        self.drafts = Gauge(
            "penstock_worker_spec_decode_num_drafts",
            "sequences in steps with proposed tokens",
            registry=registry,
        )
        self.draft_tokens = Gauge(
            "penstock_worker_spec_decode_num_draft_tokens", "tokens proposed by speculation", registry=registry
        )
        self.accepted_tokens = Gauge(
            "penstock_worker_spec_decode_num_accepted_tokens", "proposed tokens that were accepted", registry=registry
        )
        self.host_blocks = Gauge("penstock_worker_kv_host_blocks", "KV blocks kept in host memory", registry=registry)
        self.loaded_blocks = Gauge(
            "penstock_worker_kv_loaded_blocks", "KV blocks copied back from host memory, since start", registry=registry
        )
        self.logits_errors = Gauge(
            "penstock_worker_logits_errors", "calls of logits processors that failed, since start", registry=registry
        )
        self.unsent = Gauge("penstock_worker_unsent_bytes", "output not yet sent to the broker", registry=registry)
        self.tasks = Gauge("penstock_worker_tasks", "asyncio tasks, counted when asked", registry=registry)

        self.leases = Gauge("penstock_handoff_open_leases", "leases on blocks for other workers", registry=registry)
        self.pinned = Gauge("penstock_handoff_pinned_blocks", "blocks held under those leases", registry=registry)
        self.states = Counter("penstock_handoff_events", "lines of the ledger", ["state"], registry=registry)
        self.moved = Counter("penstock_handoff_read_bytes", "bytes read from other workers", registry=registry)
        self.moving = Histogram(
            "penstock_handoff_read_seconds",
            "time to read the blocks of one request",
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        self.failed = Counter("penstock_handoff_failures", "handoffs that failed", ["cause"], registry=registry)
        self.quarantined = Gauge("penstock_handoff_quarantined_blocks", "unusable for now", registry=registry)

    def handed(self, line: Handoff) -> None:
        """One line of the ledger."""
        self.states.labels(line.state).inc()
        if line.state == "read":
            self.moved.inc(line.bytes)
            self.moving.observe(line.seconds)
        elif line.state == "failed":
            self.failed.labels(line.cause).inc()
        elif line.state == "quarantined":
            self.quarantined.inc(line.blocks)
        elif line.state == "settled":
            self.quarantined.dec(line.blocks)

    def observe(self, stats: EngineStats, unsent_bytes: int) -> None:
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.used.set(stats.used_blocks)
        self.cached.set(stats.cached_blocks)
        self.free.set(stats.free_blocks)
        self.preempted.set(stats.preemptions)
        self.hit.set(stats.hit_tokens)
        self.prompt.set(stats.prompt_tokens)
        self.drafts.set(stats.drafts)
        self.draft_tokens.set(stats.draft_tokens)
        self.accepted_tokens.set(stats.accepted_tokens)
        self.host_blocks.set(stats.host_blocks)
        self.loaded_blocks.set(stats.loaded_blocks)
        self.logits_errors.set(stats.logits_errors)
        self.unsent.set(unsent_bytes)

    def ended(self, event: Done) -> None:
        self.requests.labels(event.code or "ok").inc()
        if event.timings.started_ns:
            self.latency.observe((event.timings.ended_ns - event.timings.started_ns) / 1e9)
