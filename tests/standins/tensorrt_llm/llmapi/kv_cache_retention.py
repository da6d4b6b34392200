"""``KvCacheRetentionConfig`` is a binding of a C++ class: positional or by these names, nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta


class KvCacheTransferMode(enum.Enum):
    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass(frozen=True)
class TokenRangeRetentionConfig:
    token_start: int
    token_end: int | None
    priority: int
    duration_ms: timedelta | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise RuntimeError("priority is out of range")
        if self.duration_ms is not None and not isinstance(self.duration_ms, timedelta):
            raise TypeError("incompatible constructor arguments: duration_ms is a timedelta")
        if self.token_end is not None and self.token_end <= self.token_start:
            raise RuntimeError("token_end is exclusive and comes after token_start")


class KvCacheRetentionConfig:
    TokenRangeRetentionConfig = TokenRangeRetentionConfig

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
        transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM,
        directory: str = "",
    ) -> None:
        if not all(isinstance(each, TokenRangeRetentionConfig) for each in token_range_retention_configs):
            raise TypeError("incompatible constructor arguments")
        if not 0 <= decode_retention_priority <= 100:
            raise RuntimeError("priority is out of range")
        if decode_duration_ms is not None and not isinstance(decode_duration_ms, timedelta):
            raise TypeError("incompatible constructor arguments: decode_duration_ms is a timedelta")
        self.token_range_retention_configs = list(token_range_retention_configs)
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms
        self.transfer_mode = transfer_mode
        self.directory = directory

    def priority_at(self, position: int, prompt_len: int) -> int:
        """Of a token."""
        if position >= prompt_len:
            return self.decode_retention_priority
        for each in self.token_range_retention_configs:
            if each.token_start <= position and (each.token_end is None or position < each.token_end):
                return each.priority
        return 35
