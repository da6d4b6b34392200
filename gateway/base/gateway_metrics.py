"""The metrics of a gateway; names end in their unit."""

from penstock.gateway.base.chat_objects import UsageBody
from penstock.infra.metrics.scope import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, MetricScope

TOKEN_BUCKETS = (
    1, 10, 50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000, 512000, 1_000_000,
)  # fmt: skip


MAX_MODELS = 512  # counted apart; requests for further ones are counted without a model


class ModelMetrics:
    """What is counted of each model; of requests whose model is not known, without one. Requests and tokens are counted
    in the thread of the event loop only.

    Args:
        scope: of the model, with the prefix of a gateway's metrics.
        known: False: what is measured of a model is not shown.
    """

    def __init__(self, scope: MetricScope, *, known: bool = True) -> None:
        self.scope = scope
        self.requests = scope.thread_counter("requests", "ended requests", ["api", "code"])
        self.ttft = scope.thread_histogram("ttft_seconds", "body read to first token sent", buckets=FIRST_TOKEN_SECONDS)
        self.itl = scope.thread_histogram(
            "inter_token_seconds",
            "time between two tokens of a stream: from one event to the next, divided by the tokens in it",
            buckets=TOKEN_SECONDS,
        )
        self.e2e = scope.thread_histogram("request_seconds", "body read to answer sent", buckets=REQUEST_SECONDS)
        self.prompt = scope.thread_counter("prompt_tokens", "prompt tokens accepted")
        self.output = scope.thread_counter("output_tokens", "output tokens delivered")
        self.cached = scope.thread_counter("cached_tokens", "prompt tokens reused by workers")
        self.input_length = scope.thread_histogram("request_prompt_tokens", "tokens of a prompt", buckets=TOKEN_BUCKETS)
        self.output_length = scope.thread_histogram(
            "request_output_tokens", "tokens of an answer", buckets=TOKEN_BUCKETS
        )
        self.response_bytes = scope.thread_counter("response_bytes", "bodies of HTTP answers that were generated")
        self.cancelled = scope.thread_counter("cancelled", "requests left by their client")
        scope = scope if known else MetricScope()
        self.open = scope.gauge("open_requests", "requests being answered")
        self.idle = scope.gauge(
            "model_idle_seconds",
            "since the model was last asked for here, also in vain while it had no worker; +Inf: not since the start",
        )
        self.queued = scope.gauge("queued_requests", "accepted and not placed yet")
        self.workers = scope.gauge("workers", "workers of the model", ["state", "revision"])
        self.refused = scope.gauge(
            "workers_refused",
            "workers that serve the model's name with another tokenizer",
            ["worker", "tokenizer", "expected"],
        )
        self.loaded = scope.gauge("model_loaded", "1: tokenizer and chat template are in memory")
        self.load_seconds = scope.gauge("model_load_seconds", "that the last load of its tokenizer and template took")


class GatewayMetrics:
    """
    Args:
        scope: of the process, with the prefix of a gateway's metrics.

    Attributes:
        models: by name; see ``of``.
    """

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.consumers = ConsumerMetrics(scope)
        self.registry = scope.registry
        self.models: dict[str, ModelMetrics] = {}
        self._unknown: ModelMetrics | None = None
        self.request_bytes = scope.thread_counter("request_bytes", "bodies of HTTP requests")
        self.media = scope.counter("media", "images and embedding files taken", ["kind"])
        self.connections = scope.gauge("connections", "clients' open connections")
        self.max_connections = scope.gauge("max_connections", "clients' connections that are served at a time")
        self.connections_refused = scope.gauge("connections_refused", "connections beyond the limit, since the start")
        self.connections_moved = scope.gauge(
            "connections_moved",
            "connections closed after an answer as other gateways have fewer, since the start",
        )
        self.gateways = scope.gauge("gateways", "gateways that accept from the same address, this one included")
        self.files_limit = scope.gauge(
            "files_limit", "open files that the process may have, if they limit its connections (ulimit -n); 0: not"
        )
        self.keys_lost = scope.gauge("keys_lost", "1: there were API keys, and the broker has none any more")
        self.trusted_proxies = scope.gauge("trusted_proxies", "addresses and networks of --trusted-proxies")
        self.unfinished = scope.gauge(
            "stream_unfinished_ratio",
            "share of a stream's max_bytes from its oldest unfinished message on",
            ["stream"],
        )
        self.retention = scope.gauge(
            "record_retention_seconds", "how long records of requests will be kept at the present rate"
        )
        self.tasks = scope.gauge("tasks", "asyncio tasks, counted when asked")

    def of(self, model: str) -> ModelMetrics:
        """
        Args:
            model: canonical name of one that is served, which is counted apart from now on; "": not known. Where there
                is only one, requests whose model is not known count as its own.
        """
        found = self.models.get(model)
        if found is not None:
            return found
        if model and len(self.models) < MAX_MODELS:
            made = self.models[model] = ModelMetrics(self.scope.child(labels={"model": model}))
            return made
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        if self._unknown is None:
            self._unknown = ModelMetrics(self.scope.child(), known=False)
        return self._unknown

    def forget(self, model: str) -> None:
        """A model is not served any more."""
        found = self.models.pop(model, None)
        if found is not None:
            self.scope.remove(found.scope)


class ConsumerMetrics:
    """What the broker says of the routers' consumers of REQUESTS."""

    def __init__(self, scope: MetricScope) -> None:
        self.pending = scope.gauge(
            "consumer_pending", "requests in the log that no router has been sent yet", ["consumer"]
        )
        self.unacknowledged = scope.gauge(
            "consumer_ack_pending", "requests that a router was sent and has not acknowledged yet", ["consumer"]
        )
        self.redelivered = scope.gauge(
            "consumer_redelivered", "of these, those that were sent more than once", ["consumer"]
        )

    def observe(self, consumer: str, pending: int, unacknowledged: int, redelivered: int) -> None:
        self.pending.labels(consumer).set(pending)
        self.unacknowledged.labels(consumer).set(unacknowledged)
        self.redelivered.labels(consumer).set(redelivered)


def account(metrics: ModelMetrics, usage: UsageBody) -> None:
    """Count the tokens of an answer that was sent."""
    metrics.output.inc(usage.completion_tokens)
    metrics.cached.inc(usage.prompt_tokens_details.cached_tokens)
    metrics.input_length.observe(usage.prompt_tokens)
    metrics.output_length.observe(usage.completion_tokens)
