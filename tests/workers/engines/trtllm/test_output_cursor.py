"""Cumulative outputs, cut anyhow, come out as every token once, the last one marked."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.external.sequences import MISSING, SequenceFailure, Token
from penstock.workers.engines.trtllm.engine_inputs import TrtllmOutputCursor

EOS, STOP = 7, 9


class Entry(NamedTuple):
    logprob: float
    rank: int | None = None


def versions(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """The growing list as it is shown at each cut, and whole."""
    return [list(tokens[:cut]) for cut in sorted({*(cut % (len(tokens) + 1) for cut in cuts), len(tokens)})]


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token for token in tokens]


@given(st.lists(st.integers(10, 99), min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_every_token_comes_once_and_in_order_however_the_output_is_cut(tokens: list[int], cuts: list[int]) -> None:
    cursor, results = TrtllmOutputCursor(limit=len(tokens)), list[Token]()
    for version in versions(tokens, cuts) * 2:
        new, failure = cursor.take(version)
        assert failure is None
        results += new
    assert ids(results) == tokens
    assert [token.finish for token in results] == [""] * (len(tokens) - 1) + ["length"]


@given(
    st.lists(st.integers(10, 99), max_size=20),
    st.lists(st.integers(0, 30), max_size=6),
    st.sampled_from([EOS, STOP]),
    st.booleans(),
    st.booleans(),
)
def test_the_ending_token_is_reported_whether_the_engine_shows_trims_or_never_had_it(
    tokens: list[int], cuts: list[int], last: int, shown_before: bool, shown_at_end: bool
) -> None:
    """Trimmed: the last version is shorter than one before."""
    cursor = TrtllmOutputCursor(limit=100, stops=frozenset({EOS, STOP}), end_id=EOS)
    results: list[Token] = []
    for version in versions([*tokens, last] if shown_before else tokens, cuts):
        results += cursor.take(version)[0]
    final = [*tokens, last] if shown_at_end else tokens
    new, failure = cursor.take(final, None, "stop", None if last == EOS else STOP)
    results += new
    assert failure is None
    assert ids(results) == [*tokens, last]
    assert results[-1] == Token(last, "stop", None, last)
    assert cursor.finished
    assert cursor.take([*final, 50], None, "length") == ([], None)


def test_a_stop_token_counts_only_once_enough_tokens_are_out() -> None:
    cursor = TrtllmOutputCursor(limit=10, stops=frozenset({EOS}), min_tokens=2)
    results, _ = cursor.take([EOS, EOS, EOS, 50])
    assert results == [Token(EOS), Token(EOS), Token(EOS, "stop", None, EOS)]


def test_tokens_behind_the_limit_are_not_returned() -> None:
    assert ids(TrtllmOutputCursor(limit=2).take([20, 21, 22])[0]) == [20, 21]


@given(
    st.lists(st.integers(10, 99), min_size=1, max_size=3),
    st.lists(st.integers(10, 99), min_size=1, max_size=9),
    st.lists(st.integers(1, 12), max_size=5),
)
def test_what_a_prefill_worker_returned_is_not_returned_again(
    skip: list[int], tokens: list[int], cuts: list[int]
) -> None:
    cursor, results = TrtllmOutputCursor(limit=len(tokens), skip=skip), list[Token]()
    for version in versions([*skip, *tokens], cuts):
        results += cursor.take(version)[0]
    assert ids(results) == tokens
    assert cursor.repeats


def test_an_engine_that_does_not_repeat_them_loses_nothing() -> None:
    cursor = TrtllmOutputCursor(limit=3, skip=[10])
    assert ids(cursor.take([11])[0] + cursor.take([11, 12, 13])[0]) == [11, 12, 13]
    assert cursor.repeats is False
    known = TrtllmOutputCursor(limit=2, skip=[10])
    known.repeats = False  # as seen with an earlier sequence: its first new token may be the same by chance
    assert ids(known.take([10, 12])[0]) == [10, 12]


def test_an_end_within_the_repeated_tokens_is_an_end() -> None:
    cursor = TrtllmOutputCursor(limit=5, skip=[10, 11], end_id=EOS, stops=frozenset({EOS}))
    assert cursor.take([10, 11], None, "stop")[0] == [Token(EOS, "stop", None, EOS)]


@pytest.mark.parametrize(("finish", "code"), [("cancelled", Code.cancelled), ("timeout", Code.deadline_exceeded)])
def test_other_ends_are_errors_behind_what_was_new(finish: str, code: Code) -> None:
    new, failure = TrtllmOutputCursor(limit=9).take([20], None, finish)
    assert ids(new) == [20]
    assert isinstance(failure, SequenceFailure)
    assert failure.code == code


def test_an_end_by_length_before_ours_marks_the_last_new_token_or_is_an_error() -> None:
    assert TrtllmOutputCursor(limit=9).take([20, 21], None, "length") == ([Token(20), Token(21, "length")], None)
    cursor = TrtllmOutputCursor(limit=9)
    cursor.take([20])
    new, failure = cursor.take([20], None, "length")
    assert new == []
    assert failure is not None
    assert failure.code == Code.engine_error


def test_a_prompt_that_others_continue_with_is_no_end_by_itself() -> None:
    cursor = TrtllmOutputCursor(limit=2)
    assert cursor.take([20], None, "not_finished") == ([Token(20)], None)
    assert not cursor.finished


def test_the_chosen_token_and_the_best_come_with_their_logarithms() -> None:
    cursor = TrtllmOutputCursor(limit=9, top=2)
    entry = {20: Entry(-3.0, 5), 1: Entry(-0.5, 1), 2: Entry(-1.5, 2)}
    (token,), _ = cursor.take([20], [entry])
    assert token.logprob == Logprob(-3.0, ((1, -0.5), (2, -1.5)))
    (only,), _ = cursor.take([20, 21], [entry, {21: Entry(-0.25)}])
    assert only.logprob == Logprob(-0.25, ((21, -0.25),))


def test_k_of_zero_gives_the_chosen_token_only_and_plain_numbers_are_taken() -> None:
    assert TrtllmOutputCursor(limit=9, top=0).take([20], [{20: Entry(-1.0, 1)}])[0][0].logprob == Logprob(-1.0)
    assert TrtllmOutputCursor(limit=9, top=3).take([20], [-0.5])[0][0].logprob == Logprob(-0.5)


def test_missing_logarithms_never_make_a_token_come_without_one() -> None:
    cursor = TrtllmOutputCursor(limit=9, top=1, skip=[10])
    new, _ = cursor.take([10, 20, 21], [{20: Entry(-1.0)}, {21: Entry(-2.0)}])  # prefill's is missing in front
    assert [token.logprob.logprob for token in new if token.logprob] == [-1.0, -2.0]
    assert TrtllmOutputCursor(limit=9, top=1).take([20], [])[0][0].logprob == Logprob(MISSING)
    trimmed = TrtllmOutputCursor(limit=9, top=1, end_id=EOS).take([], [], "stop")[0]
    assert trimmed == [Token(EOS, "stop", Logprob(MISSING), EOS)]
