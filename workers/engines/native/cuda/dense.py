"""Attention of long chunks of prompts by cuDNN, over keys and values gathered from the pool.

cuDNN builds a plan for each shape, so rows and keys are padded to multiples of ``chunks.STEP``. Its causal mask begins
at the first key. A chunk behind cached tokens therefore attends to the leading keys without a mask and to the others
with one; the two results are merged.
"""

from collections.abc import Sequence as Seq

import structlog
import torch
from torch import Tensor

from penstock.workers.engines.native.cuda import attend
from penstock.workers.engines.native.cuda.packing import STEP, Group, PromptChunk, adjoin
from penstock.workers.engines.native.model.attention import AttentionParams
from penstock.workers.engines.native.model.pool import KvPool

log = structlog.get_logger("engine")

COPY = 4096  # values that one program gathers
MOST_DIM = 128


class DenseAttention:
    """Attends chunks of prompts outside of the pages. One per executor; not thread-safe."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._device = device
        self.enabled = enabled

    def warm(self, planned: Seq[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        """Load cuDNN, which takes a second, and plan whole prompts, 40 ms for each shape.

        Plans belong to the thread that makes them. If cuDNN does not work here, nothing suits ``attend`` afterwards.

        Args:
            planned: see ``chunks.shapes``.
        """
        most = max((count * rows for count, rows in planned), default=0)
        query = torch.zeros((most, heads, dim), dtype=dtype, device=self._device)
        key = torch.zeros((most, kv_heads, dim), dtype=dtype, device=self._device)
        if not planned or not self.enabled or not self._fits(query):
            return
        try:
            with torch.inference_mode():
                for count, rows in planned:
                    q, k = (each[: count * rows].view(count, rows, -1, dim) for each in (query, key))
                    _attention(q, k, k, 1.0, causal=True)
                torch.cuda.synchronize()
        except RuntimeError as error:
            self.enabled = False
            log.warning("prompts_without_cudnn", reason=str(error).strip().splitlines()[0])

    def suits(self, chunk: PromptChunk, query: Tensor, params: AttentionParams, page: int) -> bool:
        """Whether ``attend`` computes what a layer asks for."""
        plain = params.softcap == 0 and params.sinks is None
        seen = params.window is None or chunk.start + chunk.tokens <= params.window
        return self.enabled and plain and seen and self._fits(query) and STEP % page == 0

    def _fits(self, query: Tensor) -> bool:
        dim = query.shape[-1]
        return (query.element_size() == 2 or not query.is_cuda) and dim <= MOST_DIM and dim % 8 == 0

    def attend(
        self, group: Group, layer: int, query: Tensor, pool: KvPool, tables: Tensor, scale: float, out: Tensor
    ) -> None:
        """
        Args:
            query: (tokens of the batch, heads, head_dim), rotated.
            tables: (table_rows, width) int32.
            out: as ``query``; the chunks' rows are written.
        """
        if len(group) == 1 and group[0].start:
            self._attend_behind(group[0], layer, query, pool, tables, scale, out)
            return
        answers = self.attend_whole(group, layer, query, pool, tables, scale)
        for number, chunk in enumerate(group):
            out[chunk.row : chunk.row + chunk.tokens] = answers[number, : chunk.tokens]

    def attend_whole(
        self, group: Group, layer: int, query: Tensor, pool: KvPool, tables: Tensor, scale: float
    ) -> Tensor:
        """Attend to whole prompts; arguments as for ``attend``.

        Returns: (prompts, padded rows, heads, head_dim), contiguous.
        """
        count, rows, row = len(group), group[0].rows, group[0].row
        if adjoin(group):
            given = query[row : row + count * rows].view(count, rows, *query.shape[1:])
        else:
            given = query.new_zeros((count, rows, *query.shape[1:]))
            for number, chunk in enumerate(group):
                given[number, : chunk.tokens] = query[chunk.row : chunk.row + chunk.tokens]
        keys, values = gathered = _empty(pool, count, rows, query)
        for number, chunk in enumerate(group):
            _gather(pool, tables[chunk.table_row], layer, 0, chunk.tokens, gathered[:, number])
        return _attention(given, keys, values, scale, causal=True)[0]

    def _attend_behind(
        self, chunk: PromptChunk, layer: int, query: Tensor, pool: KvPool, tables: Tensor, scale: float, out: Tensor
    ) -> None:
        """Attend to a chunk behind other tokens."""
        own = slice(chunk.row, chunk.row + chunk.tokens)
        front, padded, end = chunk.front, chunk.rows, chunk.start + chunk.tokens
        given = query.new_zeros((padded, *query.shape[1:]))
        given[front : front + chunk.tokens] = query[own]
        parts: list[tuple[Tensor, Tensor]] = []
        for first, count in ((chunk.unmasked, padded), (0, chunk.unmasked)):
            if count:
                keys, values = gathered = _empty(pool, 1, count, query)
                _gather(pool, tables[chunk.table_row], layer, first, end, gathered[:, 0])
                parts.append(_attention(given[None], keys, values, scale, causal=not parts))
        near, near_mass = parts[0]
        if len(parts) == 1:
            out[own] = near[0, front : front + chunk.tokens]
            return
        far, far_mass = parts[1]
        _, heads, dim = query.shape
        attend.merge[(chunk.tokens,)](
            near, far, near_mass, far_mass, out[own], front, near.stride(1), near.stride(2), far.stride(1),
            far.stride(2), out.stride(0), padded,
            HEADS=heads, HEADS_P=_power(heads), DIM=dim, DIM_P=_power(dim), num_warps=4,
        )  # fmt: skip


def _empty(pool: KvPool, count: int, keys: int, query: Tensor) -> Tensor:
    """(2, count, keys, kv_heads, head_dim): keys and values."""
    return torch.empty((2, count, keys, *pool.data.shape[4:]), dtype=query.dtype, device=query.device)


def _gather(pool: KvPool, table: Tensor, layer: int, first: int, known: int, out: Tensor) -> None:
    """Keys and values of positions from ``first`` on; zeros from ``known`` on.

    Args:
        out: (2, positions, kv_heads, head_dim), both contiguous; written.
    """
    data = pool.data
    page, kv_heads, dim = data.shape[3:]
    size = page * kv_heads * dim
    attend.gather[(out.shape[1] // page, 2, -(-size // COPY))](
        data, table, out, layer, first, known, data.stride(0), data.stride(1), data.stride(2), out.stride(0),
        ROW=kv_heads * dim, PAGE=page, COPY=COPY, num_warps=4,
    )  # fmt: skip


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """
    Args:
        query: (prompts, rows, heads, head_dim).
        key, value: (prompts, keys, kv_heads, head_dim).
    Returns: (prompts, rows, heads, head_dim), contiguous, and the logarithms of the softmax's sums, (prompts, heads,
        rows) float32.
    """
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    if not query.is_cuda:
        return _on_cpu(q, k, v, scale, causal)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    prompts, rows, heads = query.shape[:3]
    return found[0].transpose(1, 2).contiguous(), found[1].reshape(prompts, heads, rows)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The same by plain torch, for the kernels' interpreter."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1).float() for each in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    answer = scores.softmax(-1) @ v
    return answer.transpose(1, 2).to(q.dtype).contiguous(), scores.logsumexp(-1)


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
