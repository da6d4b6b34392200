"""As ``sglang.srt.managers.load_snapshot``: a rank's load."""

import msgspec


class LoadSnapshot(msgspec.Struct, omit_defaults=True):
    timestamp: float = 0.0
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    token_usage: float = 0.0
