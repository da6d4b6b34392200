"""The page docs/metrics.md, from the metrics that gateways, routers and workers make."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import gateway.metrics
import router.metrics
import workers.metrics.worker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRO = """\
# Metrics

Every process serves Prometheus metrics: a gateway at `/metrics` of its HTTP port, routers and workers at
`--metrics-port`. `state.json` has the address of each (`metrics_url`). Counters end in `_total`, and a histogram has
`_bucket`, `_sum` and `_count`. Each process also has `penstock_ROLE_loop_lag_seconds`: the longest time that
something due had to wait for its event loop, in the last 30 to 60 seconds.

Engines add metrics of their own to a worker's page (`vllm:*`, `trtllm_*`). With `PROMETHEUS_MULTIPROC_DIR`, a local
directory that is set before the start, metrics of an engine's other processes appear there too.

What to watch first: `penstock_gateway_ttft_seconds` and `penstock_gateway_request_seconds` (latency),
`penstock_gateway_requests_total` by `code` (errors), `penstock_gateway_queued_requests` (too few workers),
`penstock_worker_kv_free_blocks` (KV cache), `penstock_gateway_stream_unfinished_ratio` (streams that fill).

This page is generated from the code (`python -m infra.docs`).
"""


def page() -> str:
    """The whole page, as the code has it."""
    roles = {"Gateway": gateway.metrics, "Router": router.metrics, "Worker": workers.metrics.worker}
    return INTRO + "".join(section(role, made(module.Metrics(CollectorRegistry()))) for role, module in roles.items())


def made(metrics: object) -> list[MetricWrapperBase]:
    return [metric for metric in vars(metrics).values() if isinstance(metric, MetricWrapperBase)]


def section(role: str, metrics: Iterable[MetricWrapperBase]) -> str:
    head = f"\n## {role}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(row, metrics))


def row(metric: MetricWrapperBase) -> str:
    family = next(iter(metric.describe()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = " ".join(f"`{label}`" for label in metric._labelnames) or "–"
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"
