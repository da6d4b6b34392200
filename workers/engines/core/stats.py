"""The state of a scheduler in numbers, as engines report it. Pure."""

from penstock.workers.engines.base import EngineStats
from penstock.workers.engines.core.scheduler import Scheduler


def scheduler_stats(scheduler: Scheduler) -> EngineStats:
    report, drafts = scheduler.report, scheduler.drafts
    pool, host = scheduler.kv_cache.pool, scheduler.blocks.host
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.queue),
        used_blocks=pool.used_blocks,
        cached_blocks=pool.cached_blocks,
        free_blocks=pool.free_blocks,
        pinned_blocks=scheduler.reservations.reserved_blocks + scheduler.held.block_count,
        preemptions=report.preemptions,
        hit_tokens=report.hit_tokens,
        prompt_tokens=report.prompt_tokens,
        drafts=drafts.drafts,
        draft_tokens=drafts.proposed,
        accepted_tokens=drafts.accepted,
        host_blocks=0 if host is None else host.used_slots,
        loaded_blocks=0 if host is None else host.loaded_blocks,
    )
