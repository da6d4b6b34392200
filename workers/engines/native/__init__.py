"""The native engine: models and weights from transformers, with our own paged KV cache, batching and sampling."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from penstock.configs.settings import WorkerSettings
from penstock.infra.process.budgets import wait_passively
from penstock.infra.process.gc_policy import loading
from penstock.workers.engines.constraints.compiler import compiler
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.core.scheduler import DECODE_ROLE_CHUNK_TOKENS
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.logits.registry import registry_from_settings
from penstock.workers.engines.native.model.options import NativeOptions


def from_settings(
    settings: WorkerSettings,
    path: Path,
    lost: Callable[[EngineError], None] = lambda error: None,
    *,
    transfer_bytes: int = 0,
) -> ScheduledEngine:
    """The engine of a worker process.

    Args:
        lost: called when another rank of a model that is split has ended; from any thread.
        transfer_bytes: of the memory of each GPU, that the worker's transfers will take.

    Raises:
        ProcessorError: a logits processor in the settings is wrong.
        others: as of ``native.build.build``.
    """
    wait_passively()
    # Before what takes seconds to import, so that a wrong flag is known at once.
    edits = registry_from_settings(settings, path)
    with loading("penstock.workers.engines.native.build"):
        from penstock.workers.engines.native.build import build

    options = dataclasses.replace(_options(settings), transfer_bytes=transfer_bytes)
    return build(str(path), options, processors=edits, grammars=compiler(path), lost=lost)


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """The engine of an encode worker; raises as ``build_encoder`` does."""
    wait_passively()
    with loading("penstock.workers.engines.native.build"):
        from penstock.workers.engines.native.build import build_encoder

    return build_encoder(str(path), _options(settings))


def _options(settings: WorkerSettings) -> NativeOptions:
    """Most have the settings' names."""
    same = {name: getattr(settings, name) for name in NativeOptions.__slots__ if hasattr(settings, name)}
    changed = {
        "kv_events": settings.publish_events_and_metrics,
        "no_evict": settings.scheduler_policy == "guaranteed_no_evict",
        "quantization": "" if settings.quantization == "none" else settings.quantization,
        "max_loras": settings.lora_slots,
        "mixed_chunk_tokens": DECODE_ROLE_CHUNK_TOKENS if settings.role == "decode" else 0,
        "tensor_parallel_size": settings.tensor_parallel_size or 1,
        "warm": True,
    }
    return NativeOptions(**same | changed)
