from enum import Enum


class MetricNames(Enum):
    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    REQUEST_QUEUE_TIME = "request_queue_time"
    ARRIVAL_TIMESTAMP = "arrival_timestamp"
