"""Prepares a loaded model for the kernels: rewrites it by rule, and compares it with the original."""

from collections.abc import Callable

import structlog
import torch

from penstock.workers.engines.native.cuda.fusions import FUSIONS
from penstock.workers.engines.native.cuda.modules import Rotation
from penstock.workers.engines.native.cuda.paged import Batch, PagedAttention, Scratch, tile_rows
from penstock.workers.engines.native.cuda.rewrite import make_invariant, rewrite, undo_layers
from penstock.workers.engines.native.model.attention import Paged
from penstock.workers.engines.native.model.model import Model, ModelError
from penstock.workers.engines.native.model.pool import Pool
from penstock.workers.engines.native.model.quantize import Fp8Linear
from penstock.workers.engines.native.model.verify import ROUNDING, ROUNDING_FP8, reference, verify

log = structlog.get_logger("engine")


def prepare(model: Model, *, invariant: bool = False) -> Rotation:
    """Rewrite a model in place; returns the rotation that its attention applies.

    Args:
        invariant: make a row's results independent of the number of rows.

    Raises:
        ModelError: the rewritten model computes something else. It must be loaded again.
    """
    narrow = any(isinstance(module, Fp8Linear) for module in model.forward.modules())
    rounding = ROUNDING_FP8 if narrow else ROUNDING
    expected = reference(model)
    rotation, counts = rewrite(model.forward)
    if invariant and (name := make_invariant(model.forward)):
        raise ModelError(f"batch_invariant: {name} has no kernel whose results do not depend on the batch")
    scratch = Scratch(1, model.shape.kv_heads, model.heads, model.shape.head_dim, model.device, invariant)

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
        verify(model, expected, paged, rounding)
        if not _same_single(model, paged, max(rounding, 2 * expected.noise)):
            raise ModelError("norms within products change the result of a single row")
    except ModelError:
        undo_layers(model.forward)
        counts["residuals within products"] = 0
        verify(model, expected, paged, rounding)
    log.info(
        "rewritten", model=type(model.forward).__name__, **{name.replace(" ", "_"): n for name, n in counts.items()}
    )
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return rotation


def _same_single(model: Model, paged: Callable[[Pool, int, int], Paged], rounding: float) -> bool:
    """Whether a decode step of one row is the same with and without norms within its products."""
    token_ids = torch.arange(12, device=model.device) % model.vocab_size
    outputs, products = [], FUSIONS.products
    try:
        for FUSIONS.products in (False, True):
            pool = Pool(model.shape, 2, 8, model.dtype, model.device)
            with torch.inference_mode():
                for start, stop in ((0, 11), (11, 12)):
                    logits = model.logits(token_ids[start:stop], token_ids[start:stop], None, paged(pool, start, stop))
            outputs.append(logits[-1].float())
    finally:
        FUSIONS.products = products
    return bool((outputs[0] - outputs[1]).norm() < rounding * outputs[0].norm())
