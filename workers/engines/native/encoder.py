"""The engine of an encode worker: a vision tower, a projector, the pool of embeddings; no language model."""

import time

import torch

from workers.engines.base import EngineError, EngineInfo
from workers.engines.core.engine import EncodeEngine
from workers.engines.native import vision
from workers.engines.native.build import find_device, set_threads
from workers.engines.native.model import ModelError, configuration, end_tokens, max_positions, vision_encoder, weights
from workers.engines.native.pool import out_of_memory


def build_encoder(
    model: str,
    *,
    block_size: int = 32,
    max_running: int = 256,
    max_model_len: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    embed_slots: int = 0,
) -> EncodeEngine:
    """Load the vision encoder of a model. The language model's weights are never read.

    Args:
        block_size, max_running, max_model_len: only passed on, in ``info``.
        others: see ``NativeOptions``.

    Raises:
        ModelError: the model has no images that we can embed, or files are missing.
        EngineError: weights or pool do not fit into memory.
    """
    started = time.perf_counter()
    config = configuration(model)
    reason = vision.refusal(config)
    if reason:
        raise ModelError(f"{reason}; an encode worker needs a vision model")
    where = find_device(device)
    set_threads(threads, where)
    try:
        tower = weights(vision.LlavaTower, model, config, device=where, dtype=dtype)
        encoder = vision_encoder(model, tower, embed_slots)
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    text = config.get_text_config()
    info = EngineInfo(
        name="native",
        block_size=block_size,
        total_blocks=encoder.slots,
        slots=max_running,
        max_model_len=max_model_len or max_positions(text),
        vocab_size=text.vocab_size,
        eos_token_ids=end_tokens(tower),
        kv_events=False,
        load_seconds=time.perf_counter() - started,
    )
    return EncodeEngine(info, encoder)
