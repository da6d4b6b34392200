"""Sizes and allocates the KV pools of an engine.

Models with sliding windows have two, so that blocks that have left a window are freed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from penstock.schemas.transfer import KV, WINDOWS, Memory
from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.running import MAX_SCORED_TOKENS
from penstock.workers.engines.core.windows import WindowRows, most_rows
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.attention import AttentionParams, Paged
from penstock.workers.engines.native.model.model import Model
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import DTYPES, KvPool, blocks_that_fit

MIN_SHARE = 0.25  # rows of sliding layers per block of full-attention layers
MAX_EMPTY_BLOCKS = 1 << 18  # blocks of a model without full-attention layers: they take no memory


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """Which layers go to which pool.

    Attributes:
        window: tokens that a query attends to in the sliding layers, itself included (the widest of them).
        places: by layer, whether it slides, and its number in its pool.
    """

    window: int
    places: tuple[tuple[bool, int], ...]

    @property
    def sliding(self) -> int:
        return sum(slides for slides, _ in self.places)

    @property
    def full(self) -> int:
        return len(self.places) - self.sliding


def sliding_layers(windows: Seq[int | None], limit: int) -> SlidingLayers | None:
    """How to split a model's layers; None: no window is shorter than the longest sequence.

    Args:
        windows: of each layer; None: full attention.
        limit: tokens of the longest sequence.
    """
    slides = [window is not None and window < limit for window in windows]
    if not any(slides):
        return None
    places = tuple((each, slides[:layer].count(each)) for layer, each in enumerate(slides))
    return SlidingLayers(max(window or 0 for window, each in zip(windows, slides, strict=True) if each), places)


@dataclass(frozen=True, slots=True)
class SlidingPool:
    """The pool of the sliding layers."""

    pool: KvPool
    layers: SlidingLayers


@dataclass(frozen=True, slots=True)
class PoolSizes:
    blocks: int  # of full-attention layers
    rows: int  # of sliding layers


def pool_sizes(
    layers: SlidingLayers, blocks: int, *, block_size: int, max_running: int, model_len: int, draft: Fraction | int = 0
) -> PoolSizes:
    """Divide the memory of ``blocks`` blocks of all layers.

    Args:
        draft: layers that the KV of a draft model is as large as, which each block of full-attention layers has.

    Both pools should fill up at the same time, with sequences of an eighth of the longest length, but at most four
    times as long as a window, so that prefixes inside cached sequences stay reusable, too.
    """
    window = most_rows(layers.window, block_size)
    longest = -(-model_len // block_size)
    full = layers.full + draft
    if not full:
        return PoolSizes(max(blocks, min(max_running * longest, MAX_EMPTY_BLOCKS)), blocks)
    total = blocks * (full + layers.sliding)
    share = min(1.0, max(MIN_SHARE, 8 * window / longest))
    rows = max(window + 1, int(share * total / (full + share * layers.sliding)))
    return PoolSizes(int((total - rows * layers.sliding) // full), rows)


def shown(pool: KvPool, sliding: SlidingPool | None) -> dict[str, Memory]:
    """The pools that other workers may read and write."""
    return {KV: pool.memory()} | ({} if sliding is None else {WINDOWS: sliding.pool.memory()})


class HybridAttention:
    """Implements ``penstock.workers.engines.native.model.attention.Paged`` over two pools."""

    def __init__(self, layers: SlidingLayers, full: Paged, sliding: Paged) -> None:
        self._places = layers.places
        self._full, self._sliding = full, sliding

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        slides, number = self._places[layer]
        paged = self._sliding if slides else self._full
        return paged.attend(number, query, key, value, params)


@dataclass(frozen=True, slots=True)
class KvPools:
    """The pool of all layers, or one of the full-attention layers and one of the sliding layers."""

    kv: KvPool
    sliding: SlidingPool | None = None
    draft: KvPool | None = None  # of a draft model, under the block numbers of ``kv``

    @property
    def _slides_only(self) -> bool:
        return self.sliding is not None and not self.sliding.layers.full and self.draft is None

    @property
    def total_blocks(self) -> int:
        """Blocks that memory holds."""
        if self.sliding is not None and self._slides_only:
            return self.sliding.pool.blocks
        return self.kv.blocks

    def described(self) -> dict[str, int]:
        """What it takes, in bytes: all of it, a token of a long sequence, and the window of each sequence."""
        size, whole, window = self.kv.block_size, [self.kv], 0
        allocated = self.kv.blocks * self.kv.block_bytes
        if self.draft is not None:
            whole.append(self.draft)
            allocated += self.draft.blocks * self.draft.block_bytes
        if self.sliding is not None:
            pool = self.sliding.pool
            allocated += pool.blocks * pool.block_bytes
            window = most_rows(self.sliding.layers.window, size) * pool.block_bytes
        return {
            "tokens": self.total_blocks * size,
            "bytes": allocated,
            "bytes_per_token": sum(pool.block_bytes for pool in whole) // size,
            "bytes_of_windows": window,
        }

    def window_rows(self, blocks: BlockManager, host: HostCache | None = None) -> WindowRows | None:
        if self.sliding is None:
            return None
        pool, window, only = self.sliding.pool, self.sliding.layers.window, self._slides_only
        return WindowRows(blocks, pool.blocks, block_size=pool.block_size, window=window, only=only, host=host)


def make_pools(
    model: Model, options: NativeOptions, model_len: int, *, hybrid: bool, draft: Model | None = None
) -> KvPools:
    """
    Args:
        model_len: tokens of the longest sequence.
        hybrid: give layers with sliding windows a pool of their own.
    Raises:
        EngineError: there is no memory for them.
    """
    size = options.block_size
    if size < 1:
        raise ValueError(f"block_size must be at least 1, not {size}")
    dtype = DTYPES.get(options.kv_dtype, model.dtype)
    block_bytes = model.shape.block_bytes(size, dtype)
    draft_bytes = 0 if draft is None else draft.shape.block_bytes(size, draft.dtype)
    drafted = Fraction(draft_bytes * model.shape.layers, block_bytes)  # in layers of the model
    block_bytes += draft_bytes
    group = model.group
    shares = group.size if group is not None and model.device.type == "cpu" else 1  # ranks that share one memory
    blocks = options.kv_blocks or blocks_that_fit(
        block_bytes * shares,
        -(-model_len // size),
        model.device,
        options.kv_memory_fraction,
        beside=beside_bytes(model, options, draft),
    )
    if group is not None:
        blocks = group.least(blocks, model.device)
    if blocks < 1:
        raise EngineError(
            f"no memory is left for a single KV block of {block_bytes} bytes on {model.device}; "
            "set kv_blocks, raise kv_memory_fraction, lower block_size, or use a smaller model or dtype"
        )
    layers = sliding_layers(model.windows, model_len) if hybrid else None

    def pool(count: int, number: int) -> KvPool:
        shape = replace(model.shape, layers=count)
        return KvPool(shape, number, size, dtype, model.device, model.dtype)

    sizes = PoolSizes(blocks, 0)
    if layers is not None and blocks > _least(layers, size):
        running = options.max_running
        sizes = pool_sizes(layers, blocks, block_size=size, max_running=running, model_len=model_len, draft=drafted)
        if group is not None and options.drafts:  # only one rank has the draft model
            sizes = PoolSizes(group.least(sizes.blocks, model.device), group.least(sizes.rows, model.device))
    try:
        drafted_kv = None if draft is None else KvPool(draft.shape, sizes.blocks, size, draft.dtype, draft.device)
        if layers is None or not sizes.rows:
            return KvPools(pool(model.shape.layers, blocks), draft=drafted_kv)
        sliding = SlidingPool(pool(layers.sliding, sizes.rows), layers)
        return KvPools(pool(layers.full, sizes.blocks), sliding, drafted_kv)
    except OSError as error:  # mmap
        raise EngineError(f"{blocks} KV blocks of {block_bytes} bytes do not fit; lower kv_blocks") from error


def beside_bytes(model: Model, options: NativeOptions, draft: Model | None = None) -> int:
    """Bytes of a GPU that are allocated after the pools and whose size is known: for logits and transfers.

    Activations and graphs are in the share that the pools leave. A CPU's pools take a smaller one, and only when used.
    """
    if model.device.type != "cuda":
        return 0
    rows = options.max_running * (1 + (options.num_speculative_tokens if options.speculative_model else 0))
    logits = sampler.memory_bytes(rows, model.vocab_size) + 4 * MAX_SCORED_TOKENS * model.vocab_size
    if model.group is not None:  # each rank's part, before they are joined
        logits += 4 * rows * model.vocab_size
    if draft is not None:
        logits += 4 * rows * draft.vocab_size
    return logits + options.transfer_bytes


def _least(layers: SlidingLayers, block_size: int) -> int:
    """Blocks with which a single window fits, and the prompt's next block."""
    return most_rows(layers.window, block_size) + 1
