"""Attention of long chunks of prompts by cuDNN, over keys and values gathered from the pool.

cuDNN builds a plan for each shape, so rows and keys are padded to multiples of ``chunks.STEP``. Its causal mask begins
at the first key. A chunk after cached tokens therefore attends to the leading keys without a mask and to the others
with one; the two results are merged.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.workers.engines.native.cuda import attend
from penstock.workers.engines.native.cuda.packing import STEP, Group, PromptChunk, adjoin
from penstock.workers.engines.native.model.attention import AttentionParams
from penstock.workers.engines.native.model.pool import KvPool

log = structlog.get_logger("engine")

COPY = 4096  # values that one program gathers
MOST_DIM = 128
TRIAL_ERROR = 0.02  # relative, of attention in 16 bits


class KeySource(Protocol):
    """Where a layer's keys and values come from."""

    def read(
        self, chunks: tuple[PromptChunk, ...], first: int, known: list[int], positions: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Those of the sequences of some chunks, from position ``first`` on.

        Args:
            known: by chunk, the position from which on there are none, so that keys and values are made of zeros.
        Returns: keys and values, (chunks, positions, kv_heads, head_dim) each.
        """


@dataclass(frozen=True, slots=True)
class PooledKeys:
    """Implements ``KeySource`` with a pool of keys and values.

    Args:
        tables: (table_rows, width) int32.
    """

    pool: KvPool
    tables: Tensor
    layer: int

    def read(
        self, chunks: tuple[PromptChunk, ...], first: int, known: list[int], positions: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        keys, values = gathered(self.pool, self.tables, self.layer, chunks, first, known, positions, dtype)
        return keys, values


class DenseAttention:
    """Attends chunks of prompts outside of the pages. One per executor; not thread-safe."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._device = device
        self.enabled = enabled
        self._most_dim = MOST_DIM
        self._flash = False  # FlashAttention instead of cuDNN
        self._prepared = False

    def prepare(self, query: Tensor, value_dim: int) -> bool:
        """Find out, once, what attends with values narrower than keys; returns whether something does."""
        if self._prepared or not query.is_cuda:
            return self.enabled
        if query.element_size() != 2:
            return False
        self._prepared, dim, reason = True, query.shape[-1], "other results than plain torch"
        generator = torch.Generator(device=query.device).manual_seed(1)
        q, k, v = (
            torch.randn((1, STEP, 2, size), generator=generator, device=query.device).to(query.dtype)
            for size in (dim, dim, value_dim)
        )
        by_head = [each.transpose(1, 2).float() for each in (q, k, v)]
        expected = _plainly(by_head[0], by_head[1], by_head[2], dim**-0.5, True)
        for self._flash in (False, True):
            try:
                pairs = zip(_attention(q, k, v, dim**-0.5, causal=True, flash=self._flash), expected, strict=True)
                if all((one.float() - other).norm() < TRIAL_ERROR * other.norm() for one, other in pairs):
                    self._most_dim = dim
                    return self.enabled
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
        log.warning("prompts_without_cudnn", reason=reason)
        self.enabled = False
        return False

    def warm(
        self,
        planned: Seq[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> None:
        """Load cuDNN, which takes a second, and plan whole prompts, 40 ms for each shape.

        Plans belong to the thread that makes them. If cuDNN does not work here, nothing suits ``attend`` afterwards.

        Args:
            planned: see ``chunks.shapes``.
            value_dim: None: that of keys.
        """
        most = max((count * rows for count, rows in planned), default=0)
        query = torch.zeros((most, heads, dim), dtype=dtype, device=self._device)
        key = torch.zeros((most, kv_heads, dim), dtype=dtype, device=self._device)
        if not planned or not self.enabled:
            return
        if value_dim is not None and query.element_size() == 2:
            self.prepare(query, value_dim)
        if not self._fits(query):
            return
        try:
            with torch.inference_mode():
                for count, rows in planned:
                    q, k = (each[: count * rows].view(count, rows, -1, dim) for each in (query, key))
                    _attention(q, k, k[..., :value_dim], 1.0, causal=True, flash=self._flash)
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
        return (query.element_size() == 2 or not query.is_cuda) and dim <= self._most_dim and dim % 8 == 0

    def attend(self, group: Group, query: Tensor, source: KeySource, scale: float, out: Tensor) -> None:
        """
        Args:
            query: (tokens of the batch, heads, head_dim), rotated.
            out: (tokens of the batch, heads, head_dim of values), the heads beside each other; the chunks' rows are
                written.
        """
        if len(group) == 1 and group[0].start:
            self._attend_behind(group[0], query, source, scale, out)
            return
        answers = self.attend_whole(group, query, source, scale)
        for number, chunk in enumerate(group):
            out[chunk.row : chunk.row + chunk.tokens] = answers[number, : chunk.tokens]

    def attend_whole(self, group: Group, query: Tensor, source: KeySource, scale: float) -> Tensor:
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
        keys, values = source.read(group, 0, [chunk.tokens for chunk in group], rows, query.dtype)
        return _attention(given, keys, values, scale, causal=True, flash=self._flash)[0]

    def _attend_behind(self, chunk: PromptChunk, query: Tensor, source: KeySource, scale: float, out: Tensor) -> None:
        """Attend to a chunk after other tokens."""
        own = slice(chunk.row, chunk.row + chunk.tokens)
        front, padded, end = chunk.front, chunk.rows, chunk.start + chunk.tokens
        given = query.new_zeros((padded, *query.shape[1:]))
        given[front : front + chunk.tokens] = query[own]
        parts: list[tuple[Tensor, Tensor]] = []
        for first, count in ((chunk.unmasked, padded), (0, chunk.unmasked)):
            if count:
                keys, values = source.read((chunk,), first, [end], count, query.dtype)
                parts.append(_attention(given[None], keys, values, scale, causal=not parts, flash=self._flash))
        near, near_mass = parts[0]
        if len(parts) == 1:
            out[own] = near[0, front : front + chunk.tokens]
            return
        far, far_mass = parts[1]
        _, heads, dim = out.shape
        attend.merge[(chunk.tokens,)](
            near, far, near_mass, far_mass, out[own], front, near.stride(1), near.stride(2), far.stride(1),
            far.stride(2), out.stride(0), padded,
            HEADS=heads, HEADS_P=_power(heads), DIM=dim, DIM_P=_power(dim), num_warps=4,
        )  # fmt: skip


def gathered(
    pool: KvPool,
    tables: Tensor,
    layer: int,
    chunks: tuple[PromptChunk, ...],
    first: int,
    known: list[int],
    positions: int,
    dtype: torch.dtype,
) -> Tensor:
    """What a pool has of a layer, as ``KeySource.read`` returns it; zeros where nothing is known.

    Returns: (parts, chunks, positions, kv_heads, head_dim).
    """
    data = pool.data
    parts, page, kv_heads, dim = data.shape[2:]
    size = page * kv_heads * dim
    out = torch.empty((parts, len(chunks), positions, kv_heads, dim), dtype=dtype, device=data.device)
    for number, chunk in enumerate(chunks):
        attend.gather[(positions // page, parts, -(-size // COPY))](
            data, tables[chunk.table_row], out[:, number], layer, first, known[number], data.stride(0), data.stride(1),
            data.stride(2), out.stride(0), ROW=kv_heads * dim, PAGE=page, COPY=COPY, num_warps=4,
        )  # fmt: skip
    return out


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, flash: bool = False
) -> tuple[Tensor, Tensor]:
    """
    Args:
        query: (prompts, rows, heads, head_dim).
        key, value: (prompts, keys, kv_heads, head_dim).
    Returns: (prompts, rows, heads, head_dim), contiguous, and the logarithms of the softmax's sums, (prompts, heads,
        rows) float32.
    """
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    if not query.is_cuda:
        return _plainly(q, k, v, scale, causal)
    prompts, rows, heads, dim = query.shape
    if flash:
        padded = F.pad(v, (0, dim - v.shape[-1]))
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, padded, 0.0, causal, False, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    answers = found[0][..., : v.shape[-1]].transpose(1, 2).contiguous()
    return answers, found[1].reshape(prompts, heads, rows)


def _plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The same in plain torch, of (prompts, heads, …): for the kernels' interpreter, and to compare with."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1).float() for each in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    answer = scores.softmax(-1) @ v
    return answer.transpose(1, 2).to(q.dtype).contiguous(), scores.logsumexp(-1)


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
