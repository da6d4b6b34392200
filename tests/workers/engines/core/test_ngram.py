"""Proposals are what followed the latest, longest occurrence of the last tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.drafts import CANDIDATES, NgramDrafter
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("a", tokens, len(tokens), Sampling(), Stop(9), 0, [], b"")


def proposed(drafter: NgramDrafter, one: Sequence, limit: int) -> list[int]:
    (draft,) = drafter.propose([ScheduledSequence(one, len(one.tokens) - 1, 1, True)], [limit])
    return draft


def test_the_longest_match_wins_over_a_later_one() -> None:
    tokens = [1, 2, 3, 7, 8, 9, 2, 3, 5, 1, 2, 3]
    assert proposed(NgramDrafter(2, 3), sequence(list(tokens)), 3) == [7, 8, 9]
    assert proposed(NgramDrafter(2, 2), sequence(list(tokens)), 3) == [5, 1, 2]


def test_without_a_match_or_room_nothing_is_proposed() -> None:
    assert proposed(NgramDrafter(2, 3), sequence([1, 2, 3, 4]), 3) == []
    assert proposed(NgramDrafter(2, 3), sequence([1]), 3) == []
    assert proposed(NgramDrafter(1, 1), sequence([1, 1]), 0) == []


def test_lengths_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramDrafter(3, 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_a_growing_sequence_is_searched_as_a_plain_search_would(
    tokens: list[int], shortest: int, more: int, limit: int
) -> None:
    drafter, one = NgramDrafter(shortest, shortest + more), sequence(tokens[:1])
    for count in range(1, len(tokens) + 1):
        one.tokens[:] = tokens[:count]
        ends = [
            end
            for end in range(shortest, count)
            if tokens[end - shortest : end] == tokens[count - shortest : count] and count >= shortest
        ][-CANDIDATES:]
        best: list[int] = []
        matched = 0
        for end in reversed(ends):
            length = max(
                n
                for n in range(1, shortest + more + 1)
                if n <= end and tokens[end - n : end] == tokens[count - n : count]
            )
            if length > matched:
                best, matched = tokens[end:count][:limit], length
        assert proposed(drafter, one, limit) == best
