"""The native engine: models and weights from transformers, with our own paged KV cache, batching and sampling."""

from pathlib import Path

from penstock.configs.settings import WorkerSettings
from penstock.workers.engines.budgets import wait_passively
from penstock.workers.engines.constraints.compiler import compiler
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.logits.registry import from_settings as processors
from penstock.workers.engines.native.model.options import NativeOptions


def from_settings(settings: WorkerSettings, path: Path) -> ScheduledEngine:
    """The engine of a worker process.

    Raises:
        ProcessorError: a logits processor in the settings is wrong.
        others: as of ``native.build.build``.
    """
    wait_passively()
    edits = processors(settings, path)  # before what takes seconds to import, so that a wrong flag is known at once
    from penstock.workers.engines.native.build import build

    options = NativeOptions(
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
        kv_dtype=settings.kv_dtype,
        kv_memory_fraction=settings.kv_memory_fraction,
        no_evict=settings.scheduler_policy == "guaranteed_no_evict",
        hybrid_kv_cache=settings.hybrid_kv_cache and settings.role == "aggregated",
        kv_offloading_size=settings.kv_offloading_size,
        quantization="" if settings.quantization == "none" else settings.quantization,
        speculative_model=settings.speculative_model,
        num_speculative_tokens=settings.num_speculative_tokens,
        prompt_lookup_min=settings.prompt_lookup_min,
        prompt_lookup_max=settings.prompt_lookup_max,
        batch_invariant=settings.batch_invariant,
        warm=True,
    )
    return build(str(path), options, processors=edits, grammars=compiler(path))


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """The engine of an encode worker; raises as ``build_encoder`` does."""
    wait_passively()
    from penstock.workers.engines.native.build import build_encoder

    options = NativeOptions(
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_model_len=settings.max_model_len,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        embed_slots=settings.embed_slots,
    )
    return build_encoder(str(path), options)
