"""The engine of an encode worker: vision tower, projector and embeddings, without the language model."""

import time

import torch

from penstock.workers.engines.base import EngineError, EngineInfo
from penstock.workers.engines.core.encode_engine import EncodeEngine
from penstock.workers.engines.native.build import find_device, set_threads
from penstock.workers.engines.native.model import vision
from penstock.workers.engines.native.model.loading import (
    configuration,
    end_tokens,
    positions,
    vision_encoder,
    weights,
    written,
)
from penstock.workers.engines.native.model.model import ModelError
from penstock.workers.engines.native.model.options import DEFAULTS, NativeOptions
from penstock.workers.engines.native.model.pool import out_of_memory


def build_encoder(model: str, options: NativeOptions = DEFAULTS) -> EncodeEngine:
    """Load the vision encoder of a model. The language model's weights are never read.

    Args:
        options: those of loading apply (device, dtype, threads, embed_slots). block_size, max_running and
            max_model_len are only reported in ``info``.

    Raises:
        ModelError: the model takes no images that can be embedded here, or files are missing.
        EngineError: weights or embeddings do not fit into memory, or the device is missing.
    """
    started = time.perf_counter()
    config = configuration(model)
    reason = vision.refusal(config)
    if reason:
        raise ModelError(f"{reason}; an encode worker needs a vision model")
    where = find_device(options.device)
    set_threads(options.threads, where)
    try:
        tower = weights(vision.tower_of(config), model, config, device=where, dtype=options.dtype)
        encoder = vision_encoder(model, tower, options.embed_slots)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    text = config.get_text_config()
    info = EngineInfo(
        name="native",
        block_size=options.block_size,
        total_blocks=encoder.slots,
        slots=options.max_running,
        max_model_len=options.max_model_len or positions(config, written(model)).tokens,
        vocab_size=text.vocab_size,
        eos_token_ids=end_tokens(tower),
        kv_events=False,
        load_seconds=time.perf_counter() - started,
    )
    return EncodeEngine(info, encoder)
