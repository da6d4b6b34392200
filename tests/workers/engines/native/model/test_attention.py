"""The paged reference against attention over plain tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.attention import AttentionParams, Expansion, ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.pool import KvPool, KvShape
from tests.properties import examples

HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 6, 2, 4, 4, 64
NAN = float("nan")
PLAIN = AttentionParams(1.0)


def pool() -> KvPool:
    made = KvPool(KvShape(2, KV_HEADS, DIM), BLOCKS, SIZE, torch.float32, torch.device("cpu"))
    made.data.fill_(NAN)  # what others left; none of it may count
    return made


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float) -> Tensor:
    """The last len(q) of len(k) positions, one by one; (positions, heads, head_dim)."""
    out = torch.empty_like(q)
    for row in range(len(q)):
        at = len(k) - len(q) + row
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = k[first : at + 1, group] @ q[row, head] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v[first : at + 1, group]
    return out


@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 3, 8, 100]),
    softcap=st.sampled_from([0.0, 2.0]),
    order=st.permutations(range(BLOCKS)),
)
@example(lengths=[(0, 9)], window=8, softcap=0.0, order=list(range(BLOCKS)))  # one beyond the window
@example(lengths=[(0, 8)], window=8, softcap=0.0, order=list(range(BLOCKS)))
@example(lengths=[(12, 1), (18, 1), (30, 1)], window=None, softcap=0.0, order=list(range(BLOCKS)))  # one padded group
@examples(60)
def test_any_mix_of_chunks_is_attended_as_if_alone(
    lengths: list[tuple[int, int]], window: int | None, softcap: float, order: list[int]
) -> None:
    torch.manual_seed(0)
    kv, free = pool(), list(order)
    past, new, tables = [], [], []
    for start, count in lengths:
        tables.append([free.pop() for _ in range(-(-(start + count) // SIZE))])
        past.append(tuple(torch.randn(start, KV_HEADS, DIM) for _ in range(2)))
        new.append((torch.randn(count, HEADS, DIM), *(torch.randn(count, KV_HEADS, DIM) for _ in range(2))))
    for (keys, values), table in zip(past, tables, strict=True):  # computed in an earlier step
        if len(keys):
            span = TokenSpan(0, 0, len(keys), table)
            ReferenceAttention(kv, [span]).attend(1, torch.zeros(len(keys), HEADS, DIM), keys, values, PLAIN)
    row, spans = 0, []
    for (start, count), table in zip(lengths, tables, strict=True):
        spans.append(TokenSpan(row, start, count, table))
        row += count
    q, k, v = (torch.cat(part) for part in zip(*new, strict=True))
    out = ReferenceAttention(kv, spans).attend(1, q, k, v, AttentionParams(0.5, window, softcap))
    for span, (keys, values), (queries, fresh_keys, fresh_values) in zip(spans, past, new, strict=True):
        expected = plain(
            queries, torch.cat([keys, fresh_keys]), torch.cat([values, fresh_values]), 0.5, window, softcap
        )
        torch.testing.assert_close(out[span.row : span.row + span.count], expected, rtol=1e-4, atol=1e-5)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 8]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    portion=st.sampled_from([1, 500, 1 << 26]),
)
@examples(60)
def test_latents_are_attended_as_the_keys_and_values_made_of_them(
    lengths: list[tuple[int, int]], window: int | None, softcap: float, sinks: bool, portion: int
) -> None:
    torch.manual_seed(0)
    latent, rotated, key_dim, value_dim = 5, 2, 3, 4
    dim = key_dim + rotated
    expansion = Expansion(torch.randn(HEADS, key_dim + value_dim, latent), key_dim)
    ends = [start + count for start, count in lengths]
    pools = [
        KvPool(shape, 128, SIZE, torch.float32, torch.device("cpu"))
        for shape in (KvShape(2, 1, latent + rotated, latent=latent), KvShape(2, HEADS, dim))
    ]
    free = list(range(128))
    tables = [[free.pop() for _ in range(-(-end // SIZE))] for end in ends]
    sink = torch.randn(HEADS) if sinks else None
    params = AttentionParams(0.5, window, softcap, sink)

    def step(counts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Attention in both pools to the same latents."""
        spans, row = [], 0
        for (start, count), table in zip(counts, tables, strict=True):
            if count:
                spans.append(TokenSpan(row, start, count, table))
            row += count
        query, latents = torch.randn(row, HEADS, dim), torch.randn(row, latent + rotated)
        keys, values = (part.transpose(0, 1) for part in expansion.expanded(latents, slice(None)))
        padded = F.pad(values, (0, dim - value_dim))
        near, far = latents[:, None].split([latent, rotated], dim=-1)
        found = ReferenceAttention(pools[0], spans).attend(1, query, near, far, params._replace(expansion=expansion))
        return found, ReferenceAttention(pools[1], spans).attend(1, query, keys, padded, params)[..., :value_dim]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "EXPANDED_VALUES", portion)
        step([(0, start) for start, _ in lengths])
        found, expected = step(lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_do_not_share_their_cache() -> None:
    kv = pool()
    paged = ReferenceAttention(kv, [TokenSpan(0, 0, 3, [5])])
    ones = torch.ones(3, KV_HEADS, DIM)
    paged.attend(0, torch.zeros(3, HEADS, DIM), ones, ones, PLAIN)
    paged.attend(1, torch.zeros(3, HEADS, DIM), ones * 2, ones * 2, PLAIN)
    assert kv.data[5, 0, :, :3].unique().tolist() == [1.0]
    assert kv.data[5, 1, :, :3].unique().tolist() == [2.0]
    assert not kv.data[5, :, :, 3:].any()
    assert all(math.isnan(float(kv.data[block].sum())) for block in range(BLOCKS) if block != 5)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_a_sequence_with_broken_numbers_spoils_no_neighbour(poisoned: int) -> None:
    kv = pool()
    spans = [TokenSpan(0, 4, 1, [10, 11]), TokenSpan(1, 12, 1, [20, 21, 22, 23]), TokenSpan(2, 17, 1, [0, 1, 2, 3, 4])]
    kv.data[[block for span in spans for block in span.blocks]] = 1.0
    kv.data[spans[poisoned].blocks] = NAN
    keys = torch.ones(3, KV_HEADS, DIM)
    out = ReferenceAttention(kv, spans).attend(0, torch.ones(3, HEADS, DIM), keys, keys, PLAIN)
    assert [bool(torch.isfinite(row).all()) for row in out] == [row != poisoned for row in range(3)]
