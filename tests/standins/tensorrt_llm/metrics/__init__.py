"""Prometheus metrics; names as documented for 1.1 and presumed for 1.2."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._standin.variant import LATER
from tensorrt_llm.metrics.enums import MetricNames


class MetricsCollector:
    labelname_finish_reason = "finished_reason"

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Histogram

        self.labels = labels
        names = list(labels)
        self._success = Counter(
            "trtllm_request_success", "Count of successfully processed requests.", [*names, "finished_reason"]
        )
        self._histograms: dict[Any, Histogram] = {
            MetricNames.E2E: Histogram("trtllm_e2e_request_latency_seconds", "Whole requests.", names),
            MetricNames.TTFT: Histogram("trtllm_time_to_first_token_seconds", "First tokens.", names),
            MetricNames.TPOT: Histogram("trtllm_time_per_output_token_seconds", "Later tokens.", names),
            MetricNames.REQUEST_QUEUE_TIME: Histogram("trtllm_request_queue_time_seconds", "Waiting.", names),
        }

    def _log(self, metrics_dict: dict[Any, Any]) -> None:
        reason = metrics_dict.get(self.labelname_finish_reason)
        if not reason:
            return
        self._success.labels(**self.labels, finished_reason=reason).inc()
        for name, histogram in self._histograms.items():
            if metrics_dict.get(name):  # 0 is not recorded
                histogram.labels(**self.labels).observe(metrics_dict[name])


if LATER:
    MetricsCollector.log_request_metrics_dict = MetricsCollector._log  # type: ignore[attr-defined]
else:
    MetricsCollector.log_metrics_dict = MetricsCollector._log  # type: ignore[attr-defined]

__all__ = ["MetricNames", "MetricsCollector"]
