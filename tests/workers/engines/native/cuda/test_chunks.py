"""How long chunks are padded: cuDNN's mask must let each row see its own tokens and all before, and nothing behind."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.native.cuda.packing import (
    LONG,
    LONG_AFTER,
    STEP,
    TOGETHER,
    PromptChunk,
    adjoin,
    groups,
    shapes,
)


@given(start=st.integers(0, 5 * STEP), tokens=st.integers(1, 5 * STEP))
def test_a_row_sees_the_keys_up_to_its_own(start: int, tokens: int) -> None:
    chunk = PromptChunk(7, start, tokens, 0)
    for token in {0, tokens // 2, tokens - 1}:
        masked = chunk.front + token + 1  # keys that a row of the mask's triangle sees
        assert chunk.unmasked + masked == start + token + 1
    assert chunk.front + tokens <= chunk.rows


@given(start=st.integers(0, 5 * STEP), tokens=st.integers(1, 5 * STEP))
def test_shapes_are_few(start: int, tokens: int) -> None:
    chunk = PromptChunk(7, start, tokens, 0)
    assert (chunk.rows % STEP, chunk.unmasked % STEP) == (0, 0)
    assert chunk.rows < tokens + 2 * STEP


def test_a_chunk_behind_others_is_long_if_it_has_many_pairs_of_query_and_key() -> None:
    assert [PromptChunk(0, 0, tokens, 0).is_long for tokens in (LONG - 1, LONG)] == [False, True]
    assert [PromptChunk(0, 30_000, tokens, 0).is_long for tokens in (LONG_AFTER - 1, LONG_AFTER)] == [False, True]
    assert [PromptChunk(0, start, LONG, 0).is_long for start in (1024, 8192)] == [False, True]


def whole(*lengths: int) -> list[PromptChunk]:
    """Whole prompts, one behind the other."""
    return [PromptChunk(sum(lengths[:n]), 0, tokens, n) for n, tokens in enumerate(lengths)]


@given(lengths=st.lists(st.integers(1, 3 * LONG), max_size=40), least=st.sampled_from((STEP, LONG)))
def test_every_group_has_a_planned_shape_and_every_long_prompt_is_in_one(lengths: list[int], least: int) -> None:
    made = whole(*lengths)
    found = groups(made, least)
    planned = set(shapes(max(lengths, default=1), sum(lengths), least))
    assert {(len(group), group[0].rows) for group in found} <= planned
    assert all(chunk.rows == group[0].rows for group in found for chunk in group)
    grouped = [chunk for group in found for chunk in group]
    assert len(grouped) == len(set(grouped)) <= len(made)
    assert {chunk for chunk in made if chunk.is_long} <= set(grouped)
    assert max(map(len, found), default=0) <= TOGETHER


def test_short_prompts_of_one_length_are_attended_to_together_if_launches_are_cheap_beside_them() -> None:
    made = whole(*[STEP] * 7)
    assert groups(made) == []
    assert groups(made, STEP) == [tuple(made[:4])], "the other three are fewer than LONG tokens"
    assert groups(whole(*[STEP // 2] * 9), STEP) == [], "most rows would be padding"


def test_prompts_adjoin_if_they_need_no_padding() -> None:
    assert adjoin(whole(LONG, LONG))
    assert not adjoin(whole(LONG, LONG - 1))
    first, _, third = whole(LONG, LONG, LONG)
    assert not adjoin((first, third))
