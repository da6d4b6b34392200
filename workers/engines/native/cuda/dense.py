"""Attention of long chunks of prompts by cuDNN, over keys and values gathered from the pool.

cuDNN builds a plan for each shape, so rows and keys are padded to multiples of ``chunks.STEP``. Its causal mask begins
at the first key. A chunk behind cached tokens therefore attends to the leading keys without a mask and to the others
with one; the two results are merged.
"""

import structlog
import torch
from torch import Tensor

from workers.engines.native.attention import AttentionParams
from workers.engines.native.cuda import attend
from workers.engines.native.cuda.chunks import LONG, STEP, Chunk
from workers.engines.native.pool import Pool

log = structlog.get_logger("engine")

COPY = 4096  # values that one program gathers
MOST_DIM = 128


class DenseAttention:
    """Attends chunks of prompts outside of the pages. One per executor; not thread-safe."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._device = device
        self.enabled = enabled

    def warm(self, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        """Load cuDNN, which takes a second, and plan whole prompts of up to ``tokens``, 60 ms for each shape.

        Plans belong to the thread that makes them. If cuDNN does not work here, nothing suits ``attend`` afterwards.
        """
        most = -(-tokens // STEP) * STEP
        query = torch.zeros((most, heads, dim), dtype=dtype, device=self._device)
        key = torch.zeros((most, kv_heads, dim), dtype=dtype, device=self._device)
        if not self.enabled or not self._fits(query):
            return
        try:
            with torch.inference_mode():
                for rows in range(LONG, most + 1, STEP):
                    _attention(query[:rows], key[:rows], key[:rows], 1.0, causal=True)
                torch.cuda.synchronize()
        except RuntimeError as error:
            self.enabled = False
            log.warning("prompts_without_cudnn", reason=str(error).strip().splitlines()[0])

    def suits(self, chunk: Chunk, query: Tensor, params: AttentionParams, page: int) -> bool:
        """Whether ``attend`` computes what a layer asks for."""
        plain = params.softcap == 0 and params.sinks is None
        seen = params.window is None or chunk.start + chunk.tokens <= params.window
        return self.enabled and plain and seen and self._fits(query) and STEP % page == 0

    def _fits(self, query: Tensor) -> bool:
        dim = query.shape[-1]
        return (query.element_size() == 2 or not query.is_cuda) and dim <= MOST_DIM and dim % 8 == 0

    def attend(
        self, chunk: Chunk, layer: int, query: Tensor, pool: Pool, tables: Tensor, scale: float, out: Tensor
    ) -> None:
        """
        Args:
            query: (tokens of the batch, heads, head_dim), rotated.
            tables: (table_rows, width) int32.
            out: as ``query``; the chunk's rows are written.
        """
        own = slice(chunk.row, chunk.row + chunk.tokens)
        given, front, padded = query[own], chunk.front, chunk.rows
        if padded != chunk.tokens:
            given = query.new_zeros((padded, *query.shape[1:]))
            given[front : front + chunk.tokens] = query[own]
        end = chunk.start + chunk.tokens
        keys, values = _gather(pool, tables[chunk.table_row], layer, chunk.unmasked, padded, end, query.dtype)
        near, near_mass = _attention(given, keys, values, scale, causal=True)
        if not chunk.unmasked:
            out[own] = near[front : front + chunk.tokens]
            return
        keys, values = _gather(pool, tables[chunk.table_row], layer, 0, chunk.unmasked, end, query.dtype)
        far, far_mass = _attention(given, keys, values, scale, causal=False)
        _, heads, dim = query.shape
        attend.merge[(chunk.tokens,)](
            near, far, near_mass, far_mass, out[own], front, near.stride(0), near.stride(1), far.stride(0),
            far.stride(1), out.stride(0), padded,
            HEADS=heads, HEADS_P=_power(heads), DIM=dim, DIM_P=_power(dim), num_warps=4,
        )  # fmt: skip


def _gather(
    pool: Pool, table: Tensor, layer: int, first: int, count: int, known: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of positions ``first`` to ``first + count``; zeros from ``known`` on.

    Returns: two of (count, kv_heads, head_dim).
    """
    data = pool.data
    page, kv_heads, dim = data.shape[3:]
    made = torch.empty((2, count, kv_heads, dim), dtype=dtype, device=data.device)
    size = page * kv_heads * dim
    attend.gather[(count // page, 2, -(-size // COPY))](
        data, table, made, layer, first, known, data.stride(0), data.stride(1), data.stride(2), made.stride(0),
        ROW=kv_heads * dim, PAGE=page, COPY=COPY, num_warps=4,
    )  # fmt: skip
    return made[0], made[1]


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """
    Args:
        query: (rows, heads, head_dim).
        key, value: (keys, kv_heads, head_dim).
    Returns: (rows, heads, head_dim), and the logarithms of the softmax's sums, (heads, rows) float32.
    """
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    if not query.is_cuda:
        return _on_cpu(q, k, v, scale, causal)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return result[0][0].transpose(0, 1), result[1].reshape(query.shape[1], query.shape[0])


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The same by plain torch, for the kernels' interpreter."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1).float() for each in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    answer = scores.softmax(-1) @ v
    return answer[0].transpose(0, 1).to(q.dtype), scores.logsumexp(-1)[0]


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
