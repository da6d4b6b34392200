"""Metrics of a worker's KV blocks, in a registry of their own."""

from penstock.infra.metrics.scope import MetricScope
from penstock.workers.engines.base import EngineStats
from penstock.workers.metrics.totals import Total


class KvMetrics:
    """
    Args:
        scope: with the prefix of these metrics.
    """

    def __init__(self, scope: MetricScope) -> None:
        self.scope = scope
        self.capacity = scope.gauge("capacity_blocks", "KV blocks in all")
        self.block_size = scope.gauge("block_size_tokens", "tokens in a KV block")
        self.used = scope.gauge("used_blocks", "KV blocks held by sequences")
        self.cached = scope.gauge("cached_blocks", "KV blocks kept for reuse")
        self.free = scope.gauge("free_blocks", "KV blocks without content")
        self.usage = scope.gauge("usage_ratio", "share of the KV blocks that sequences hold")
        self.host = scope.gauge("host_blocks", "KV blocks kept in host memory")
        self.loaded = Total(scope.counter("loaded_blocks", "KV blocks copied back from host memory"))

    def observe(self, stats: EngineStats) -> None:
        """The engine's statistics, as they are now."""
        self.used.set(stats.used_blocks)
        self.cached.set(stats.cached_blocks)
        self.free.set(stats.free_blocks)
        blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
        self.usage.set(stats.used_blocks / blocks if blocks else 0.0)
        self.host.set(stats.host_blocks)
        self.loaded.set(stats.loaded_blocks)
