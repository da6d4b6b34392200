"""Paged attention for transformers models: the function registered with the library, and a reference implementation.

transformers calls ``attention`` in every layer and passes on the ``paged`` argument of the model's forward, so no
state of a step is global and several engines can share a process. No mask is registered under ``NAME``, so
transformers builds none.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from penstock.workers.engines.native.model.pool import KvPool

NAME = "penstock"  # attn_implementation
SHORT_TOKENS = 16  # spans of up to this many tokens are attended together: decodes, and proposed tokens to verify
TILE_SCORES = 1 << 24  # query x key positions whose mask exists at once in a long prefill


class UnsupportedAttention(Exception):
    """This model's attention needs something that is not implemented here."""


class AttentionParams(NamedTuple):
    """Parameters of a layer's causal attention.

    Attributes:
        scale: of the scores.
        window: tokens a query sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: unchanged.
        sinks: attention-sink logits, which count in the softmax's sum and add no value; None: none. (heads,), or of a
            shape that broadcasts over the scores of one key.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


class Paged(Protocol):
    """The attention of one step over one packed batch of sequences."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            query: (tokens, heads, head_dim), rotated, as are the keys.
            key, value: (tokens, kv_heads, head_dim).
        Returns: (tokens, heads, head_dim).
        """


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Paged | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; query, key, value are (1, heads, tokens, head_dim).

    Raises:
        UnsupportedAttention: the layer asks for more than causal attention (biases, a mask of its own), or the model
            does not pass its arguments on.
    """
    if paged is None:
        raise UnsupportedAttention("a forward() that does not pass its keyword arguments on to attention")
    for name in ("position_bias", "relative_position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(f"attention with {name}")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttention("attention that is not causal")
    if value.shape != key.shape:
        raise UnsupportedAttention(f"values of another shape than keys ({tuple(value.shape)}, {tuple(key.shape)})")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = paged.attend(
        int(getattr(module, "layer_idx")),  # noqa: B009  nn.Module types its attributes as Tensor | Module
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionParams(scale, sliding_window, softcap or 0.0, s_aux),
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make ``attn_implementation=NAME`` known; repeating it changes nothing."""
    AttentionInterface.register(NAME, attention)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """``count`` tokens of one sequence, from position ``start``; they are rows ``row`` .. of the packed batch."""

    row: int
    start: int
    count: int
    blocks: list[int]

    @property
    def end(self) -> int:
        return self.start + self.count


class _Group(NamedTuple):
    """Short spans of one number of tokens and of similar length, attended together."""

    rows: Tensor  # (n * tokens,) of the packed batch
    table: Tensor  # (n, blocks)
    mask: Tensor  # (n, 1, tokens, blocks * block_size), True: seen


class ReferenceAttention:
    """``Paged`` in plain torch operations, for any device. One object per step."""

    def __init__(self, pool: KvPool, spans: Iterable[TokenSpan]) -> None:
        self._pool = pool
        self._device = pool.data.device
        self._short: list[TokenSpan] = []
        self._long: list[TokenSpan] = []
        blocks: list[int] = []
        offsets: list[int] = []
        opened: list[int] = []
        size = pool.block_size
        for span in spans:
            (self._short if span.count <= SHORT_TOKENS else self._long).append(span)
            for position in range(span.start, span.end):
                block, offset = span.blocks[position // size], position % size
                blocks.append(block)
                offsets.append(offset)
                if not offset:
                    opened.append(block)
        self._blocks = self._ints(blocks)
        self._offsets = self._ints(offsets)
        self._groups: dict[int | None, list[_Group]] = {}  # by window
        pool.clear(opened)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self._pool.write(layer, self._blocks, self._offsets, key, value)
        out = torch.empty_like(query)
        if params.window not in self._groups:
            self._groups[params.window] = self._group(params.window)
        for group in self._groups[params.window]:
            out[group.rows] = self._attend_group(layer, query[group.rows], group, params)
        for span in self._long:
            rows = slice(span.row, span.row + span.count)
            out[rows] = self._prefill(layer, query[rows], span, params)
        return out

    def _attend_group(self, layer: int, query: Tensor, group: _Group, params: AttentionParams) -> Tensor:
        """The tokens and the query heads that share a KV head form the query axis."""
        keys, values = self._pool.read(layer, group.table)
        n, heads, dim = len(group.table), query.shape[1], query.shape[2]
        tokens, kv_heads, mask = group.mask.shape[2], keys.shape[1], group.mask
        shared = heads // kv_heads
        query = query.view(n, tokens, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, dim)
        if params.sinks is not None:
            sinks = params.sinks.view(kv_heads, shared, 1).expand(-1, -1, tokens).reshape(kv_heads, -1)
            params = params._replace(sinks=sinks)
        if tokens > 1:
            mask = mask.unsqueeze(2).expand(-1, -1, shared, -1, -1).reshape(n, 1, shared * tokens, -1)
        out = _attend(query, keys, values, mask, params)
        return out.view(n, kv_heads, shared, tokens, dim).permute(0, 3, 1, 2, 4).reshape(n * tokens, heads, dim)

    def _prefill(self, layer: int, query: Tensor, span: TokenSpan, params: AttentionParams) -> Tensor:
        """A chunk of one sequence, in tiles of queries so that a long context needs no square of memory."""
        size, window = self._pool.block_size, params.window
        first = _first_seen(span.start, window) // size
        table = self._ints(span.blocks[first : -(-span.end // size)]).unsqueeze(0)
        keys, values = self._pool.read(layer, table)
        seen = span.end - first * size
        count, heads, dim = query.shape
        kv_heads = keys.shape[1]
        # KV heads as the batch axis; the query heads of each share one copy of the keys through a stride of 0.
        keys = keys[0, :, None, :seen].expand(kv_heads, heads // kv_heads, seen, dim)
        values = values[0, :, None, :seen].expand_as(keys)
        queries = query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        if params.sinks is not None:
            params = params._replace(sinks=params.sinks.view(kv_heads, -1, 1))
        elif not span.start and not params.softcap and (window is None or window >= count):
            fresh = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=params.scale)
            return fresh.permute(2, 0, 1, 3).reshape(count, heads, dim)  # a fifth of the time of a mask
        positions = torch.arange(first * size, span.end, device=self._device)
        tile = max(16, TILE_SCORES // seen)
        parts = []
        for at in range(0, count, tile):
            rows = torch.arange(span.start + at, min(span.start + at + tile, span.end), device=self._device)[:, None]
            mask = positions <= rows
            if window is not None:
                mask &= positions > rows - window
            parts.append(_attend(queries[:, :, at : at + tile], keys, values, mask, params))
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return out.permute(2, 0, 1, 3).reshape(count, heads, dim)

    def _group(self, window: int | None) -> list[_Group]:
        """Group spans into tables of equal width. Lengths of one group have the same power of two, so padding at most
        doubles the work."""
        size = self._pool.block_size
        by_shape: dict[tuple[int, int], list[tuple[TokenSpan, int, list[int]]]] = defaultdict(list)
        for span in self._short:
            first = _first_seen(span.start, window) // size
            blocks = span.blocks[first : -(-span.end // size)]
            by_shape[span.count, len(blocks).bit_length()].append((span, first * size, blocks))
        groups = []
        for (tokens, _), members in by_shape.items():
            width = max(len(blocks) for _, _, blocks in members)
            # Padded with its own blocks, so that no values of another sequence can reach this one.
            table = self._ints([blocks + blocks[:1] * (width - len(blocks)) for _, _, blocks in members])
            base = self._ints([base for _, base, _ in members])
            queries = self._ints([[*range(span.start, span.end)] for span, _, _ in members])[:, :, None]
            positions = (torch.arange(width * size, device=self._device) + base[:, None])[:, None]
            mask = positions <= queries
            if window is not None:
                mask &= positions > queries - window
            rows = self._ints([span.row + token for span, _, _ in members for token in range(tokens)])
            groups.append(_Group(rows, table, mask[:, None]))
        return groups

    def _ints(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """(batch, heads, queries, head_dim) each; ``mask`` broadcasts over batch and heads, True: seen."""
    scale, _, softcap, sinks = params
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf")).float()
    if sinks is not None:
        sink_scores = sinks[..., None].float().expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return weights.to(query.dtype) @ value
