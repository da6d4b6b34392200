"""The memory of the KV cache: one tensor of equal blocks, and how many of them fit.

Block-major: a block with all its layers is one contiguous range, so a transfer needs one descriptor per block.
Sequences are unknown here: the block manager assigns blocks.
"""

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.infra.process import budgets
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import EngineError

CUDA_SHARE = 0.85  # of the memory that the weights leave free; activations need the rest
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token, or the latent of which both are made (multi-head latent attention).

    Attributes:
        kv_heads: of this rank.
        first_head, all_heads: of a model that is split: the first of them, of how many; 0: they are all.
        latent: size of the latent; the other values of its one head are the rotated part of all heads' keys. 0: there
            are keys and values.
    """

    layers: int
    kv_heads: int
    head_dim: int
    first_head: int = 0
    all_heads: int = 0
    latent: int = 0

    @property
    def parts(self) -> int:
        """Tensors of a layer: keys and values, or latents."""
        return 1 if self.latent else 2

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return self.layers * self.parts * block_size * self.kv_heads * self.head_dim * dtype.itemsize


class KvPool:
    """The KV cache.

    Args:
        dtype: of the storage.
        computed: of the model's activations; None: the same.

    Attributes:
        data: (blocks, layers, parts, block_size, kv_heads, head_dim); index 0 of the third axis is keys, 1 values, or
            the only one latents.
        limit: largest number of the storage dtype; 0: it is the computed one.
    """

    def __init__(
        self,
        shape: KvShape,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        computed: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.computed = computed or dtype
        self.blocks = blocks
        self.block_size = block_size
        self.block_bytes = shape.block_bytes(block_size, dtype)
        self._size, self._dtype, self._device = (
            (blocks, shape.layers, shape.parts, block_size, shape.kv_heads, shape.head_dim),
            dtype,
            device,
        )
        self.allocate()
        self.limit = torch.finfo(dtype).max if self.computed != dtype else 0.0

    def allocate(self) -> None:
        """Have memory, of zeros."""
        self.data = zeros(self._size, self._dtype, self._device)
        # 8-bit floats cannot be indexed.
        self._raw = self.data if self._dtype.itemsize > 1 else self.data.view(torch.uint8)

    def free(self) -> None:
        """Have none until ``allocate``."""
        self.data = self._raw = torch.empty(0, dtype=self._dtype, device=self._device)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new tokens.

        Args:
            blocks, offsets: (tokens,) int64, where each goes; no position twice.
            key, value: (tokens, kv_heads, head_dim) each, or the two parts of latents.
        """
        place = self._raw[:, layer]
        for number, part in enumerate([torch.cat([key, value], -1)] if self.shape.latent else [key, value]):
            place[blocks, number, offsets] = self._saturated(part) if self.limit else part

    def _saturated(self, values: Tensor) -> Tensor:
        """Cast to the storage dtype; larger values become its largest, as an infinity would spoil every later token."""
        return values.clamp(-self.limit, self.limit).to(self.data.dtype).view(self._raw.dtype)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, ...]:
        """Copies of the parts of whole blocks.

        Args:
            table: (rows, n) int64.
        Returns: keys and values, or latents, each (rows, kv_heads, n * block_size, head_dim).
        """
        rows, n = table.shape
        flat = table.reshape(-1)
        tokens = (rows, n * self.block_size, self.shape.kv_heads, self.shape.head_dim)
        found = [self._raw[:, layer, part].index_select(0, flat).view(tokens) for part in range(self.shape.parts)]
        if self.limit:
            found = [part.view(self.data.dtype).to(self.computed) for part in found]
        return tuple(part.transpose(1, 2) for part in found)

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that get a new owner: values that a batch reads beside its own tokens must be finite."""
        if blocks:
            self._raw.index_fill_(0, torch.tensor(blocks, device=self.data.device), 0)

    def memory(self) -> Memory:
        """Where other processes find the blocks."""
        kind, device = location(self.data.device)
        sizes = ",".join(map(str, self.data.shape[1:]))
        return Memory(
            base=self.data.data_ptr(),
            block_bytes=self.block_bytes,
            blocks=self.blocks,
            kind=kind,
            device=device,
            layout=f"{dtype_name(self.data.dtype)}({sizes})",
            first_head=self.shape.first_head,
            all_heads=self.shape.all_heads,
        )


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, never empty(): a masked position is still multiplied by its weight 0, and 0 x NaN is NaN.

    On a CPU these are anonymous pages, which take no memory until a block is first used.
    """
    if device.type != "cpu" or not math.prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def location(device: torch.device) -> tuple[str, int]:
    """Kind and index of a device, as in ``Memory``."""
    if device.type == "cuda" and device.index is None:
        return device.type, torch.cuda.current_device()
    return device.type, device.index or 0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def out_of_memory(error: Exception) -> str:
    """An error text that says what to change."""
    return (
        "out of memory: lower max_batched_tokens (activations), max_running (logits) or kv_blocks (the pool) "
        f"({str(error).strip().splitlines()[0]})"
    )


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise errors of a device as ``EngineError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(out_of_memory(error)) from error
    except RuntimeError as error:  # torch has no narrower type for a lost device or a full host
        if "allocate memory" in str(error):
            raise EngineError(out_of_memory(error)) from error
        raise EngineError(f"the step failed: {error}") from error


def blocks_that_fit(block_bytes: int, wanted: int, device: torch.device, share: float = 0.0, *, beside: int = 0) -> int:
    """How many blocks a pool may have: a share of free memory, or ``wanted`` if that is more but half of it fits.

    Args:
        wanted: blocks of one sequence as long as the model takes.
        share: of free memory, which then decides alone; 0: as above.
        beside: bytes that something else may take, at most. They are left as far as they are half of what is free: on
            a small GPU, a few sequences run, and take less.
    """
    free = free_bytes(device)
    free -= min(beside, free // 2)
    if share:
        return int(free * share) // block_bytes
    if device.type == "cuda":
        return int(free * CUDA_SHARE) // block_bytes
    usual = budgets.share(free) // block_bytes
    return max(usual, min(wanted, free // 2 // block_bytes))


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return budgets.free_bytes()
