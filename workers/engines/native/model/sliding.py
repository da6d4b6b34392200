"""The KV of models with sliding windows: two pools, so that blocks behind a window are freed."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.engines.native.model.attention import AttentionParams, Paged
from penstock.workers.engines.native.model.pool import Pool

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

    pool: Pool
    layers: SlidingLayers


@dataclass(frozen=True, slots=True)
class PoolSizes:
    blocks: int  # of full-attention layers
    rows: int  # of sliding layers


def pool_sizes(layers: SlidingLayers, blocks: int, *, block_size: int, max_running: int, model_len: int) -> PoolSizes:
    """Divide the memory of ``blocks`` blocks of all layers.

    Both pools should fill up at the same time, with sequences of an eighth of the longest length, but at most four
    times as long as a window, so that prefixes inside cached sequences stay reusable, too.
    """
    window = (layers.window - 2) // block_size + 2
    longest = -(-model_len // block_size)
    if not layers.full:
        return PoolSizes(max(blocks, min(max_running * longest, MAX_EMPTY_BLOCKS)), blocks)
    total = blocks * len(layers.places)
    share = min(1.0, max(MIN_SHARE, 8 * window / longest))
    rows = max(window + 1, int(share * total / (layers.full + share * layers.sliding)))
    return PoolSizes((total - rows * layers.sliding) // layers.full, rows)


class HybridAttention:
    """Implements ``penstock.workers.engines.native.model.attention.Paged`` over two pools."""

    def __init__(self, layers: SlidingLayers, full: Paged, sliding: Paged) -> None:
        self._places = layers.places
        self._full, self._sliding = full, sliding

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        slides, number = self._places[layer]
        paged = self._sliding if slides else self._full
        return paged.attend(number, query, key, value, params)
