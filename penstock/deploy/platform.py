"""The dashboard of the broker and the machines."""

from penstock.deploy.panels import PLACE, Dashboard, Panel, Query, most, rate, total

NODE = "node_exporter on each machine"
FILL = f"penstock_broker_stream_bytes{{{PLACE}}} / (penstock_broker_stream_max_bytes{{{PLACE}}} > 0)"
BUSY = '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval]))'

BROKER = Dashboard(
    "broker",
    "Broker and machines",
    (
        Panel(
            "Size of the streams", [Query(most("penstock_broker_stream_bytes", "stream", PLACE), "{{stream}}")], "bytes"
        ),
        Panel("Share of their limits", [Query(f"max by (stream) ({FILL})", "{{stream}}")], "percentunit"),
        Panel(
            "Unfinished share",
            [Query(most("penstock_gateway_stream_unfinished_ratio", "stream", PLACE), "{{stream}}")],
            "percentunit",
            steps=(0.5, 0.9),
        ),
        Panel("Messages", [Query(most("penstock_broker_stream_messages", "stream", PLACE), "{{stream}}")]),
        Panel(
            "Lag of the routers' consumers",
            [
                Query(most("penstock_gateway_consumer_pending", "consumer", PLACE), "{{consumer}} not sent"),
                Query(
                    most("penstock_gateway_consumer_ack_pending", "consumer", PLACE), "{{consumer}} not acknowledged"
                ),
            ],
        ),
        Panel("Redelivered", [Query(most("penstock_gateway_consumer_redelivered", "consumer", PLACE), "{{consumer}}")]),
        Panel("Consumers", [Query(most("penstock_broker_stream_consumers", "stream", PLACE), "{{stream}}")]),
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
