"""How long chunks are padded: cuDNN's mask must let each row see its own tokens and all before, and nothing behind."""

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.native.cuda.chunks import LONG, LONG_BEHIND, STEP, Chunk


@given(start=st.integers(0, 5 * STEP), tokens=st.integers(1, 5 * STEP))
def test_a_row_sees_the_keys_up_to_its_own(start: int, tokens: int) -> None:
    chunk = Chunk(7, start, tokens, 0)
    for token in {0, tokens // 2, tokens - 1}:
        masked = chunk.front + token + 1  # keys that a row of the mask's triangle sees
        assert chunk.unmasked + masked == start + token + 1
    assert chunk.front + tokens <= chunk.rows


@given(start=st.integers(0, 5 * STEP), tokens=st.integers(1, 5 * STEP))
def test_shapes_are_few(start: int, tokens: int) -> None:
    chunk = Chunk(7, start, tokens, 0)
    assert (chunk.rows % STEP, chunk.unmasked % STEP) == (0, 0)
    assert chunk.rows < tokens + 2 * STEP


def test_a_chunk_behind_others_is_long_if_it_has_many_pairs_of_query_and_key() -> None:
    assert [Chunk(0, 0, tokens, 0).is_long for tokens in (LONG - 1, LONG)] == [False, True]
    assert [Chunk(0, 30_000, tokens, 0).is_long for tokens in (LONG_BEHIND - 1, LONG_BEHIND)] == [False, True]
    assert [Chunk(0, start, LONG, 0).is_long for start in (1024, 8192)] == [False, True]
