"""The page docs/metrics.md, from the metrics that gateways, routers and workers make."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.registry import Collector

import penstock.gateway.base.gateway_metrics
import penstock.router.state.router_metrics
import penstock.workers.metrics.worker_metrics
from penstock.infra.metrics.scope import MetricScope, loop_lag

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRO = """\
# Metrics

Every process serves Prometheus metrics: a gateway at `/metrics` of its HTTP port, routers and workers at
`--metrics-port`. `state.json` has the address of each (`metrics_url`). Counters end in `_total`, and a histogram has
`_bucket`, `_sum` and `_count`.

Every series has the labels of its process, which are set automatically: `namespace`, `component` (gateway, router or
worker), `process` (its `--name`), `model` (workers, and gateways' series of requests, tokens and queues, where
the model is known) and `role` (workers).

Engines add metrics of their own to a worker's page (`vllm:*`, `sglang:*`, `trtllm_*`), and so can your own code
(`user_*`, see [Engines](engines.md#logits-processors)). Series of GPUs (`penstock_worker_gpu_memory_used_bytes`,
`…_gpu_memory_bytes`, `…_gpu_utilization_ratio`, by `gpu`) need the package `nvidia-ml-py`. A label of an engine's
that is set automatically too is kept as `exported_NAME`. With `PROMETHEUS_MULTIPROC_DIR`, a local
directory that is set before the start, metrics of an engine's other processes appear there too.

What to watch first: `penstock_gateway_ttft_seconds` and `penstock_gateway_request_seconds` (latency),
`penstock_gateway_requests_total` by `code` (errors), `penstock_gateway_queued_requests` (too few workers),
`penstock_worker_kv_free_blocks` (KV cache), `penstock_gateway_stream_unfinished_ratio` (streams that fill).

This page is generated from the code (`python -m tests.generated`).
"""


def page() -> str:
    """The whole page, as the code has it."""
    return INTRO + "".join(section(role.capitalize(), scope.metrics()) for role, scope in scopes().items())


def scopes() -> dict[str, MetricScope]:
    """The metrics of each role, as its processes make them."""
    by_role = {role: MetricScope() for role in ("gateway", "router", "worker")}
    gateway_scope, router_scope = by_role["gateway"].child("gateway"), by_role["router"].child("router")
    penstock.gateway.base.gateway_metrics.GatewayMetrics(gateway_scope).of("model")
    penstock.router.state.router_metrics.Metrics(router_scope)
    worker_scope = penstock.workers.metrics.worker_metrics.WorkerMetrics(by_role["worker"]).scope
    for scope in (gateway_scope, router_scope, worker_scope):
        loop_lag(scope)
    return by_role


def section(role: str, metrics: Iterable[Collector]) -> str:
    head = f"\n## {role}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(row, metrics))


def row(metric: Collector) -> str:
    family = next(iter(metric.collect()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = " ".join(f"`{label}`" for label in getattr(metric, "_labelnames", ())) or "–"
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"
