"""The embedded engine: model code and weights from transformers; the paged pool, the batches and the sampler ours."""

from pathlib import Path

from configs.settings import WorkerSettings
from workers.engines.core.engine import EncodeEngine, ScheduledEngine
from workers.engines.cpu_budget import wait_passively
from workers.engines.logits.flags import from_settings as processors


def from_settings(settings: WorkerSettings, path: Path) -> ScheduledEngine:
    """The engine of a worker process; raises as ``build`` does, and ProcessorError for its flags."""
    wait_passively()
    from workers.engines.native.build import build

    return build(
        str(path),
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        max_running=settings.max_running,
        max_batched_tokens=settings.max_batched_tokens,
        max_model_len=settings.max_model_len,
        prefix_cache=settings.prefix_cache,
        kv_events=settings.publish_events_and_metrics,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        embed_slots=settings.embed_slots,
        processors=processors(settings, path),
        kv_dtype=settings.kv_dtype,
        kv_memory_fraction=settings.kv_memory_fraction,
        no_evict=settings.scheduler_policy == "guaranteed_no_evict",
        warm=True,
    )


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """The engine of an encode worker's process; raises as ``build_encoder`` does."""
    wait_passively()
    from workers.engines.native.encoder import build_encoder

    return build_encoder(
        str(path),
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_model_len=settings.max_model_len,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        embed_slots=settings.embed_slots,
    )
