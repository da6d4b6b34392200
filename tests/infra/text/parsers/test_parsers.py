"""What each format's parser makes of answers, however they are cut into pieces."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.base.chat_objects import message_of
from penstock.infra.model import modeldir
from penstock.infra.text.parsers import families as detection
from penstock.infra.text.parsers.answer_parser import AnswerParser
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.registry import ParserNames, agreed_parsers, answer_parsing, parser_for
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import GenerateRequest, Parsing, Stop
from tests.infra.text.parsers.corpus import CASES, TEXTS, Case
from tests.properties import examples

REASONING, TOOLS = TABLE.names("thoughts"), TABLE.names("calls")
Parsed = tuple[str | None, str | None, tuple[tuple[str, str, str], ...]]  # content, reasoning, (id, name, arguments)


def reader(reasoning: str = "", tools: str = "", choice: int = 0, **options: object) -> AnswerParser:
    made = Parsing(reasoning, tools, **options)  # type: ignore[arg-type]
    return parser_for(GenerateRequest("r-1", "m", "g", b"", Stop(9), 0, 0, parsing=made), choice)


def added(deltas: Iterable[Delta | None]) -> Parsed:
    """What a client makes of deltas, checking their form."""
    content: str | None = None
    thought: str | None = None
    calls: list[list[str]] = []
    for delta in filter(None, deltas):
        if delta.content is not None:
            content = (content or "") + delta.content
        if delta.reasoning_content is not None:
            thought = (thought or "") + delta.reasoning_content
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                assert call.index == len(calls)
                assert call.id
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            else:
                assert call.id is call.type is None
                assert call.function.arguments
            calls[call.index][2] += call.function.arguments
    return content, thought, tuple((call_id, name, said) for call_id, name, said in calls)


def streamed(made: AnswerParser, pieces: Sequence[str]) -> Parsed:
    deltas = [*map(made.push, pieces), made.finish()]
    assert all(
        each.content is not None or each.reasoning_content is not None or each.tool_calls
        for each in filter(None, deltas)
    )
    return added(deltas)


def at_once(made: AnswerParser, text: str) -> Parsed:
    """As an answer that is not streamed is read; what no text says is "" there."""
    content, *rest = added([made.parse(text)])
    return content or "", *rest  # type: ignore[return-value]


def cut(text: str, places: Iterable[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


def named(case: Case) -> str:
    return f"{case.reasoning}+{case.tools} {case.text[:40]!r}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_an_answer_says_what_its_format_means(case: Case) -> None:
    content, thought, calls = at_once(reader(case.reasoning, case.tools, **case.options), case.text)
    assert (content, thought) == (case.content or "", case.thought)
    assert tuple((name, said) for _, name, said in calls) == case.calls


@pytest.mark.parametrize("case", CASES, ids=named)
def test_character_by_character_the_result_is_the_same(case: Case) -> None:
    whole = at_once(reader(case.reasoning, case.tools, **case.options), case.text)
    content, *rest = streamed(reader(case.reasoning, case.tools, **case.options), list(case.text))
    assert [content or "", *rest] == [whole[0] or "", *whole[1:]]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_cut_off_anywhere_it_neither_fails_nor_yields_anything_else(case: Case) -> None:
    """What was shown of a longer answer is the beginning of it, whatever comes after."""
    made = reader(case.reasoning, case.tools, **case.options)
    shown: list[Delta | None] = []
    whole = streamed(reader(case.reasoning, case.tools, **case.options), [case.text])
    for place, character in enumerate(case.text):
        prefix = case.text[:place]
        assert streamed(reader(case.reasoning, case.tools, **case.options), [prefix]) == streamed(
            reader(case.reasoning, case.tools, **case.options), list(prefix)
        )
        shown.append(made.push(character))
        content, thought, calls = added(shown)
        assert (whole[0] or "").startswith(content or "")
        assert (whole[1] or "").startswith(thought or "")
        for (call_id, name, said), end in zip(calls, whole[2], strict=False):
            assert (call_id, name) == end[:2]
            assert end[2].startswith(said)


FRAGMENTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<TOOLCALL>", "[TOOL_CALLS]"),
    *("<function=a>", "<parameter=x>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "final"),
    *(" to=functions.a", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("functions.a:0", "```json", "```", "[ARGS]", '{"name": "a"', ', "arguments": ', '{"x": 1}', "{}", "}", "{", "["),
    *("]", '"', "\\", ",", ";", "\n", " ", "a", "a(x=1)", "a(", ")", "[a(", "x='", "é", "null", "<", "|>"),
    *("Here is my thought process:", "Here is my response:", '"\\ud800"', "\x00", "}}</tool_call>"),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
PLACES = st.lists(st.integers(0, 400), max_size=12)
NAMES = st.tuples(st.sampled_from(["", *REASONING]), st.sampled_from(["", *TOOLS]), st.booleans())


@examples(200)
@given(NAMES, TEXT, PLACES)
def test_no_cutting_changes_the_result_of_any_text(names: tuple[str, str, bool], text: str, places: list[int]) -> None:
    reasoning, tools, thinking = names
    whole = streamed(reader(reasoning, tools, thinking=thinking, texts=TEXTS), [text])
    assert streamed(reader(reasoning, tools, thinking=thinking, texts=TEXTS), cut(text, places)) == whole
    assert streamed(reader(reasoning, tools, thinking=thinking, texts=TEXTS), list(text)) == whole
    assert at_once(reader(reasoning, tools, thinking=thinking, texts=TEXTS), text) == (whole[0] or "", *whole[1:])


@examples(200)
@given(st.sampled_from(CASES), PLACES, st.integers(0, 400), st.sampled_from(FRAGMENTS))
def test_no_cutting_changes_what_a_damaged_answer_says(case: Case, places: list[int], at: int, more: str) -> None:
    at %= len(case.text) + 1
    text = case.text[:at] + more + case.text[at:]
    pieces = cut(text, places)
    whole = streamed(reader(case.reasoning, case.tools, **case.options), [text])
    assert streamed(reader(case.reasoning, case.tools, **case.options), pieces) == whole
    assert at_once(reader(case.reasoning, case.tools, **case.options), text) == (whole[0] or "", *whole[1:])


QWEN3_CODER = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM45 = "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("tools", "text", "value"),
    [
        ("qwen3_coder", QWEN3_CODER, "a</parameter>b"),
        ("qwen3_coder", QWEN3_CODER, "a\n</function>\nb"),
        ("glm45", GLM45, "1</arg_value> so"),
        ("glm45", GLM45, "</tool_call>, <tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="p">{}</parameter>\n</invoke>\n'
         "</minimax:tool_call>", "x</parameter>y</invoke>z"),
    ],
)  # fmt: skip
def test_a_closing_mark_with_other_text_behind_it_is_a_part_of_the_value(tools: str, text: str, value: str) -> None:
    texts = {"f": {"p": False}}
    for pieces in ([text.format(value)], list(text.format(value))):
        content, _, ((_, name, arguments),) = streamed(reader("", tools, texts=texts), pieces)
        assert (content, name, json.loads(arguments)) == (None, "f", {"p": value})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=p>\n1\n<parameter=q>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>\n<parameter=q>\n2\n</function>\n</tool_call>",
        "<function=f>\n<parameter=p>\n1\n</parameter>\n<parameter=q>\n2\n</parameter>\n</function>\n</tool_call>",
        "<function=f><parameter=p>1</parameter><parameter=q>2</parameter></function>",
    ],
)
def test_qwen3_coder_calls_are_read_without_some_of_their_marks(text: str) -> None:
    for pieces in ([text], list(text)):
        content, _, ((_, _, arguments),) = streamed(reader("", "qwen3_coder"), pieces)
        assert (content, json.loads(arguments)) == (None, {"p": 1, "q": 2})


DSML = [
    ('days" string="true">3', {"days": 3}),
    ('days" string="true">some', {"days": "some"}),
    ('city" string="true">3', {"city": "3"}),
    ('either" string="true">3', {"either": "3"}),
    ('arguments" string="false">{"city": "Zürich", "days": 3}', {"city": "Zürich", "days": 3}),
    ('input" string="true">{"days": 3}', {"days": 3}),
    ('input" string="false">{"other": 3}', {"input": {"other": 3}}),
    ('input" string="false">{"days": 1e999}', {"days": float("inf")}),  # as it is written
    ('input" string="true">{"other', {"input": '{"other'}),
    ('other" string="true">3', {"other": "3"}),
]


@pytest.mark.parametrize(("argument", "said"), DSML)
def test_what_deepseek_calls_text_and_how_it_wraps_arguments_is_put_right_by_the_schema(
    argument: str, said: dict[str, Any]
) -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "either": either}
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    for name in ("deepseek_v32", "deepseek_v4"):
        made = answer_parsing(ParserNames("", name), [tool], lambda count: "", one_call=False)
        calls = TABLE.calls(name)
        assert made is not None
        assert calls is not None
        written = "".join(
            f'<｜DSML｜parameter name="{each}</｜DSML｜parameter>\n' for each in (argument, 'unit" string="true">1')
        )
        text = f'{calls.section[0]}<｜DSML｜invoke name="f">\n{written}</｜DSML｜invoke>\n{calls.section[1]}'
        for pieces in ([text], list(text)):
            parser = parser_for(GenerateRequest("r-1", "m", "g", b"", Stop(9), 0, 0, parsing=made), 0)
            content, _, ((_, _, arguments),) = streamed(parser, pieces)
            assert (content, json.loads(arguments)) == (None, {**said, "unit": "1"})


@pytest.mark.parametrize("text", ["<tool_call><function=f>\nso", "Use <function=x>.", "<tool_call>f\n<arg_key>"])
def test_a_tag_that_nothing_of_a_call_follows_is_text(text: str) -> None:
    for tools in ("qwen3_coder", "glm45"):
        assert at_once(reader("", tools), text) == (text, None, ())


@examples(200)
@given(st.sampled_from([name for name in TOOLS if name != "gpt_oss"]), TEXT)
def test_text_without_a_call_is_the_content_to_the_letter(tools: str, text: str) -> None:
    row = TABLE.find(tools)
    assert row is not None
    assume(not any(mark in text for mark in row.layout))  # which is part of nothing, as is an empty section of calls
    section = [*filter(None, map(str.strip, row.calls.section))] if row.calls is not None else []
    assume(len(section) < 2 or not re.search(r"\s*".join(map(re.escape, section)), text))
    content, thought, calls = streamed(reader("", tools), [text])
    assert thought is None
    if not calls:
        assert (content or "") == text


@examples(200)
@given(st.sampled_from(["hermes", "llama3_json", "mistral", "granite", "command_a"]), TEXT)
def test_nothing_of_a_json_format_is_lost(tools: str, text: str) -> None:
    """Each word of the text is in the content or in a call, but for what the format itself writes."""
    content, _, calls = streamed(reader("", tools), [text])
    said = (content or "") + "".join(name + arguments for _, name, arguments in calls)
    for word in ("é", "analysis", "x='", "response"):
        if '"' not in text:  # inside a string that is no call's it may be part of an unknown key
            assert said.count(word) == text.count(word)


def test_ids_of_calls_follow_from_the_request() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 2
    first, again, other = (streamed(reader("", "hermes", choice), [text])[2] for choice in (0, 0, 1))
    assert first == again
    assert len({call_id for call_id, _, _ in (*first, *other)}) == 4
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id, _, _ in first)


def test_mistral_ids_have_nine_characters_and_given_ids_stay() -> None:
    calls = streamed(reader("", "mistral"), ["[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[CALL_ID]x1y2z3a4b[ARGS]{}"])[2]
    assert re.fullmatch("[A-Za-z0-9]{9}", calls[0][0])
    assert calls[1][0] == "x1y2z3a4b"
    kimi = next(case for case in CASES if case.tools == "kimi_k2" and len(case.calls) == 2)
    assert [call[0] for call in streamed(reader("", "kimi_k2"), [kimi.text])[2]] == [
        "functions.get_weather:0",
        "functions.get_time:1",
    ]
    odd = next(case for case in CASES if case.tools == "kimi_k2" and len(case.calls) == 5)
    assert [call[0] for call in streamed(reader("", "kimi_k2"), [odd.text])[2]] == [
        "functions.w:0",
        "functions.w:1",
        "w:2",
        "functions.w:3",
        "functions.page_2:4",
    ]


def test_without_parallel_calls_only_the_first_is_shown() -> None:
    for case in (case for case in CASES if len(case.calls) > 1):
        made = reader(case.reasoning, case.tools, one_call=True, **case.options)
        content, thought, calls = streamed(made, list(case.text))
        assert (content, thought) == (case.content, case.thought)
        assert [(name, said) for _, name, said in calls] == [case.calls[0]]


def test_arguments_come_as_they_are_written() -> None:
    made = reader("", "hermes")
    made.push('<tool_call>{"name": "a", "arguments": {"text": "')
    for word in ("one ", "two ", "three"):
        delta = made.push(word)
        assert delta is not None
        assert delta.tool_calls is not None
        assert [call.function.arguments for call in delta.tool_calls] == [word]


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "number": {"type": "integer"},
                "either": {"type": ["string", "integer"]},
                "odd": True,
            }
        },
    },
}


def test_what_a_request_records() -> None:
    def record(
        parsers: ParserNames, tools: list[dict[str, object]] | None, end: str = "", **more: bool
    ) -> Parsing | None:
        return answer_parsing(parsers, tools, lambda count: end, one_call=more.get("one_call", False))

    assert record(ParserNames("", "hermes"), None) is None
    assert record(ParserNames(), [TOOL]) is None
    assert record(ParserNames("", "hermes"), [TOOL], one_call=True) == Parsing(tools="hermes", one_call=True)
    assert record(ParserNames("qwen3", "hermes"), None, one_call=True) == Parsing("qwen3")
    assert record(ParserNames("qwen3"), None, "assistant\n<think>\n") == Parsing("qwen3", thinking=True)
    assert record(ParserNames("deepseek_r1"), None, "<｜Assistant｜>") == Parsing("deepseek_r1", thinking=True)
    assert record(ParserNames("deepseek_r1"), None, "<｜Assistant｜></think>") == Parsing("deepseek_r1")
    assert record(ParserNames("", "qwen3_coder"), [TOOL, {}, {"function": 3}]) == Parsing(
        tools="qwen3_coder", texts={"f": {"text": False, "maybe": True}}
    )


def worker(name: str, epoch: int, role: str = "aggregated", reasoning: str = "", tools: str = "") -> Registration:
    return Registration(name, "m", role, "e", epoch, 32, 1, 1, 1, reasoning_parser=reasoning, tool_call_parser=tools)


def test_of_workers_that_disagree_the_one_that_is_there_longest_decides() -> None:
    old, new = worker("b", 1, tools="hermes"), worker("a", 2, tools="mistral")
    assert agreed_parsers([new, old]) == agreed_parsers([old, new])
    assert agreed_parsers([new, old]) == (
        ParserNames("", "hermes"),
        {ParserNames("", "hermes"), ParserNames("", "mistral")},
    )
    assert agreed_parsers([worker("p", 0, "prefill", tools="x"), new])[0] == ParserNames("", "mistral")
    assert agreed_parsers([worker("a", 1, tools="from_the_future", reasoning="qwen3")])[0] == ParserNames("qwen3")
    assert agreed_parsers([]) == (ParserNames(), frozenset())


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("{{ messages[0].content }}", "", ""),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss", "gpt_oss"),
        ("<think></think><tool_call>{\"name\": <function-name>, \"arguments\": 1}</tool_call>", "basic", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>\n</tool_call> arguments", "", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>k</arg_key></think></tool_call>", "basic", "glm45"),
        ("<｜tool▁calls▁begin｜>\n```json\n</think>", "basic", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜></think>", "basic", "deepseek_v3_1"),
        ("[TOOL_CALLS][THINK]x[/THINK]", "mistral", "mistral"),
        ("<|tool_calls_section_begin|>", "", "kimi_k2"),
        ("<|start_header_id|>{\"name\": f, \"parameters\": dictionary of argument name}", "", "llama3_json"),
        ("<function=example_function_name>{{ json }}</function>", "", ""),
    ],
)  # fmt: skip
def test_formats_are_detected_from_a_template(template: str, reasoning: str, tools: str) -> None:
    assert detection.reasoning_parser("auto", template) == reasoning
    assert detection.tool_call_parser("auto", template) == tools
    assert detection.reasoning_parser("none", template) == detection.tool_call_parser("none", template) == ""
    assert detection.tool_call_parser("mistral", template) == "mistral"


def test_formats_of_the_bundled_models_are_detected() -> None:
    found = {}
    for name in modeldir.BUNDLED:
        template = modeldir.load(modeldir.MODELS / name).template
        assert template is not None
        source = template.source
        found[name] = (
            detection.reasoning_parser("auto", source),
            detection.tool_call_parser("auto", source),
        )
    assert found == {"demo": ("basic", "hermes"), "demo-vision": ("basic", "hermes"), "tiny": ("", "hermes")}


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("{'a': True, 'b': None, 'c': [1, 'x']}", {"a": True, "b": None, "c": [1, "x"]}),
        ("['it\\'s', False]", ["it's", False]),
        ('{"a": true}', {"a": True}),
        ("{'a': open('/etc/passwd')}", "{'a': open('/etc/passwd')}"),
        ("{not python}", "{not python}"),
        ("[" * 3_000, "[" * 3_000),
        ("{'a': {1, 2}}", {"a": [1, 2]}),
    ],
)
@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    ],
)
def test_objects_in_pythons_spelling_are_objects(tools: str, call: str, value: str, meant: Any) -> None:
    request = GenerateRequest("r-1", "m", "g", b"", Stop(9), 0, 0, parsing=Parsing(tools=tools))
    calls = message_of(parser_for(request, 0).parse(call.replace("{}", value))).tool_calls
    assert calls
    arguments = json.loads(calls[0].function.arguments)
    assert arguments == {"p": meant}
