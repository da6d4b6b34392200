"""The pool of offloaded KV blocks in host memory."""

import torch

from penstock.workers.engines.base import EngineError
from penstock.workers.engines.core.offload import Copies
from penstock.workers.engines.native.model.executor import device_errors
from penstock.workers.engines.native.model.pool import Pool, zeros


class HostPool:
    """Implements ``penstock.workers.engines.core.offload.BlockCopier``: slots of the same shape as the pool's blocks.

    Raises:
        EngineError: there is no memory for it.
    """

    def __init__(self, pool: Pool, slots: int) -> None:
        self._pool: Pool | None = pool
        self._device = pool.data.device
        size, dtype = (slots, *pool.data.shape[1:]), pool.data.dtype
        try:
            if self._device.type == "cuda":  # page-locked, so that copies are asynchronous
                self._data = torch.zeros(size, dtype=dtype, pin_memory=True)
            else:
                self._data = zeros(size, dtype, torch.device("cpu"))
        except (OSError, RuntimeError) as error:
            raise EngineError(f"{slots} KV blocks do not fit into host memory; lower kv_offloading_size") from error

    def copy(self, copies: Copies) -> None:
        """Queue the copies on the device, without waiting; later steps see the result."""
        assert self._pool is not None, "closed"
        blocks, slots = self._pool.data, self._data
        with device_errors(self._device), torch.inference_mode():
            for block, slot in copies.saves:
                slots[slot].copy_(blocks[block], non_blocking=True)
            for slot, block in copies.loads:
                blocks[block].copy_(slots[slot], non_blocking=True)

    def close(self) -> None:
        self._pool, self._data = None, torch.empty(0)
