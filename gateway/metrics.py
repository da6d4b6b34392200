"""What a gateway counts; names end in their unit."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("penstock_gateway_requests", "ended requests", ["door", "code"], registry=registry)
        self.ttft = Histogram(
            "penstock_gateway_ttft_seconds", "body read to first token sent", buckets=TTFT_BUCKETS, registry=registry
        )
        self.e2e = Histogram(
            "penstock_gateway_request_seconds", "body read to answer sent", buckets=E2E_BUCKETS, registry=registry
        )
        self.prompt = Counter("penstock_gateway_prompt_tokens", "prompt tokens accepted", registry=registry)
        self.output = Counter("penstock_gateway_output_tokens", "output tokens delivered", registry=registry)
        self.cached = Counter("penstock_gateway_cached_tokens", "prompt tokens reused by workers", registry=registry)
        self.cancelled = Counter("penstock_gateway_cancelled", "requests left by their client", registry=registry)
        self.media = Counter("penstock_gateway_media", "images and embedding files taken", ["kind"], registry=registry)
        self.open = Gauge("penstock_gateway_open_requests", "requests being answered", registry=registry)
        self.queued = Gauge("penstock_gateway_queued_requests", "accepted and not placed yet", registry=registry)
        self.connections = Gauge("penstock_gateway_connections", "clients' open connections", registry=registry)
        self.workers = Gauge(
            "penstock_gateway_workers", "workers of the model", ["state", "revision"], registry=registry
        )
        self.refused = Gauge(
            "penstock_gateway_workers_refused",
            "workers that serve the model's name with another tokenizer",
            ["worker", "tokenizer", "expected"],
            registry=registry,
        )
        self.unfinished = Gauge(
            "penstock_gateway_stream_unfinished_ratio",
            "share of a stream's max_bytes from its oldest unfinished message on",
            ["stream"],
            registry=registry,
        )
        self.retention = Gauge(
            "penstock_gateway_record_retention_seconds",
            "how long records of requests will be kept at the present rate",
            registry=registry,
        )
        self.tasks = Gauge("penstock_gateway_tasks", "asyncio tasks, counted when asked", registry=registry)
