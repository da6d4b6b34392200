"""Dashboards of what clients see: health, gateways, routers."""

from penstock.deploy.panels import PLACE, SELECT, Dashboard, Panel, Query, latency, most, quantile, rate, share, total

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
            about="Share of the requests' stream that is free behind the oldest unfinished one",
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
        Panel("Requests", [Query(rate("penstock_gateway_requests_total", "code"), "{{code}}")], "reqps"),
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
        Panel(
            "Requests by gateway", [Query(rate("penstock_gateway_requests_total", "process"), "{{process}}")], "reqps"
        ),
        Panel("Open requests", [Query(total("penstock_gateway_open_requests", "process"), "{{process}}")]),
        Panel("Connections", [Query(total("penstock_gateway_connections", "process", PLACE), "{{process}}")]),
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
        Panel(
            "Images and embedding files",
            [Query(rate("penstock_gateway_media_total", "kind", PLACE), "{{kind}}")],
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
        Panel(
            "Event-loop lag",
            [Query(most("penstock_gateway_loop_lag_seconds", "process", PLACE), "{{process}}")],
            "s",
            steps=(0.1, 1),
        ),
    ),
)


ROUTERS = Dashboard(
    "routers",
    "Routers",
    (
        Panel("Decisions", [Query(rate("penstock_router_decisions_total", "reason", PLACE), "{{reason}}")], "reqps"),
        Panel("Time of a decision", latency("penstock_router_decision_seconds", select=PLACE), "s"),
        Panel("Wait for a worker", latency("penstock_router_wait_seconds", select=PLACE), "s"),
        Panel(
            "Held requests",
            [Query(total("penstock_router_waiting_requests", "process", PLACE), "{{process}}")],
            steps=(10, 50),
        ),
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
        Panel("Blocks in the index", [Query(most("penstock_router_index_blocks", "process", PLACE), "{{process}}")]),
        Panel(
            "Index position",
            [Query(most("penstock_router_index_sequence", "process", PLACE), "{{process}}")],
            about="Routers at the same sequence must show the same checksum",
        ),
        Panel("Index checksum", [Query(most("penstock_router_index_checksum", "process", PLACE), "{{process}}")]),
        Panel("Registered workers", [Query(most("penstock_router_workers", "process", PLACE), "{{process}}")]),
        Panel(
            "Workers lost, stalled requests",
            [
                Query(rate("penstock_router_workers_lost_total", select=PLACE), "lost"),
                Query(rate("penstock_router_stalled_requests_total", "stage", PLACE), "stalled {{stage}}"),
            ],
        ),
        Panel(
            "Leases lost in ten minutes",
            [Query(most("penstock_router_lease_losses", "worker", PLACE), "{{worker}}")],
            needs="a worker that lost its lease",
        ),
        Panel(
            "Workers, times slower than their peers",
            [Query(most("penstock_router_worker_slowness", "worker", PLACE), "{{worker}}")],
            steps=(4, 10),
            about="Peers have the same model, role, engine and device; a worker alone is not shown",
        ),
        Panel(
            "Ended by the router",
            [Query(rate("penstock_router_ended_total", "code", PLACE), "{{code}}")],
            "reqps",
            needs="a request that no worker can serve",
        ),
    ),
)
