"""Ids of disaggregated requests are of 1.3."""

from tensorrt_llm._standin.variant import LATER

if LATER:
    import itertools

    _counter = itertools.count()

    def get_global_disagg_request_id(node_id: int, process_id: int) -> int:
        if not 0 <= node_id < 1 << 8 or not 0 <= process_id < 1 << 6:
            raise ValueError("node_id has 8 bits, process_id has 6")
        return (node_id << 56) | (process_id << 50) | next(_counter)
