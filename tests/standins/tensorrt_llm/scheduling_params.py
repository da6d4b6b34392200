from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm._standin.variant import LATER


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Where a request runs under attention DP. None for ``attention_dp_relax`` breaks 1.2.1's scheduler."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = True if LATER else None
