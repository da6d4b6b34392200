"""Statistics of vLLM's scheduler for ``EngineStats``, in addition to vLLM's own metrics."""

from typing import Any

PREFIX = "vllm:"  # of vLLM's own metrics


class SchedulerStats:
    """The latest statistics of each rank's scheduler. Written in the loop thread, read in the engine thread."""

    def __init__(self) -> None:
        self.usage: dict[int, float] = {}  # share of the pool that running requests hold, by rank
        self.preemptions = 0

    def factory(self, config: object, rank: int = 0) -> "StatLogger":
        """For ``stat_loggers`` of AsyncLLM."""
        return StatLogger(self, rank)

    @property
    def used(self) -> float:
        """Used share of all pools."""
        return sum(self.usage.values()) / len(self.usage) if self.usage else 0.0


class StatLogger:
    """Receives one rank's statistics, with the methods of vLLM's ``StatLoggerBase``, which may gain arguments."""

    def __init__(self, scheduler: SchedulerStats, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **others: Any) -> None:
        usage = getattr(scheduler_stats, "kv_cache_usage", None)
        if usage is not None:
            self._scheduler.usage[self._rank] = float(usage)
        self._scheduler.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0) or 0)

    def log_engine_initialized(self) -> None:
        """Not used."""

    def log(self) -> None:
        """Not used."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """Not used: the engine never sleeps."""
