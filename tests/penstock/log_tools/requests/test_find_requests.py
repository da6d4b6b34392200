"""Searching the texts of records: the quick way against decoding every text."""

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.log_tools.requests import find_requests
from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.requests.find_requests import RecordSearch
from penstock.schemas.done import Done, Outcome, recorded
from penstock.schemas.done import packed as packed_record
from penstock.schemas.requests import GenerateRequest, Stop, packed
from penstock.schemas.wire import encode, pack_tokens, unpack_tokens

TEXTS, MODEL = Texts(), str(TINY)
SIZE = len(TEXTS.detokenizer(MODEL).spoken)
TOKENS = st.lists(st.integers(0, SIZE + 3) | st.sampled_from(load_tokenizer(TINY).encode("ein Knödel ﬁts İ 日本").ids))
LITERALS = st.text("aAiIkKßKſİ日é .�\ud800", max_size=3)
PATTERNS = st.recursive(
    st.builds(re.escape, LITERALS) | st.sampled_from([".", r"\d", r"\b", "[ab]", "(?i:AB)", "$", "x*", "(?!a)"]),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["", "?", "*", "+", "{2}", "{0,2}", "+?"]))
        | st.builds("({}|{})".format, inner, inner)
    ),
    max_leaves=5,
)


def matching(pattern: re.Pattern[str], rows: Sequence[tuple[Sequence[int], ...]]) -> list[bool]:
    """What is found in records of prompts and answers: of this build, and of an earlier one, which had prompts."""
    ours, theirs = [], []
    for prompt, *answers in rows:
        request = GenerateRequest("r", MODEL, "g", pack_tokens(prompt), Stop(8), 1, 2, b"", 16)
        choices = tuple(Outcome(pack_tokens(answer), "stop") for answer in answers)
        done = Done("r", MODEL, 1, choices=choices)
        for accepted in (encode(request), encode(packed(request))):
            ours.append((encode(packed_record(msgspec.structs.replace(done, submitted=recorded(request)))), accepted))
        theirs.append((encode(msgspec.structs.replace(done, submitted=encode(request))), b""))
    search = RecordSearch(pattern, TEXTS)
    if not rows:
        assert search.matching([], []) == []
        return []
    found = search.matching(*zip(*theirs, strict=True))
    assert [one for one in found for _ in range(2)] == search.matching(*zip(*ours, strict=True))
    return found


def has(pattern: re.Pattern[str], *rows: Sequence[int]) -> bool:
    text_of = TEXTS.detokenizer(MODEL).text
    return any(pattern.search(text_of(unpack_tokens(pack_tokens(row)))) is not None for row in rows)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=4), st.data(), st.booleans())
def test_a_part_of_a_text_is_found_wherever_tokens_cut_it(
    rows: list[tuple[list[int], list[int]]], data: st.DataObject, any_case: bool
) -> None:
    texts = [TEXTS.detokenizer(MODEL).text(tokens) for row in rows for tokens in row if tokens] or ["none"]
    text = data.draw(st.sampled_from(texts))
    start = data.draw(st.integers(0, len(text)))
    part = text[start : start + data.draw(st.integers(1, 40))]
    pattern = re.compile(re.escape(part.swapcase() if any_case else part), re.IGNORECASE if any_case else 0)
    found = matching(pattern, rows)
    assert found == [has(pattern, *row) for row in rows]


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=3), PATTERNS, st.booleans())
@example([(load_tokenizer(TINY).encode("K K").ids, [])], "k k", True)
def test_any_pattern_finds_what_it_finds_in_the_texts(
    rows: list[tuple[list[int], list[int]]], source: str, any_case: bool
) -> None:
    pattern = re.compile(source, re.IGNORECASE if any_case else 0)
    found = matching(pattern, rows)
    assert found == [has(pattern, *row) for row in rows]


@pytest.mark.parametrize(
    ("source", "literal"),
    [
        ("invoice", "invoice"),
        (r"invoice \d+ is paid", "invoice "),
        (r"\b(?:order|cart)\b of (user) [0-9]+", " of "),
        (r"a?bcd+e*", "bc"),
        ("(?i)INVOICE", "nvo"),
        ("paid|open", ""),
        ("(?i:ab)", ""),
    ],
)
def test_the_longest_literal_is_what_every_match_has(source: str, literal: str) -> None:
    assert find_requests._longest_literal(re.compile(source)) == literal.encode()


def test_texts_without_the_literal_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_text = load_tokenizer(TINY).encode
    rows = [(encode_text(text).ids,) for text in ("the capital of France", "nothing at all", "a capital city")]
    decoded: list[Sequence[int]] = []
    detokenizer = TEXTS.detokenizer(MODEL)
    text_of = type(detokenizer).text

    def noted(self: object, tokens: Sequence[int]) -> str:
        decoded.append(tokens)
        return text_of(detokenizer, tokens)

    monkeypatch.setattr(type(detokenizer), "text", noted)
    assert matching(re.compile("capital of .rance"), rows) == [True, False, False]
    assert len(decoded) == 3, "one text of each three records"
