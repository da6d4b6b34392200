"""Each row of the table of model families: its calls and thoughts are read, and marks that are no tokens are text."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers import families
from penstock.infra.text.parsers.answer_parser import AnswerParser
from penstock.infra.text.parsers.families import (
    CHANNELS,
    HARMONY_MARKS,
    PACKAGED,
    TABLE,
    CallFormat,
    Family,
    Table,
    UnknownFamily,
    read_rows,
)
from penstock.infra.text.parsers.reader import NONE, TOKEN, Marks
from penstock.infra.text.parsers.registry import answer_marks, parser_for, stop_search, text_stream
from penstock.schemas.done import reasoning_tokens
from penstock.schemas.requests import GenerateRequest, Parsing, Stop, ThoughtTokens
from penstock.schemas.wire import pack_tokens
from tests.infra.text.parsers.test_parsers import added, at_once, reader
from tests.properties import examples
from tests.tiny_model import byte_level_json

CALLED: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zürich "West" & {East}', "days": 3, "deep": {"a": [1, "x"], "b": None}}),
    ("now", {}),
]
TEXTS = {"get_weather": {"city": False}}
NAMES = ("get_weather", "now")
WITH_CALLS = [row for row in TABLE.rows if row.calls is not None and row.calls.reader != CHANNELS]
WITH_THOUGHTS = [row for row in TABLE.rows if row.thoughts is not None and not row.thoughts.channels]
_TOKEN = re.compile(r"<[^<>\s={]*>|\[/?[A-Z_]+\]|｜DSML｜|\]<\]minimax\[>\[|◁[^▷]*▷")


def named(row: Family) -> str:
    return row.name


def written(form: CallFormat) -> str:
    """The calls as constraints have them."""
    each = form.each and not (form.list and not form.head)
    before, after = ("", "") if form.starts else form.section
    calls = []
    for number, (name, arguments) in enumerate(CALLED):
        call = form.call[0] + _call(form, name, arguments, number) + form.call[1]
        calls.append(before + call + after if each else call)
    joined = (form.between if not (each and form.list) else "").join(calls)
    if form.list and not each:
        joined = f"[{joined}]"
    return joined if each else before + joined + after


def _call(form: CallFormat, name: str, arguments: dict[str, Any], number: int) -> str:
    if form.reader == "json":
        said = json.dumps(arguments, ensure_ascii=False)
        if form.head:
            return form.head.replace("{name}", name).replace("{number}", str(number)) + said
        if form.keyed:
            return f'{{"{name}": {said}}}'
        return f'{{"{form.name_key}": "{name}", "{form.arguments_key}": {said}}}'
    if form.reader == "pythonic":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if form.reader == "notation":
        return name + _notation(arguments, form.quote)
    parts = [name + form.name_end.replace("{number}", str(number))]
    for key, value in arguments.items():
        kind = {str: "string", int: "number", dict: "object"}[type(value)]
        is_text = "true" if kind == "string" else "false"
        parts += [form.key[0], key, form.key[1].replace("{is_text}", is_text).replace("{type}", kind)]
        parts.append(value if isinstance(value, str) else json.dumps(value))
        parts.append(form.value_end.replace("{key}", key))
    return "".join(parts)


def _notation(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_notation(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_notation(each, quote) for each in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def tokens_of(row: Family) -> Marks:
    """A vocabulary in which each mark of the row is a token."""
    return Marks(found for text in row.marks for found in _TOKEN.findall(text))


def made(reasoning: str, tools: str, marks: Marks, **options: Any) -> AnswerParser:
    parsing = Parsing(reasoning, tools, texts=TEXTS, functions=NAMES, **options)
    return parser_for(GenerateRequest("r-1", "m", "g", b"", Stop(9), 0, 0, parsing=parsing), 0, marks)


def pieces(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    at = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))})
    return [text[start:end] for start, end in itertools.pairwise(at)]


def streamed(parser: AnswerParser, parts: Sequence[str]) -> Any:
    return added([*map(parser.push, parts), parser.finish()])


def in_any_cut(row: Family, text: str, marks: Marks, *, reasoning: str = "", tools: str = "", **options: Any) -> Any:
    """What is read of a text, which must not depend on how it is cut."""
    whole = added([made(reasoning, tools, marks, **options).parse(text)])
    for parts in (list(text), [text], *(pieces(text, seed) for seed in range(20))):
        found = streamed(made(reasoning, tools, marks, **options), parts)
        assert (found[0] or "", *found[1:]) == (whole[0] or "", *whole[1:])
    return whole


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("row", WITH_CALLS, ids=named)
def test_the_calls_of_every_row_are_read_in_any_cut(row: Family, spelled: bool) -> None:
    assert row.calls is not None
    marks = NONE if spelled else tokens_of(row)
    content, _, calls = in_any_cut(row, marks.within(written(row.calls)), marks, tools=row.name)
    assert [(name, json.loads(said)) for _, name, said in calls] == CALLED
    assert not content
    if not row.calls.starts:
        text = "I look.\n" + marks.within(written(row.calls)) + "\nDone."
        content, _, calls = in_any_cut(row, text, marks, tools=row.name)
        assert len(calls) == len(CALLED)
        assert (content or "").split() == ["I", "look.", "Done."]


@pytest.mark.parametrize(
    "row", [row for row in WITH_CALLS if row.calls and row.calls.openers and not row.calls.starts], ids=named
)
def test_marks_in_ordinary_tokens_call_nothing_where_the_vocabulary_has_tokens_for_them(row: Family) -> None:
    assert row.calls is not None
    marks = tokens_of(row)
    certain = [opener for opener in row.calls.openers if marks.within(opener) != opener]
    if not certain:
        pytest.skip("the family spells its marks")
    text = "The page says: " + written(row.calls)
    assert in_any_cut(row, text, marks, tools=row.name) == (text, None, ())


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("row", WITH_THOUGHTS, ids=named)
def test_the_thoughts_of_every_row_are_read_in_any_cut(row: Family, spelled: bool) -> None:
    assert row.thoughts is not None
    marks = NONE if spelled else tokens_of(row)
    opening, closing = row.thoughts.opening[0], row.thoughts.closing[0]
    text = marks.within(opening) + "First this." + marks.within(closing) + "\nThen that."
    assert in_any_cut(row, text, marks, reasoning=row.name) == ("Then that.", "First this.", ())
    begun = "First this." + marks.within(closing) + "\nThen that."
    found = in_any_cut(row, begun, marks, reasoning=row.name, thinking=True)
    assert found == ("Then that.", "First this.", ())
    if not spelled and marks.within(closing) != closing:
        quoted = marks.within(opening) + f"It ends with {closing}, they say." + marks.within(closing) + "So."
        assert in_any_cut(row, quoted, marks, reasoning=row.name)[:2] == ("So.", f"It ends with {closing}, they say.")


@pytest.mark.parametrize("row", WITH_THOUGHTS, ids=named)
def test_a_repeated_closing_mark_is_no_content(row: Family) -> None:
    assert row.thoughts is not None
    marks = tokens_of(row)
    opening, closing = marks.within(row.thoughts.opening[0]), marks.within(row.thoughts.closing[0])
    if closing == row.thoughts.closing[0]:
        pytest.skip("the family spells its marks")
    text = opening + "Hm." + closing + "\n" + closing + "\nSo."
    assert in_any_cut(row, text, marks, reasoning=row.name) == ("So.", "Hm.", ())


@pytest.mark.parametrize("row", [row for row in WITH_THOUGHTS if row.thoughts and row.thoughts.again], ids=named)
def test_more_thoughts_may_follow_content(row: Family) -> None:
    assert row.thoughts is not None
    assert row.calls is not None
    marks = tokens_of(row)
    opening, closing = marks.within(row.thoughts.opening[0]), marks.within(row.thoughts.closing[0])
    thought = opening + "One." + closing
    text = thought + "I look. " + opening + "Two." + closing + "It is." + closing
    for tools in ("", row.name):
        assert in_any_cut(row, text, marks, reasoning=row.name, tools=tools) == ("I look. It is.", "One.\nTwo.", ())
    # also without a first thought, and closed by a call alone
    text = "I look.\n" + opening + "Two.\n" + marks.within(written(row.calls))
    content, said, calls = in_any_cut(row, text, marks, reasoning=row.name, tools=row.name)
    assert (content, said, len(calls)) == ("I look.", "Two.", len(CALLED))
    spelled = "It writes " + row.thoughts.opening[0] + " and " + row.thoughts.closing[0]
    assert in_any_cut(row, spelled, marks, reasoning=row.name) == (spelled, None, ())


@examples(200)
@given(st.lists(st.sampled_from([1, 2, 3]), max_size=12), st.booleans(), st.booleans())
def test_the_record_counts_more_thoughts_as_the_parser_does(tokens: list[int], thinking: bool, joined: bool) -> None:
    assume(tokens[:2] != [3, 1])  # a token before the first mark is taken for white space
    marks = Marks(("[/THINK]", "[THINK]"))
    texts = {1: marks.char("[THINK]"), 2: marks.char("[/THINK]"), 3: "a"}
    parsing = Parsing("mistral", thinking=thinking, joined=joined, thoughts=ThoughtTokens((1,), (2,), again=True))
    parser = parser_for(GenerateRequest("r-1", "m", "g", b"", Stop(999), 0, 0, parsing=parsing), 0, marks)
    for token in tokens:
        parser.push(texts[token])
    assert reasoning_tokens(parsing, pack_tokens(tokens)) == parser.reasoning_tokens


@pytest.mark.parametrize("row", [row for row in WITH_CALLS if row.thoughts is not None], ids=named)
def test_calls_that_end_the_thoughts_of_every_row_are_read_in_any_cut(row: Family) -> None:
    """Also with marks in their values, which are text there."""
    assert row.calls is not None
    assert row.thoughts is not None
    marks = tokens_of(row)
    for value in ("Oslo", *(mark for mark in row.marks if "{" not in mark and mark.strip() == mark)):
        said = written(row.calls).replace('"West"', "West").replace("Zürich", value if '"' not in value else "Bern")
        text = marks.within(row.thoughts.opening[0] + "I call.\n" + said)
        content, thought, calls = in_any_cut(row, text, marks, reasoning=row.name, tools=row.name)
        if value == "Oslo" and not row.calls.starts:
            assert (content, thought, len(calls)) == (None, "I call.", len(CALLED))


@pytest.mark.parametrize("row", WITH_CALLS, ids=named)
def test_a_call_that_a_limit_cut_off_is_none_in_whole_answers(row: Family) -> None:
    assert row.calls is not None
    marks = tokens_of(row)
    text = marks.within(written(row.calls))
    for end in range(len(text)):
        content, _, calls = added([made("", row.name, marks).parse(text[:end], limited=True)])
        for (_, name, said), (wanted, arguments) in zip(calls, CALLED, strict=False):
            assert (name, json.loads(said)) == (wanted, arguments)
        if calls and not row.frame[0]:
            assert not (content or "").strip()


def test_a_spelled_alternative_to_a_token_counts_where_it_cannot_be_a_quotation() -> None:
    granite, qwen = TABLE.find("granite"), TABLE.find("qwen3_coder")
    assert granite is not None
    assert qwen is not None
    marks = Marks(["<|tool_call|>"])
    call = '<tool_call>[{"name": "now", "arguments": {}}]'
    assert [name for _, name, _ in in_any_cut(granite, call, marks, tools="granite")[2]] == ["now"]
    quoted = f"It says {call}"
    assert in_any_cut(granite, quoted, marks, tools="granite") == (quoted, None, ())
    marks = Marks(["<tool_call>", "</tool_call>"])
    bare = "Look.\n<function=now>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    content, _, calls = in_any_cut(qwen, bare + marks.within("</tool_call>"), marks, tools="qwen3_coder")
    assert (content, [(name, json.loads(said)) for _, name, said in calls]) == ("Look.", [("now", {"x": 1})])
    for end in ("", "</tool_call>", " and so on."):
        assert in_any_cut(qwen, bare + end, marks, tools="qwen3_coder") == (bare + end, None, ())


def test_an_argument_that_is_not_closed_ends_at_the_token_of_the_next_one() -> None:
    row = TABLE.find("deepseek_v32")
    assert row is not None
    assert row.calls is not None
    marks = Marks(["｜DSML｜"])
    (opening, closing), key = row.calls.section, '<｜DSML｜parameter name="'
    call = f'{opening}<｜DSML｜invoke name="go">\n{key}to" string="true">a <b>%s</｜DSML｜invoke>\n{closing}'
    for rest, said in {
        f'{key}days" string="false">3</｜DSML｜parameter>\n': {"to": "a <b>", "days": 3},
        "": {"to": "a <b>"},
        f"{key} is a mark</｜DSML｜parameter>": {"to": f"a <b>{key} is a mark"},
        "</｜DSML｜invoke> is one</｜DSML｜parameter>": {"to": "a <b></｜DSML｜invoke> is one"},
    }.items():
        content, _, calls = in_any_cut(row, marks.within(call % rest), marks, tools=row.name)
        assert (content, [(name, json.loads(arguments)) for _, name, arguments in calls]) == (None, [("go", said)])


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("row", [row for row in WITH_CALLS if row.calls and row.calls.section[0].strip()], ids=named)
def test_marks_around_no_call_are_part_of_nothing(row: Family, spelled: bool) -> None:
    assert row.calls is not None
    marks = NONE if spelled else tokens_of(row)
    opening, closing = map(str.strip, row.calls.section)
    for inside in (*(("", "\n") if closing else ()), *(("[]", " [ ]\n") if row.calls.list else ())):
        text = marks.within(opening + inside + closing)
        content, *others = in_any_cut(row, text, marks, tools=row.name)
        assert [content or "", *others] == ["", None, ()]


GENERAL = (
    *('{"name": "now"', ', "arguments": ', '{"x": 1}', "{}", "}", "{", "[", "]", '"', ",", ";", ":", "\n", " ", "now"),
    *("a", "now(x=1)", ")", "<", ">", "|>", "1", "é", "call:", "x", '">', '" string="true">', "/", "```"),
)


@st.composite
def texts(draw: st.DrawFn) -> tuple[Family, Marks, str]:
    """A row, a vocabulary, and a text of the row's marks in any order, as tokens and spelled, and of other pieces."""
    row = draw(st.sampled_from(TABLE.rows))
    marks = tokens_of(row) if draw(st.booleans()) else NONE
    own = [*row.marks, *(marks.within(each) for each in row.marks)]
    parts = draw(st.lists(st.one_of(st.sampled_from(own), st.sampled_from(GENERAL)), max_size=16))
    return row, marks, "".join(parts)


@examples(400)
@given(texts(), st.lists(st.integers(0, 500), max_size=10), st.booleans(), st.booleans())
def test_no_cutting_changes_what_any_row_makes_of_any_text(
    given_: tuple[Family, Marks, str], places: list[int], limited: bool, thinking: bool
) -> None:
    row, marks, text = given_
    reasoning, tools = row.name if row.thoughts else "", row.name if row.calls else ""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    parts = [text[start:end] for start, end in itertools.pairwise(at)]

    def read(parts: list[str]) -> Any:
        parser = made(reasoning, tools, marks, thinking=thinking)
        deltas = [*map(parser.push, parts)]
        content, *rest = added([*deltas, parser.finish(limited=limited)])
        assert not any(TOKEN.search(each) for each in (content or "", rest[0] or "", *(said for *_, said in rest[1])))
        return content or "", *rest

    assert read(parts) == read([text]) == read(list(text))
    if not limited:
        content, *rest = added([made(reasoning, tools, marks, thinking=thinking).parse(text)])
        assert (content or "", *rest) == read(parts)


HARMONY = Marks(HARMONY_MARKS)


def test_a_final_answer_that_quotes_a_call_calls_nothing() -> None:
    quoted = "<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>"
    text = HARMONY.within("<|channel|>final<|message|>") + f"The page says {quoted}."
    row = TABLE.find("gpt_oss")
    assert row is not None
    found = in_any_cut(row, text, HARMONY, reasoning="gpt_oss", tools="gpt_oss")
    assert found == (f"The page says {quoted}.", None, ())


@pytest.mark.parametrize(
    ("header", "content", "called"),
    [
        ("<|channel|>commentary to=now<|message|>", None, ["now"]),
        (" to=now<|channel|>commentary json<|message|>", None, ["now"]),
        ("<|channel|>commentary to=functions.else<|message|>", None, ["else"]),
        ("<|channel|>commentary to=assistant<|message|>", "{}", []),
        ("<|channel|>commentary to=container.exec code<|message|>", None, []),
        ("<|channel|>analysis to=python code<|message|>", None, []),
        ("<|channel|>commentary to=assistant<|channel|>final<|message|>", "{}", []),
    ],
)
def test_whom_a_message_of_harmony_is_for(header: str, content: str | None, called: list[str]) -> None:
    row = TABLE.find("openai")
    assert row is not None
    text = HARMONY.within(header) + "{}"
    found = in_any_cut(row, text, HARMONY, reasoning="gpt_oss", tools="gpt_oss")
    assert (found[0], [name for _, name, _ in found[2]]) == (content, called)


@pytest.mark.parametrize(
    ("written_id", "name"),
    [
        ("functions.now:7", "now"),
        ("functionsget_weather5", "get_weather"),
        ("functions.get_weather5", "get_weather"),
        ("functions_get_weather_5", "get_weather"),
        ("get_weather", "get_weather"),
        ("functions.other:1", "other"),
    ],
)
def test_names_in_the_ids_of_kimi(written_id: str, name: str) -> None:
    text = f"<|tool_call_begin|>{written_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    row = TABLE.find("kimi_k2")
    assert row is not None
    for section in (text, f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"):
        content, _, calls = in_any_cut(row, section, NONE, tools="kimi_k2")
        assert (content, [call[1] for call in calls]) == (None, [name])


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("functions.get_weathercommentary", "get_weather"),
        ("functions.get_weatherjson", "get_weather"),
        ("get_weatheranalysis", "get_weather"),
        ("functions.to_json", "to_json"),
        ("functions.otherjson", "otherjson"),
    ],
)
def test_words_that_gpt_oss_glues_to_a_name_are_not_part_of_it(written: str, name: str) -> None:
    made = reader("gpt_oss", "gpt_oss", functions=("get_weather", "to_json", "to_"))
    _, _, calls = at_once(made, f"<|channel|>commentary to={written}<|message|>{{}}<|call|>")
    assert [call[1] for call in calls] == [name]


def test_an_empty_section_of_calls_is_nothing_and_one_with_text_is_text() -> None:
    row = TABLE.find("kimi_k2")
    assert row is not None
    empty = "So.<|tool_calls_section_begin|><|tool_calls_section_end|>"
    assert in_any_cut(row, empty, NONE, tools="kimi_k2") == ("So.", None, ())
    noisy = "<|tool_calls_section_begin|> none, really <|tool_calls_section_end|>"
    assert in_any_cut(row, noisy, NONE, tools="kimi_k2") == (noisy, None, ())


@pytest.mark.parametrize(
    ("text", "names"),
    [("[TOOL_CALLS]now", ["now"]), ("[TOOL_CALLS]now[TOOL_CALLS]now", ["now"] * 2), ("[TOOL_CALLS]nothing", [])],
)
def test_mistral_calls_without_arguments(text: str, names: list[str]) -> None:
    row = TABLE.find("mistral")
    assert row is not None
    found = in_any_cut(row, text, NONE, tools="mistral")
    assert [(name, said) for _, name, said in found[2]] == [(name, "{}") for name in names]


# --- tokens ---


def test_the_text_of_an_answer_tells_marks_from_their_spelling() -> None:
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_tokens(["<tool_call>"])  # not special, as in Qwen's vocabularies
    tokenizer.add_special_tokens(["</tool_call>"])
    detokenizer = Detokenizer(tokenizer)
    parsing = Parsing(tools="hermes")
    request = GenerateRequest("r-1", "m", "g", b"", Stop(9, strings=("stop",)), 0, 0, parsing=parsing)
    call = '{"name": "a", "arguments": {"x": "stop"}}'

    def read(ids: list[int]) -> tuple[Any, str | None]:
        stream, parser = (
            text_stream(request, detokenizer),
            parser_for(request, 0, answer_marks(parsing, detokenizer).marks),
        )
        search = stop_search(request, 0, detokenizer)
        deltas = [parser.push(stream.push(token)) for token in ids]
        for token in ids:
            search.push(token)
        return added([*deltas, parser.finish(stream.finish())]), search.stop

    def spelled(text: str) -> list[int]:
        return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False).ids]

    opening, closing = detokenizer.added["<tool_call>"], detokenizer.added["</tool_call>"]
    (content, _, calls), stop = read([opening, *spelled(call), closing])
    assert (content, stop) == (None, None)
    assert [(name, said) for _, name, said in calls] == [("a", '{"x": "stop"}')]
    (content, _, calls), stop = read(spelled(f"<tool_call>{call}</tool_call>"))
    assert (content, calls, stop) == ('<tool_call>{"name": "a", "arguments": {"x": "', (), "stop")


# --- names and templates ---


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownFamily, match="'hermez' is not a format of tool calls; the nearest: hermes"):
        families.tool_call_parser("hermez", "")
    with pytest.raises(UnknownFamily, match=r"'xyz' is not a format of reasoning; there are: .*gpt_oss"):
        families.reasoning_parser("xyz", "")
    with pytest.raises(
        ValueError, match=r"--tool-call-parser 'qwen3' is not a format of tool calls; the nearest: .*qwen"
    ):
        families.prepare("", tool_calls="qwen3")


@pytest.mark.parametrize(
    ("alias", "name"),
    [("openai", "gpt_oss"), ("qwen3_xml", "qwen3_coder"), ("qwen25", "hermes"), ("qwen3_json", "hermes"),
     ("llama4_json", "llama3_json"), ("granite4", "hermes"), ("step3p5", "qwen3_coder"), ("nemotron_v3", "qwen3_coder"),
     ("ling3", "glm45"), ("poolside_v1", "glm45"), ("deepseek_v31", "deepseek_v3_1")],
)  # fmt: skip
def test_names_of_other_servers_are_aliases(alias: str, name: str) -> None:
    assert families.tool_call_parser(alias, "") == name


def test_holo2_thinks_as_qwen3() -> None:
    assert families.reasoning_parser("holo2", "") == "qwen3"


@pytest.mark.parametrize("part", ["thoughts", "calls"])
@pytest.mark.parametrize("row", TABLE.rows, ids=named)
def test_a_template_with_the_texts_of_a_row_is_detected_as_that_row(row: Family, part: str) -> None:
    found = getattr(row, part)
    if found is None or not found.template:
        pytest.skip("never detected")
    texts = [each if isinstance(each, str) else each[0] for each in found.template]
    assert TABLE.detected("{{ messages }} " + " … ".join(texts), part) == row.name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "thoughts", "calls"),
    [
        ("<seed:think> <seed:tool_call> <function=f> <parameter=p>", "seed_oss", "seed_oss"),
        ("]<]minimax[>[<tool_call> </tool_call> <mm:think> arguments", "minimax_m3", "minimax_m3"),
        ("<tool_calls>[ </tool_calls> <tool_call></tool_call> arguments [BEGIN FINAL RESPONSE]", "apriel", "apriel"),
        ("<tool_call> </tool_call> arguments </think>", "basic", "hermes"),
        ("no marks at all", "", ""),
    ],
)
def test_marks_that_families_share_do_not_mislead(template: str, thoughts: str, calls: str) -> None:
    assert (TABLE.detected(template, "thoughts"), TABLE.detected(template, "calls")) == (thoughts, calls)


# --- users' files ---

NEW = """
[[family]]
name = "acme"
models = "Acme 1"
checked = "by hand"
[family.thoughts]
opening = ["<hm>"]
closing = ["</hm>"]
[family.calls]
reader = "json"
section = ["<do>", "</do>"]
list = true
between = ", "
template = ["<do>"]
"""


def test_a_users_file_adds_rows_which_come_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(NEW)
    table = Table(read_rows(PACKAGED))
    table.add(read_rows(file))
    assert table.detected("<do> <tool_call> </tool_call> arguments", "calls") == "acme"
    (tmp_path / "rows.json").write_text(
        json.dumps({"family": [{"name": "a", "models": "", "checked": "", "thoughts": {}}]})
    )
    assert read_rows(tmp_path / "rows.json")[0].thoughts is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[family]]\nname = 3", "Expected `str`"),
        (NEW.replace("acme", "hermes"), "'hermes'"),
        (NEW.replace("between", "beetween"), "beetween"),
        (NEW.replace('["<do>", "</do>"]', '["", ""]'), "nothing stands before its calls"),
        (NEW.replace('"json"', '"markup"'), "markup needs key and value_end"),
        (NEW + "\nalso = ['<do>x']", "one contains another"),
        ("[[family]]\nname='a'\nmodels=''\nchecked=''", "neither thoughts nor calls"),
        ("family = [", "rows.toml"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        Table(TABLE.rows).add(read_rows(file))
    with pytest.raises(ValueError, match=re.escape(f"--parser-families {tmp_path / 'missing.toml'}: No such file")):
        families.prepare(str(tmp_path / "missing.toml"))


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(("depth", "deep"), [(40, False), (5_000, True)])
def test_elements_that_are_nested_too_deeply_are_text(depth: int, deep: bool, closed: bool) -> None:
    row = TABLE.find("minimax_m3")
    assert row is not None
    sign = "]<]minimax[>["
    said = f"{sign}<a>" * depth + ("1" + f"{sign}</a>" * depth if closed else "")
    call = f'{sign}<tool_call>\n{sign}<invoke name="now">{sign}<x>{said}{sign}</x>{sign}</invoke>\n{sign}</tool_call>'
    _, _, ((_, name, arguments),) = added([made("", row.name, NONE).parse(call)])
    value = json.loads(arguments)["x"]
    assert name == "now"
    assert (value == said) if deep else (set(value) == {"a"})


@pytest.mark.parametrize(("name", "marks"), [("qwen3_coder", "tool_call"), ("seed_oss", "seed:tool_call")])
def test_a_value_that_quotes_a_call_adds_none_where_each_call_has_tokens_around_it(name: str, marks: str) -> None:
    tokens = Marks((f"<{marks}>", f"</{marks}>"))
    quoted = "text</parameter>\n</function>\n<function=now>\n</function>\n"
    call = f"<{marks}>\n<function=get_weather>\n<parameter=city>\n{quoted}</parameter>\n</function>\n</{marks}>"
    _, _, calls = added([made("", name, tokens).parse(tokens.within(call))])
    assert [called for _, called, _ in calls] == ["get_weather"]
