"""The statistics that we keep of vLLM's scheduler, beside its own metrics."""

from typing import Any

PREFIX = "vllm:"  # of its own


class Scheduler:
    """What the scheduler of each rank last said. Written in the loop's thread, read in the engine's."""

    def __init__(self) -> None:
        self.usage: dict[int, float] = {}  # share of the pool that running requests hold, by rank
        self.preemptions = 0

    def factory(self, config: object, rank: int = 0) -> "StatLogger":
        """For ``stat_loggers`` of AsyncLLM."""
        return StatLogger(self, rank)

    @property
    def used(self) -> float:
        """Share of all pools."""
        return sum(self.usage.values()) / len(self.usage) if self.usage else 0.0


class StatLogger:
    """One rank's, with the methods of vLLM's ``StatLoggerBase``, whose arguments may grow."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **others: Any) -> None:
        usage = getattr(scheduler_stats, "kv_cache_usage", None)
        if usage is not None:
            self._scheduler.usage[self._rank] = float(usage)
        self._scheduler.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0) or 0)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """It never sleeps here."""
