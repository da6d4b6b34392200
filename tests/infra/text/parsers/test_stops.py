"""Stop strings end the content of an answer that is parsed, and nothing else of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.text.detokenizer import StopMatcher
from penstock.infra.text.parsers.answer_parser import AnswerParser
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.infra.text.parsers.registry import parser_for
from penstock.schemas.requests import GenerateRequest, Parsing, Stop
from tests.infra.text.parsers.corpus import CASES, TEXTS, Case
from tests.infra.text.parsers.test_parsers import FRAGMENTS, REASONING, TOOLS, added, cut, named
from tests.properties import examples

SPACE = " \t\r\n"


def reader(parsing: Parsing, *stops: str, min_tokens: int = 0, shown: bool = False) -> AnswerParser:
    stop = Stop(999, min_tokens=min_tokens, strings=stops)
    return parser_for(GenerateRequest("r-1", "m", "g", b"", stop, 0, 0, parsing=parsing, stops_shown=shown), 0)


def read(made: AnswerParser, pieces: list[str]) -> tuple[object, ...]:
    content, thought, calls = added([*map(made.push, pieces), made.finish()])
    return content or "", thought, calls, made.stop


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_text_that_stands_in_thoughts_and_calls_alone_stops_nothing(case: Case) -> None:
    parsing = Parsing(case.reasoning, case.tools, **case.options)
    whole = read(reader(parsing), list(case.text))
    words = {word for word in case.text.split() if len(word) > 1 and word not in (case.content or "")}
    for word in sorted(words):
        assert read(reader(parsing, word), list(case.text)) == whole


TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["a", "}", "\n", " ", "é", "<", "x=", "no", "think", '": ', "}}", "a a"]), max_size=2)


@examples(300)
@given(
    st.sampled_from(["", *REASONING]),
    st.sampled_from(["", *TOOLS]),
    st.booleans(),
    TEXT,
    STOPS,
    st.lists(st.integers(0, 400), max_size=12),
)
def test_the_content_is_cut_at_its_first_stop_string(
    reasoning: str, tools: str, thinking: bool, text: str, stops: list[str], places: list[int]
) -> None:
    parsing = Parsing(reasoning, tools, thinking=thinking, texts=TEXTS)
    free = read(reader(parsing), [text])
    content, thought, calls, stop = read(reader(parsing, *stops), [text])
    if stop is None:  # not even one that spans a call or what is held back at the end
        assert (content, thought, calls) == free[:3]
        return
    assert stop in stops
    if not calls:
        expected, found = StopMatcher(stops).push(str(free[0]))
        if found is not None:
            assert (content, stop) == (expected, found)
    assert str(free[0]).startswith(content.rstrip(SPACE)) if isinstance(content, str) else False
    with_it = read(reader(parsing, *stops, shown=True), [text])
    assert with_it[3] == stop
    assert str(with_it[0]).rstrip(SPACE).startswith(content.rstrip(SPACE)) if isinstance(content, str) else False


@examples(300)
@given(
    st.sampled_from(["", *REASONING]),
    st.sampled_from(["", *TOOLS]),
    TEXT,
    STOPS,
    st.integers(0, 9),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_streamed_and_whole_and_taken_over_in_between_they_end_at_the_same_token(
    reasoning: str, tools: str, text: str, stops: list[str], min_tokens: int, places: list[int]
) -> None:
    parsing = Parsing(reasoning, tools, texts=TEXTS)
    tokens = cut(text, places)
    streamed = read(reader(parsing, *stops, min_tokens=min_tokens), tokens)
    made = reader(parsing, *stops, min_tokens=min_tokens)
    message: Delta = made.parse(*tokens)
    calls = tuple((c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
    assert (message.content or "", message.reasoning_content, calls, made.stop) == streamed
    ended = [None if made.stop is None else made.stop]
    for number in range(len(tokens) + 1):  # another process reads the first tokens again, and goes on
        made = reader(parsing, *stops, min_tokens=min_tokens)
        for token in tokens[:number]:
            made.push(token)
        ended.append(made.stop)
    assert ended[1:] == sorted(ended[1:], key=lambda stop: stop is not None)  # once found, it stays


def test_stop_strings_count_from_the_token_that_the_client_names() -> None:
    parsing = Parsing("basic", "hermes")
    tokens = ["<think>", "a.", "</think>", "b.", "c.", "d."]
    assert read(reader(parsing, "."), tokens)[0] == "b"
    assert read(reader(parsing, ".", min_tokens=5), tokens)[0] == "b.c"
    assert read(reader(parsing, ".", min_tokens=6), tokens)[0] == "b.c.d"
    assert read(reader(parsing, ".", min_tokens=5, shown=True), tokens)[0] == "b.c."
    assert read(reader(parsing, ".c", min_tokens=5), tokens)[0] == "b", "it may begin in an earlier one"
    assert read(reader(parsing, "b.", ".c.", min_tokens=5), tokens)[0] == "b"
    assert read(reader(parsing, "b.", min_tokens=5), tokens)[0] == "b.c.d."
