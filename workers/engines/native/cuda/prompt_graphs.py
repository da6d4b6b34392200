"""CUDA graphs of steps with short prompts. Launching their kernels one by one takes the host longer than computing.

A graph has a fixed number of rows. Its leading rows can be decoded, the others lie in tiles; what a step does not use
is padding.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.cuda.packing import Packed
from penstock.workers.engines.native.model.pool import free_bytes

# Rows that graphs are captured for. Beyond, computing an 8B model takes longer than launching, which takes the host 30
# to 50 ms beside the threads of a worker (two H200, 32 cores). Products compute 128 rows at a time.
ROWS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, *range(768, 2561, 128))
SMALL = 640  # rows of graphs that are captured whatever memory there is
GRAPH_SHARE = 0.125  # of the free memory, for the activations of the largest graph. All others use the same
DECODES, MOST_DECODES = 64, 256  # leading rows that can be decoded: half of all, within these. Each costs its logits
SPLITS = 4  # of the keys of a decoded row where so few are
CAPTURE = "thread_local"  # other threads, as NCCL's, may use the device meanwhile
PROMPTS = 8  # tiles in addition to those that the rows fill,
PROMPT_ROWS = 64  # or one for each so many rows


class GraphInputs(NamedTuple):
    """What a graph reads: parts of the upload buffer.

    Attributes:
        tokens, table_rows, positions: (rows,) int32; see ``CudaExecutor._forward``.
        decode_positions: as ``positions``, of the leading rows; -1: not decoded.
        wanted: rows whose logits are computed.
        tiles: (n, 4) int32; without rows: padding.
    """

    tokens: Tensor
    table_rows: Tensor
    positions: Tensor
    decode_positions: Tensor
    wanted: Tensor
    tiles: Tensor


def unowned(tensor: Tensor) -> Tensor:
    """A graph's result without a share in its memory, so that graphs captured later in the same pool may use it, too.

    They never run at the same time, and tokens are drawn from what one has computed before the next one runs.
    """
    count = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize)
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, count)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape, tensor.stride())


class PromptGraphs:
    """The graphs of one executor.

    Args:
        offset: where its part of the upload buffer begins; ``size`` integers.
        tile_rows: maximum number of rows per tile.
        max_tokens: maximum number of tokens per step.
        max_decodes: maximum number of rows that one step decodes.
    """

    def __init__(self, upload: Upload, offset: int, tile_rows: int, max_tokens: int, max_decodes: int) -> None:
        self._upload, self._tile_rows = upload, tile_rows
        self.sizes: list[int] = [rows for rows in ROWS if rows <= max_tokens]
        self.graphs: dict[tuple[int, bool], tuple[Any, Tensor]] = {}
        self._max_decodes = min(MOST_DECODES, max_decodes)
        starts = [offset]
        for length in self._lengths(self.sizes[-1] if self.sizes else 0):
            starts.append(starts[-1] + -(-length // 16) * 16)
        self._starts, self.size = starts[:-1], starts[-1] - offset

    def _tiles(self, rows: int) -> int:
        return -(-rows // self._tile_rows) + max(PROMPTS, rows // PROMPT_ROWS)

    def _decodes(self, rows: int) -> int:
        return min(max(DECODES, rows // 2), rows, self._max_decodes)

    def wanted(self, rows: int) -> int:
        """The most rows whose logits a graph computes."""
        return self._decodes(rows) + PROMPTS

    def _lengths(self, rows: int) -> tuple[int, ...]:
        return (rows, rows, rows, self._decodes(rows), self.wanted(rows), 4 * self._tiles(rows))

    def affordable(self, forward: Callable[[GraphInputs], Tensor]) -> int:
        """Rows of a graph whose activations, which it keeps, take ``GRAPH_SHARE`` of the free memory.

        By those of a graph that is captured in any case: experts, latents and adapters have some of their own.

        Args:
            forward: as of ``capture``.
        """
        device, size = self._upload.device.device, max((size for size in self.sizes if size <= SMALL), default=0)
        if not size:
            return 0
        free, before = free_bytes(device), torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        forward(self.inputs(size))
        taken = torch.cuda.max_memory_allocated(device) - before
        return int(GRAPH_SHARE * free * size / max(taken, 1))

    def bound(self, rows: int) -> None:
        """Capture no graph with more rows, except those that hardly take memory."""
        self.sizes = [size for size in self.sizes if size <= max(rows, SMALL)]

    def capture(
        self,
        forward: Callable[[GraphInputs], Tensor],
        pool: Any,
        variants: Iterable[tuple[int, bool]],
        *,
        again: bool = False,
        all_or_none: bool = False,
    ) -> str:
        """Capture the graphs. Those that the memory is too small for are left out.

        Args:
            forward: the model's logits of the wanted rows.
            pool: memory of other graphs, which never run at the same time.
            variants: of which rows, and whether some have an adapter; each is captured before the next one is taken.
            again: see ``CudaExecutor.capture``.
            all_or_none: too little memory for one is an error, as with other ranks, which would wait for this one.

        Returns: why some are missing; "": none is.

        Raises:
            RuntimeError: the model cannot be captured.
        """
        missing: dict[int, str] = {}
        for size, adapted in variants:
            if size in missing:
                continue
            inputs = self.inputs(size)
            try:
                if not again:
                    forward(inputs)  # compiles kernels and lets libraries choose theirs
                    torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE):
                    logits = forward(inputs)
            except torch.OutOfMemoryError as error:
                if all_or_none:
                    raise
                missing[size] = str(error)
                self.graphs.pop((size, False), None)
                torch.cuda.synchronize()
                continue
            self.graphs[size, adapted] = (graph, unowned(logits))
        self.sizes = [size for size in self.sizes if size not in missing]
        return f"{len(missing)} sizes, {max(missing)} rows: {missing[max(missing)]}" if missing else ""

    def clear(self) -> None:
        self.graphs.clear()

    def inputs(self, size: int) -> GraphInputs:
        tokens, table_rows, positions, decode_positions, wanted, tiles = (
            self._upload.device[start : start + length]
            for start, length in zip(self._starts, self._lengths(size), strict=True)
        )
        return GraphInputs(tokens, table_rows, positions, decode_positions, wanted, tiles.view(-1, 4))

    def fit(self, packed: Packed) -> int:
        """The rows of the smallest graph that computes a step; 0: none does."""
        if not self.graphs or packed.media or packed.scored or packed.long or packed.placed:
            return 0
        needed = (len(packed.tokens), packed.decodes, len(packed.drawn), len(packed.tiles))
        for size in self.sizes:
            room = (size, self._decodes(size), self.wanted(size), self._tiles(size))
            if all(count <= most for count, most in zip(needed, room, strict=True)):
                return size
        return 0

    def put(self, packed: Packed, size: int) -> None:
        """Add a step's inputs to the upload."""
        put, starts = self._upload.put, self._starts
        padding = size - len(packed.tokens)
        decodes = self._decodes(size)
        put(packed.tokens + [0] * padding, starts[0])
        put(packed.table_rows + [0] * padding, starts[1])
        put(packed.positions + [-1] * padding, starts[2])
        put(packed.positions[: packed.decodes] + [-1] * (decodes - packed.decodes), starts[3])
        put(packed.drawn + [0] * (self.wanted(size) - len(packed.drawn)), starts[4])
        tiles = [number for tile in packed.tiles for number in tile]
        put(tiles + [0] * (4 * self._tiles(size) - len(tiles)), starts[5])

    def replay(self, size: int, adapted: bool = False) -> Tensor:
        """Compute a step whose inputs were sent; returns the wanted rows' logits, those of ``Packed.drawn`` first.

        Args:
            adapted: some rows have an adapter; which ones was sent, too.
        """
        graph, logits = self.graphs[size, adapted]
        graph.replay()
        return logits
