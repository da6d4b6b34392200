"""A loaded model made ready for the kernels: rewritten by rule, and compared with what it was."""

import structlog
import torch

from workers.engines.native.attention import Paged
from workers.engines.native.cuda.modules import Rotation
from workers.engines.native.cuda.paged import Batch, PagedAttention, Scratch, tile_rows
from workers.engines.native.cuda.rewrite import rewrite, undo_layers
from workers.engines.native.model import Model, ModelError
from workers.engines.native.pool import Pool
from workers.engines.native.verify import reference, verify

log = structlog.get_logger("engine")


def prepare(model: Model) -> Rotation:
    """Rewrite a model in place; returns what its attention needs to rotate by itself.

    Raises:
        ModelError: it no longer computes what it did; load it again.
    """
    expected = reference(model)
    rotation, counts = rewrite(model.forward)
    scratch = Scratch(1, model.shape.kv_heads, model.heads, model.shape.head_dim, model.device)

    def paged(pool: Pool, start: int, stop: int) -> Paged:
        tables, device = torch.tensor([[1, 0]], dtype=torch.int32, device=model.device), model.device
        places = torch.arange(start, stop, dtype=torch.int32, device=device)
        tiles = None
        if stop - start > 1:
            assert stop - start <= tile_rows(model.dtype)
            tiles = torch.tensor([[0, start, stop - start, 0]], dtype=torch.int32, device=device)
        batch = Batch(tables, torch.zeros_like(places), places, 0 if tiles is not None else 1, tiles)
        return PagedAttention(pool, scratch, rotation, batch)

    try:
        verify(model, expected, paged)
    except ModelError:
        undo_layers(model.forward)
        counts["residuals within products"] = 0
        verify(model, expected, paged)
    log.info(
        "rewritten", model=type(model.forward).__name__, **{name.replace(" ", "_"): n for name, n in counts.items()}
    )
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return rotation
