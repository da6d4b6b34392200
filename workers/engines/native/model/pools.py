"""Sizes and allocates the KV pools of an engine."""

from dataclasses import dataclass

from penstock.workers.engines.base import EngineError
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.native.model.model import Model
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import DTYPES, KvShape, Pool, blocks_that_fit
from penstock.workers.engines.native.model.sliding import SlidingLayers, SlidingPool, pool_sizes, sliding_layers


@dataclass(frozen=True, slots=True)
class Pools:
    """The pool of all layers, or one of the full-attention layers and one of the sliding layers."""

    kv: Pool
    sliding: SlidingPool | None = None
    draft: Pool | None = None  # of a draft model, under the block numbers of ``kv``

    @property
    def total_blocks(self) -> int:
        """Blocks that memory holds."""
        if self.sliding is not None and not self.sliding.layers.full:
            return self.sliding.pool.blocks
        return self.kv.blocks

    def window_rows(self, blocks: BlockManager) -> WindowRows | None:
        if self.sliding is None:
            return None
        pool, layers = self.sliding.pool, self.sliding.layers
        return WindowRows(blocks, pool.blocks, block_size=pool.block_size, window=layers.window, only=not layers.full)


def make_pools(
    model: Model, options: NativeOptions, model_len: int, *, hybrid: bool, draft: Model | None = None
) -> Pools:
    """
    Args:
        model_len: tokens of the longest sequence.
        hybrid: give layers with sliding windows a pool of their own; not with a draft model.
    Raises:
        EngineError: there is no memory for them.
    """
    size = options.block_size
    if size < 1:
        raise ValueError(f"block_size must be at least 1, not {size}")
    dtype = DTYPES.get(options.kv_dtype, model.dtype)
    block_bytes = model.shape.block_bytes(size, dtype)
    if draft is not None:
        block_bytes += draft.shape.block_bytes(size, draft.dtype)
    blocks = options.kv_blocks or blocks_that_fit(
        block_bytes, -(-model_len // size), model.device, options.kv_memory_fraction
    )
    if blocks < 1:
        raise EngineError(
            f"no memory is left for a single KV block of {block_bytes} bytes on {model.device}; "
            "set kv_blocks, raise kv_memory_fraction, lower block_size, or use a smaller model or dtype"
        )
    layers = sliding_layers(model.windows, model_len) if hybrid else None

    def pool(count: int, number: int) -> Pool:
        shape = KvShape(count, model.shape.kv_heads, model.shape.head_dim)
        return Pool(shape, number, size, dtype, model.device, model.dtype)

    try:
        if layers is None or blocks <= _least(layers, size):
            beside = None if draft is None else Pool(draft.shape, blocks, size, draft.dtype, draft.device)
            return Pools(pool(model.shape.layers, blocks), draft=beside)
        sizes = pool_sizes(
            layers,
            blocks,
            block_size=size,
            max_running=options.max_running,
            model_len=model_len,
        )
        return Pools(pool(layers.full, sizes.blocks), SlidingPool(pool(layers.sliding, sizes.rows), layers))
    except OSError as error:  # mmap
        raise EngineError(f"{blocks} KV blocks of {block_bytes} bytes do not fit; lower kv_blocks") from error


def _least(layers: SlidingLayers, block_size: int) -> int:
    """Blocks with which a single window fits, and the prompt's next block."""
    return (layers.window - 2) // block_size + 3
