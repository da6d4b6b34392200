"""Dashboards of workers: prefill, decode, KV cache and GPUs, handoff."""

from penstock.deploy.panels import SELECT, Dashboard, Panel, Query, latency, most, quantile, rate, share, total

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
        Panel("Prompt tokens", [Query(rate("penstock_worker_prompt_tokens_total", "process", PREFILL), "{{process}}")]),
        Panel(
            "Of these, from the cache",
            [Query(rate("penstock_worker_prefix_hit_tokens_total", "process", PREFILL), "{{process}}")],
        ),
        Panel(
            "Prompt tokens per GPU",
            [
                Query(
                    _per_gpu("penstock_worker_prompt_tokens_total", PREFILL),
                    "tokens/s",
                )
            ],
            needs=NVML,
        ),
        Panel(
            "Sequences",
            [
                Query(total("penstock_worker_running", "process", PREFILL), "{{process}} running"),
                Query(total("penstock_worker_waiting", "process", PREFILL), "{{process}} waiting"),
            ],
        ),
        Panel("Requests", [Query(rate("penstock_worker_requests_total", "code", PREFILL), "{{code}}")], "reqps"),
        Panel("Preemptions", [Query(rate("penstock_worker_preemptions_total", "process", PREFILL), "{{process}}")]),
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
        Panel("Output tokens", [Query(rate("penstock_worker_tokens_total", "process", DECODE), "{{process}}")]),
        Panel(
            "Output tokens per GPU",
            [
                Query(
                    _per_gpu("penstock_worker_tokens_total", DECODE),
                    "tokens/s",
                )
            ],
            needs=NVML,
        ),
        Panel(
            "Batch size",
            [
                Query(total("penstock_worker_running", "process", DECODE), "{{process}}"),
                Query(most("penstock_worker_max_sequences", select=DECODE), "limit of a worker"),
            ],
        ),
        Panel(
            "Time between tokens by worker",
            [Query(most("penstock_worker_token_latency_seconds", "process", DECODE), "{{process}}")],
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
        Panel(
            "Output not yet sent",
            [Query(total("penstock_worker_unsent_bytes", "process", DECODE), "{{process}}")],
            "bytes",
        ),
        Panel(
            "Event-loop lag",
            [Query(most("penstock_worker_loop_lag_seconds", "process", DECODE), "{{process}}")],
            "s",
            steps=(0.1, 1),
        ),
    ),
)


KV = Dashboard(
    "kv",
    "KV cache and GPU",
    (
        Panel(
            "KV blocks in use",
            [Query(most("penstock_worker_kv_usage_ratio", "process"), "{{process}}")],
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
        Panel("Bytes read", [Query(rate("penstock_handoff_read_bytes_total", "process"), "{{process}}")], "Bps"),
        Panel("Time to read a request's blocks", latency("penstock_handoff_read_seconds"), "s"),
        Panel("Handoffs", [Query(rate("penstock_handoff_events_total", "state"), "{{state}}")], "reqps"),
        Panel("Open leases", [Query(total("penstock_handoff_open_leases", "process"), "{{process}}")]),
        Panel("Blocks under leases", [Query(total("penstock_handoff_pinned_blocks", "process"), "{{process}}")]),
        Panel(
            "Quarantined blocks",
            [Query(total("penstock_handoff_quarantined_blocks", "process"), "{{process}}")],
            steps=(1, 100),
        ),
        Panel(
            "Failures",
            [Query(rate("penstock_handoff_failures_total", "cause"), "{{cause}}")],
            "reqps",
            needs="a handoff that failed",
        ),
    ),
)
