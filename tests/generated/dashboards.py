"""All Grafana dashboards. ``python -m tests.generated`` writes them to ``grafana/``.

Dashboards of what clients see: health, gateways, routers.

Dashboards of workers: prefill, decode, KV cache and GPUs, handoff.

The dashboard of the broker and the machines.
"""

import json
from pathlib import Path

from penstock.deploy.monitoring import ALERTS, GRAFANA, alert_rules
from penstock.deploy.values import Thresholds
from tests.generated.panels import (
    PLACE,
    SELECT,
    Dashboard,
    Panel,
    Query,
    by,
    latency,
    most,
    quantile,
    rate,
    share,
    to_grafana,
    total,
)

FAILURES = SELECT + ',code!~"ok|cancelled"'
FAILED = f"{rate('penstock_gateway_requests_total', select=FAILURES)} or vector(0)"

HEALTH = Dashboard(
    "health",
    "Health",
    (
        Panel(
            "Queue",
            [Query(most("penstock_gateway_queued_requests"), "queued")],
            kind="stat",
            steps=(10, 50),
            columns=4,
            about="Requests that no router has placed yet",
        ),
        Panel(
            "Workers",
            [Query(most("penstock_gateway_workers", "model, state"), "{{model}} {{state}}")],
            kind="stat",
            columns=4,
        ),
        Panel("Errors", [Query(FAILED, "failed")], "reqps", kind="stat", steps=(0.1, 1), columns=4),
        Panel(
            "TTFT, P95",
            [Query(quantile(0.95, "penstock_gateway_ttft_seconds"), "P95")],
            "s",
            kind="stat",
            steps=(1, 5),
            columns=4,
        ),
        Panel(
            "Room for requests",
            [Query(f"1 - {most('penstock_gateway_stream_unfinished_ratio', select=PLACE)}", "free")],
            "percentunit",
            kind="stat",
            columns=4,
            about="Share of the requests' stream that is free after the oldest unfinished one",
        ),
        Panel(
            "Event loops",
            [
                Query(most("penstock_gateway_loop_lag_seconds", select=PLACE), "gateway"),
                Query(most("penstock_router_loop_lag_seconds", select=PLACE), "router"),
                Query(most("penstock_worker_loop_lag_seconds"), "worker"),
            ],
            "s",
            kind="stat",
            steps=(0.1, 1),
            columns=4,
            about="Longest wait for an event loop in the last 30 to 60 s",
        ),
        by("Requests", rate, "penstock_gateway_requests_total", "code", SELECT, "reqps"),
        Panel("Time to first token", latency("penstock_gateway_ttft_seconds"), "s"),
        Panel("Time between tokens", latency("penstock_gateway_inter_token_seconds"), "s"),
        Panel(
            "Queue and open requests",
            [
                Query(most("penstock_gateway_queued_requests"), "queued"),
                Query(total("penstock_gateway_open_requests"), "open"),
            ],
            steps=(10, 50),
        ),
        Panel(
            "Tokens",
            [
                Query(rate("penstock_gateway_prompt_tokens_total"), "prompt"),
                Query(rate("penstock_gateway_output_tokens_total"), "output"),
            ],
        ),
        Panel("Duration", latency("penstock_gateway_request_seconds"), "s"),
    ),
)


GATEWAYS = Dashboard(
    "gateways",
    "Gateways",
    (
        by("Requests by gateway", rate, "penstock_gateway_requests_total", "process", SELECT, "reqps"),
        by("Open requests", total, "penstock_gateway_open_requests", "process", SELECT),
        by("Connections", total, "penstock_gateway_connections", "process", PLACE),
        Panel("Prompt length", latency("penstock_gateway_request_prompt_tokens")),
        Panel("Answer length", latency("penstock_gateway_request_output_tokens")),
        Panel(
            "Bytes",
            [
                Query(rate("penstock_gateway_request_bytes_total", select=PLACE), "requests"),
                Query(rate("penstock_gateway_response_bytes_total"), "answers"),
            ],
            "Bps",
        ),
        Panel(
            "Cached share of prompts",
            [Query(share("penstock_gateway_cached_tokens_total", "penstock_gateway_prompt_tokens_total"), "cached")],
            "percentunit",
        ),
        Panel("Left by their client", [Query(rate("penstock_gateway_cancelled_total"), "cancelled")], "reqps"),
        by(
            "Images and embedding files",
            rate,
            "penstock_gateway_media_total",
            "kind",
            PLACE,
            "reqps",
            needs="requests with images",
        ),
        Panel(
            "Workers refused",
            [Query(total("penstock_gateway_workers_refused", "worker, tokenizer"), "{{worker}} {{tokenizer}}")],
            needs="a worker whose tokenizer is another one",
        ),
        Panel(
            "Records are kept for",
            [Query(f"min(penstock_gateway_record_retention_seconds{{{PLACE}}})", "retention")],
            "s",
        ),
        by("Event-loop lag", most, "penstock_gateway_loop_lag_seconds", "process", PLACE, "s", steps=(0.1, 1)),
    ),
)


ROUTERS = Dashboard(
    "routers",
    "Routers",
    (
        by("Decisions", rate, "penstock_router_decisions_total", "reason", PLACE, "reqps"),
        Panel("Time of a decision", latency("penstock_router_decision_seconds", select=PLACE), "s"),
        Panel("Wait for a worker", latency("penstock_router_wait_seconds", select=PLACE), "s"),
        by("Held requests", total, "penstock_router_waiting_requests", "process", PLACE, steps=(10, 50)),
        Panel(
            "KV hit rate",
            [
                Query(
                    share("penstock_router_overlap_tokens_total", "penstock_router_prompt_tokens_total", select=PLACE),
                    "share of prompt tokens",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Kinds of route",
            [Query(rate("penstock_router_routes_total", "kind, encode", PLACE), "{{kind}}, encode {{encode}}")],
            "reqps",
        ),
        by("Blocks in the index", most, "penstock_router_index_blocks", "process", PLACE),
        by(
            "Index position",
            most,
            "penstock_router_index_sequence",
            "process",
            PLACE,
            about="Routers at the same sequence must show the same checksum",
        ),
        by("Index checksum", most, "penstock_router_index_checksum", "process", PLACE),
        by("Registered workers", most, "penstock_router_workers", "process", PLACE),
        Panel(
            "Workers lost, stalled requests",
            [
                Query(rate("penstock_router_workers_lost_total", select=PLACE), "lost"),
                Query(rate("penstock_router_stalled_requests_total", "stage", PLACE), "stalled {{stage}}"),
            ],
        ),
        by(
            "Leases lost in ten minutes",
            most,
            "penstock_router_lease_losses",
            "worker",
            PLACE,
            needs="a worker that lost its lease",
        ),
        by(
            "Workers, times slower than their peers",
            most,
            "penstock_router_worker_slowness",
            "worker",
            PLACE,
            steps=(4, 10),
            about="Peers have the same model, role, engine and device; a worker alone is not shown",
        ),
        by(
            "Ended by the router",
            rate,
            "penstock_router_ended_total",
            "code",
            PLACE,
            "reqps",
            needs="a request that no worker can serve",
        ),
    ),
)


DCGM = "NVIDIA's dcgm-exporter on each machine"
NVML = "the package nvidia-ml-py beside the worker"


def _of(roles: str) -> str:
    return f'{SELECT},role=~"{roles}"'


def _per_gpu(counter: str, select: str) -> str:
    return f"{rate(counter, select=select)} / sum(penstock_worker_gpus{{{select}}})"


PREFILL, DECODE = _of("prefill|aggregated"), _of("decode|aggregated")

PREFILLS = Dashboard(
    "prefill",
    "Prefill",
    (
        Panel("Time of a prefill", latency("penstock_worker_prefill_seconds", select=PREFILL), "s"),
        Panel(
            "P99 by worker",
            [Query(quantile(0.99, "penstock_worker_prefill_seconds", "process", PREFILL), "{{process}}")],
            "s",
        ),
        Panel("Wait at the worker", latency("penstock_worker_queue_seconds", select=PREFILL), "s"),
        by("Prompt tokens", rate, "penstock_worker_prompt_tokens_total", "process", PREFILL),
        by("Of these, from the cache", rate, "penstock_worker_prefix_hit_tokens_total", "process", PREFILL),
        Panel(
            "Prompt tokens per GPU",
            [Query(_per_gpu("penstock_worker_prompt_tokens_total", PREFILL), "tokens/s")],
            needs=NVML,
        ),
        Panel(
            "Sequences",
            [
                Query(total("penstock_worker_running", "process", PREFILL), "{{process}} running"),
                Query(total("penstock_worker_waiting", "process", PREFILL), "{{process}} waiting"),
            ],
        ),
        by("Requests", rate, "penstock_worker_requests_total", "code", PREFILL, "reqps"),
        by("Preemptions", rate, "penstock_worker_preemptions_total", "process", PREFILL),
    ),
)


DECODES = Dashboard(
    "decode",
    "Decode",
    (
        Panel("Time per output token", latency("penstock_worker_time_per_output_token_seconds", select=DECODE), "s"),
        Panel(
            "P99 by worker",
            [Query(quantile(0.99, "penstock_worker_time_per_output_token_seconds", "process", DECODE), "{{process}}")],
            "s",
        ),
        Panel("Duration on a worker", latency("penstock_worker_request_seconds", select=DECODE), "s"),
        by("Output tokens", rate, "penstock_worker_tokens_total", "process", DECODE),
        Panel(
            "Output tokens per GPU",
            [Query(_per_gpu("penstock_worker_tokens_total", DECODE), "tokens/s")],
            needs=NVML,
        ),
        Panel(
            "Batch size",
            [
                Query(total("penstock_worker_running", "process", DECODE), "{{process}}"),
                Query(most("penstock_worker_max_sequences", select=DECODE), "limit of a worker"),
            ],
        ),
        by(
            "Time between tokens by worker",
            most,
            "penstock_worker_token_latency_seconds",
            "process",
            DECODE,
            "s",
            about="Of the last 30 to 60 s with enough tokens, of running requests, too",
        ),
        Panel(
            "Accepted share of proposed tokens",
            [
                Query(
                    share(
                        "penstock_worker_spec_decode_num_accepted_tokens_total",
                        "penstock_worker_spec_decode_num_draft_tokens_total",
                        select=DECODE,
                    ),
                    "accepted",
                )
            ],
            "percentunit",
            needs="speculative decoding",
        ),
        by("Output not yet sent", total, "penstock_worker_unsent_bytes", "process", DECODE, "bytes"),
        by("Event-loop lag", most, "penstock_worker_loop_lag_seconds", "process", DECODE, "s", steps=(0.1, 1)),
    ),
)


KV = Dashboard(
    "kv",
    "KV cache and GPU",
    (
        by(
            "KV blocks in use",
            most,
            "penstock_worker_kv_usage_ratio",
            "process",
            SELECT,
            "percentunit",
            steps=(0.8, 0.95),
        ),
        Panel(
            "KV blocks",
            [
                Query(total("penstock_worker_kv_used_blocks"), "held by sequences"),
                Query(total("penstock_worker_kv_cached_blocks"), "kept for reuse"),
                Query(total("penstock_worker_kv_free_blocks"), "free"),
                Query(total("penstock_worker_kv_capacity_blocks"), "in all"),
            ],
        ),
        Panel(
            "Hit rate of the cache",
            [
                Query(
                    share("penstock_worker_prefix_hit_tokens_total", "penstock_worker_prompt_tokens_total"),
                    "share of prompt tokens",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Blocks in host memory",
            [
                Query(total("penstock_worker_kv_host_blocks", "process"), "{{process}}"),
                Query(rate("penstock_worker_kv_loaded_blocks_total"), "copied back per second"),
            ],
        ),
        Panel(
            "GPU memory",
            [Query(total("penstock_worker_gpu_memory_used_bytes", "process, gpu"), "{{process}} GPU {{gpu}}")],
            "bytes",
            needs=NVML,
        ),
        Panel(
            "GPU use",
            [Query(most("penstock_worker_gpu_utilization_ratio", "process, gpu"), "{{process}} GPU {{gpu}}")],
            "percentunit",
            needs=NVML,
        ),
        Panel(
            "Tensor cores",
            [Query("avg by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", "{{Hostname}} GPU {{gpu}}")],
            "percentunit",
            needs=DCGM,
        ),
        Panel(
            "Memory bandwidth",
            [Query("avg by (Hostname, gpu) (DCGM_FI_PROF_DRAM_ACTIVE)", "{{Hostname}} GPU {{gpu}}")],
            "percentunit",
            needs=DCGM,
        ),
        Panel(
            "Power and temperature",
            [
                Query("sum by (Hostname) (DCGM_FI_DEV_POWER_USAGE)", "{{Hostname}} watts"),
                Query("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", "{{Hostname}} °C"),
            ],
            needs=DCGM,
        ),
    ),
)


HANDOFFS = Dashboard(
    "handoff",
    "Handoff between workers",
    (
        by("Bytes read", rate, "penstock_handoff_read_bytes_total", "process", SELECT, "Bps"),
        Panel("Time to read a request's blocks", latency("penstock_handoff_read_seconds"), "s"),
        by("Handoffs", rate, "penstock_handoff_events_total", "state", SELECT, "reqps"),
        by("Open leases", total, "penstock_handoff_open_leases", "process", SELECT),
        by("Blocks under leases", total, "penstock_handoff_pinned_blocks", "process", SELECT),
        by("Quarantined blocks", total, "penstock_handoff_quarantined_blocks", "process", SELECT, steps=(1, 100)),
        by(
            "Failures", rate, "penstock_handoff_failures_total", "cause", SELECT, "reqps", needs="a handoff that failed"
        ),
    ),
)


NODE = "node_exporter on each machine"
FILL = f"penstock_broker_stream_bytes{{{PLACE}}} / (penstock_broker_stream_max_bytes{{{PLACE}}} > 0)"
BUSY = '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval]))'

BROKER = Dashboard(
    "broker",
    "Broker and machines",
    (
        by("Size of the streams", most, "penstock_broker_stream_bytes", "stream", PLACE, "bytes"),
        Panel("Share of their limits", [Query(f"max by (stream) ({FILL})", "{{stream}}")], "percentunit"),
        by(
            "Unfinished share",
            most,
            "penstock_gateway_stream_unfinished_ratio",
            "stream",
            PLACE,
            "percentunit",
            steps=(0.5, 0.9),
        ),
        by("Messages", most, "penstock_broker_stream_messages", "stream", PLACE),
        Panel(
            "Lag of the routers' consumers",
            [
                Query(most("penstock_gateway_consumer_pending", "consumer", PLACE), "{{consumer}} not sent"),
                Query(
                    most("penstock_gateway_consumer_ack_pending", "consumer", PLACE), "{{consumer}} not acknowledged"
                ),
            ],
        ),
        by("Redelivered", most, "penstock_gateway_consumer_redelivered", "consumer", PLACE),
        by("Consumers", most, "penstock_broker_stream_consumers", "stream", PLACE),
        Panel(
            "CPU by process",
            [Query(rate("process_cpu_seconds_total", "component, process", PLACE), "{{process}}")],
            "percentunit",
        ),
        Panel(
            "Memory by process",
            [Query(total("process_resident_memory_bytes", "component, process", PLACE), "{{process}}")],
            "bytes",
        ),
        Panel("CPU by machine", [Query(BUSY, "{{instance}}")], "percentunit", needs=NODE),
        Panel(
            "Free memory",
            [Query("min by (instance) (node_memory_MemAvailable_bytes)", "{{instance}}")],
            "bytes",
            needs=NODE,
        ),
        Panel(
            "Network",
            [
                Query(
                    "sum by (instance) (rate(node_network_transmit_bytes_total[$__rate_interval]))", "{{instance}} sent"
                )
            ],
            "Bps",
            needs=NODE,
        ),
    ),
)


DASHBOARDS = (HEALTH, GATEWAYS, ROUTERS, PREFILLS, DECODES, KV, HANDOFFS, BROKER)


def files() -> dict[Path, str]:
    """Each dashboard and the alert rules: file and text."""
    boards = {
        GRAFANA / f"{dashboard.name}.json": json.dumps(to_grafana(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }
    return boards | {ALERTS: alert_rules(Thresholds())}
