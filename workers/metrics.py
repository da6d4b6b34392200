"""What a worker counts. One registry per process; names end in their unit."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from schemas.done import Done
from workers.engines.base import EngineStats


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tokens = Counter("penstock_worker_tokens", "output tokens", registry=registry)
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
        self.unsent = Gauge("penstock_worker_unsent_bytes", "output the broker could not take yet", registry=registry)
        self.tasks = Gauge("penstock_worker_tasks", "asyncio tasks, counted when asked", registry=registry)

    def observe(self, stats: EngineStats, unsent_bytes: int) -> None:
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.used.set(stats.used_blocks)
        self.cached.set(stats.cached_blocks)
        self.free.set(stats.free_blocks)
        self.preempted.set(stats.preemptions)
        self.hit.set(stats.hit_tokens)
        self.prompt.set(stats.prompt_tokens)
        self.unsent.set(unsent_bytes)

    def ended(self, event: Done) -> None:
        self.requests.labels(event.code or "ok").inc()
        if event.timings.started_ns:
            self.latency.observe((event.timings.ended_ns - event.timings.started_ns) / 1e9)
