"""Paged attention for transformers models: the function registered with the library, and a reference implementation.

transformers calls ``attention`` in every layer and passes on the ``paged`` argument of the model's forward, so no
state of a step is global and several engines can share a process. No mask is registered under ``NAME``, so
transformers builds none.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) makes keys and values of all heads from one latent per
token, by a linear layer that its modules call in ``expand_kv``. Here they do not: the latent is what is cached. A chunk
of a prompt expands the latents that it attends to. A query of few tokens is multiplied by the layer's key rows instead,
so that it attends to latents as they are, and the result by the rows of values.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
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
EXPANDED_VALUES = 1 << 26  # of keys and values that a long prefill makes of latents at once


class UnsupportedAttention(Exception):
    """This model's attention needs something that is not implemented here."""


class Expansion(NamedTuple):
    """How keys and values are made of latents.

    Attributes:
        weight: (heads, key_dim + value_dim, latent): of each head first the rows of keys, then those of values.
        key_dim: values of a key that are not rotated; the rotated ones follow, the same for all heads.
    """

    weight: Tensor
    key_dim: int

    @property
    def keys(self) -> Tensor:
        """(heads, key_dim, latent)"""
        return self.weight[:, : self.key_dim]

    @property
    def values(self) -> Tensor:
        """(heads, value_dim, latent)"""
        return self.weight[:, self.key_dim :]

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries that attend to latents: (tokens, heads, key_dim + rotated) -> (tokens, heads, latent + rotated)."""
        within = torch.einsum("thd,hdr->thr", query[..., : self.key_dim], self.keys)
        return torch.cat([within, query[..., self.key_dim :]], -1)

    def answers(self, attended: Tensor) -> Tensor:
        """Sums of latents as sums of values: (tokens, heads, latent) -> (tokens, heads, value_dim)."""
        return torch.einsum("thr,hvr->thv", attended, self.values)

    def expanded(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads.

        Args:
            latents: (positions, latent + rotated).
        Returns: (heads, positions, key_dim + rotated) and (heads, positions, value_dim).
        """
        weight = self.weight[heads]
        size = weight.shape[2]
        both = torch.matmul(latents[:, :size], weight.transpose(1, 2))
        rotated = latents[:, size:].expand(len(weight), -1, -1)
        return torch.cat([both[..., : self.key_dim], rotated], -1), both[..., self.key_dim :]


class AttentionParams(NamedTuple):
    """Parameters of a layer's causal attention.

    Attributes:
        scale: of the scores.
        window: tokens a query sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: unchanged.
        sinks: attention-sink logits, which count in the softmax's sum and add no value; None: none. (heads,), or of a
            shape that broadcasts over the scores of one key.
        expansion: of latents, which then are cached; None: keys and values are.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    expansion: Expansion | None = None


class Paged(Protocol):
    """The attention of one step over one packed batch of sequences."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            query: (tokens, heads, head_dim), rotated, as are the keys.
            key, value: (tokens, kv_heads, head_dim). With an expansion, the latents and the rotated part of keys:
                (tokens, 1, latent) and (tokens, 1, rotated).
        Returns: (tokens, heads, head_dim), or (tokens, heads, value_dim) of an expansion.
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

    Key and value of a module of ``cache_latents`` are those of ``Paged.attend``.

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
    expansion = _expansion(module) if "_penstock_latents" in module.__dict__ else None
    if value.shape != key.shape and expansion is None:
        raise UnsupportedAttention(f"values of another shape than keys ({tuple(value.shape)}, {tuple(key.shape)})")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = paged.attend(
        int(getattr(module, "layer_idx")),  # noqa: B009  nn.Module types its attributes as Tensor | Module
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionParams(scale, sliding_window, softcap or 0.0, s_aux, expansion),
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make ``attn_implementation=NAME`` known; repeating it changes nothing."""
    AttentionInterface.register(NAME, attention)


def cache_latents(model: nn.Module) -> None:
    """Have the modules of multi-head latent attention pass on latents, if they attend by ``NAME``."""
    for module in model.modules():
        expand = getattr(module, "expand_kv", None)
        layer = getattr(module, "kv_b_proj", None)
        if expand is None or getattr(layer, "bias", None) is not None or "_penstock_latents" in module.__dict__:
            continue
        module.expand_kv = _passing_on(module, expand)
        module.__dict__["_penstock_latents"] = True


def _passing_on(module: Any, expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    def pass_on(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        if module.config._attn_implementation != NAME:
            return expand(latent, rotated)
        return latent, rotated

    return pass_on


def _expansion(module: Any) -> Expansion:
    dims = module.qk_nope_head_dim + module.v_head_dim
    return Expansion(module.kv_b_proj.weight.unflatten(0, (-1, dims)), module.qk_nope_head_dim)


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
        size = query.shape[-1] if params.expansion is None else params.expansion.values.shape[1]
        out = query.new_empty((*query.shape[:-1], size))
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
        keys, *others = self._pool.read(layer, group.table)
        expansion = params.expansion
        if expansion is not None:
            query, others = expansion.absorbed(query), [keys[..., : expansion.weight.shape[2]]]
        (values,) = others
        n, heads, dim = len(group.table), query.shape[1], query.shape[2]
        tokens, kv_heads, mask = group.mask.shape[2], keys.shape[1], group.mask
        shared = heads // kv_heads
        query = query.view(n, tokens, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, dim)
        if params.sinks is not None:
            sinks = params.sinks.view(kv_heads, shared, 1).expand(-1, -1, tokens).reshape(kv_heads, -1)
            params = params._replace(sinks=sinks)
        if tokens > 1:
            mask = mask.unsqueeze(2).expand(-1, -1, shared, -1, -1).reshape(n, 1, shared * tokens, -1)
        out = _attend(query, keys, values, mask, params).view(n, kv_heads, shared, tokens, -1)
        out = out.permute(0, 3, 1, 2, 4).reshape(n * tokens, heads, -1)
        return out if expansion is None else expansion.answers(out)

    def _prefill(self, layer: int, query: Tensor, span: TokenSpan, params: AttentionParams) -> Tensor:
        """A chunk of one sequence, in tiles of queries so that a long context needs no square of memory."""
        size, window = self._pool.block_size, params.window
        first = _first_seen(span.start, window) // size
        table = self._ints(span.blocks[first : -(-span.end // size)]).unsqueeze(0)
        keys, *others = self._pool.read(layer, table)
        base, seen = first * size, span.end - first * size
        keys = keys[0, :, :seen]
        expansion, heads = params.expansion, query.shape[1]
        if expansion is None:
            return self._prefill_heads(query, keys, others[0][0, :, :seen], span, base, params)
        portion = max(1, EXPANDED_VALUES // (seen * (query.shape[2] + expansion.values.shape[1])))
        parts = []
        for at in range(0, heads, portion):
            some = slice(at, at + portion)
            own = params if params.sinks is None else params._replace(sinks=params.sinks[some])
            parts.append(self._prefill_heads(query[:, some], *expansion.expanded(keys[0], some), span, base, own))
        return torch.cat(parts, 1)

    def _prefill_heads(
        self, query: Tensor, keys: Tensor, values: Tensor, span: TokenSpan, base: int, params: AttentionParams
    ) -> Tensor:
        """``_prefill`` with keys and values, (kv_heads, positions, head_dim), from position ``base`` on."""
        kv_heads, seen, dim = keys.shape
        count, heads, window = query.shape[0], query.shape[1], params.window
        # KV heads as the batch axis; the query heads of each share one copy of the keys through a stride of 0.
        keys = keys[:, None].expand(-1, heads // kv_heads, -1, -1)
        values = values[:, None].expand(-1, heads // kv_heads, -1, -1)
        queries = query.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        if params.sinks is not None:
            params = params._replace(sinks=params.sinks.view(kv_heads, -1, 1))
        elif not span.start and not params.softcap and (window is None or window >= count):
            fresh = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=params.scale)
            return fresh.permute(2, 0, 1, 3).reshape(count, heads, -1)  # a fifth of the time of a mask
        positions = torch.arange(base, span.end, device=self._device)
        tile = max(16, TILE_SCORES // seen)
        parts = []
        for at in range(0, count, tile):
            rows = torch.arange(span.start + at, min(span.start + at + tile, span.end), device=self._device)[:, None]
            mask = positions <= rows
            if window is not None:
                mask &= positions > rows - window
            parts.append(_attend(queries[:, :, at : at + tile], keys, values, mask, params))
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return out.permute(2, 0, 1, 3).reshape(count, heads, -1)

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
    scale, softcap, sinks = params.scale, params.softcap, params.sinks
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
