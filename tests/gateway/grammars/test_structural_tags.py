"""Structural tags as grammars: which texts they allow."""

from typing import Any

import pytest

from penstock.gateway.grammars.answers import MOST_PARTS, BadTag, write_tags
from penstock.gateway.grammars.writer import MAX_BYTES, CannotExpress, GrammarWriter, LargeGrammar
from penstock.infra.constraints.constraint_grammar import LARK
from penstock.schemas.requests import Constraint, Stop
from tests.gateway.grammars.test_calls import COMPILER, MODEL

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def structure(begin: str, schema: dict[str, Any], end: str = "</function>") -> dict[str, Any]:
    return {"begin": begin, "schema": schema, "end": end}


def allows(tag: dict[str, Any], text: str) -> bool:
    added = MODEL.added_tokens
    writer = GrammarWriter(added.get, list(added))
    grammar = writer.text(write_tags(writer, tag))
    matcher = COMPILER.matcher(Constraint(LARK, grammar), 0, Stop(10)).matcher
    tokens = MODEL.tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


FUNCTIONS = {
    "structures": [structure("<function=get>", NUMBER), structure("<function=put>", {"type": "object"})],
    "triggers": ["<function="],
}
MARKS = {"structures": [structure("<tool_call>", NUMBER, "</tool_call>")], "triggers": ["<tool_call>"]}


@pytest.mark.parametrize(
    ("tag", "text", "allowed"),
    [
        (FUNCTIONS, "", True),
        (FUNCTIONS, "no call <b>", True),
        (FUNCTIONS, 'x <function=get>{"a": 1}</function> y <function=put>{}</function> z', True),
        (FUNCTIONS, '<function=get>{"b": 1}</function>', False),
        (FUNCTIONS, "<function=other>", False),
        (MARKS, 'x<tool_call>{"a": 1}</tool_call>', True),  # tokens of their own in this vocabulary
        (MARKS, "x<tool_call>[]</tool_call>", False),
    ],
)
def test_text_is_free_until_a_trigger(tag: dict[str, Any], text: str, allowed: bool) -> None:
    assert allows(tag, text) is allowed


def tags(kind: str, **more: Any) -> dict[str, Any]:
    listed = [{"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</n>"}]
    return {"format": {"type": kind, "tags": listed, **more}}


def within(content: dict[str, Any], end: Any = "</a>") -> dict[str, Any]:
    return {"format": {"type": "tag", "begin": "<a>", "content": content, "end": end}}


DIGITS = {"type": "const_string", "value": "1"}
TEXT = {"type": "any_text"}
ONE = tags("tag")["format"]["tags"][0] | {"type": "tag"}
OTHER = {"type": "tag", "begin": "<m>", "content": TEXT, "end": "</m>"}
MARK = {"type": "const_string", "value": "<tool_call>"}


def then(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "sequence", "elements": [*elements]}}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}


def maybe(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "optional", "content": content}


WORDS = {
    "type": "sequence",
    "elements": [{"type": "const_string", "value": "A"}, {"type": "any_text", "excludes": ["<b>"]}],
}
SEQUENCE = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "A: "},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]+/x"},
                    {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": ["</a>", "</b>"]},
                ],
            },
        ],
    }
}


@pytest.mark.parametrize(
    ("tag", "text", "allowed"),
    [
        (SEQUENCE, "A: 12/x", True),
        (SEQUENCE, "A: <a>any <b></a>", True),
        (SEQUENCE, "A: <a>any</b>", True),
        (SEQUENCE, "A: x", False),
        (tags("tags_with_separator", separator=", "), "", True),
        (tags("tags_with_separator", separator=", "), "<n>1</n>, <n>2</n>", True),
        (tags("tags_with_separator", separator=", "), "<n>1</n><n>2</n>", False),
        (tags("tags_with_separator", separator=", ", at_least_one=True), "", False),
        (tags("tags_with_separator", separator=", ", stop_after_first=True), "<n>1</n>, <n>2</n>", False),
        (tags("triggered_tags", triggers=["<n"], at_least_one=True), "text", False),
        (tags("triggered_tags", triggers=["<n"], at_least_one=True), "text <n>1</n>", False),
        (tags("triggered_tags", triggers=["<n"], at_least_one=True), "<n>1</n> text <n>2</n> text", True),
        (tags("triggered_tags", triggers=["<n"], at_least_one=True, stop_after_first=True), "<n>1</n>", True),
        (tags("triggered_tags", triggers=["<n"], excludes=["no"]), "yes <n>1</n> yes", True),
        (tags("triggered_tags", triggers=["<n"], excludes=["no"]), "no <n>1</n>", False),
        (tags("triggered_tags", triggers=["<n"], excludes=["no"]), "<n>1</n> no", False),
        (within(tags("triggered_tags", triggers=["<n"])["format"]), "<a>x <n>1</n> y</a>", True),
        (within(tags("triggered_tags", triggers=["<n"])["format"]), "<a>x</a> y</a>", False),
        (within(WORDS), "<a>A x</a>", True),
        (within(WORDS), "<a>A <b>x</a>", False),
        (within({"type": "or", "elements": [WORDS, {"type": "const_string", "value": "B"}]}), "<a>B</a>", True),
        (within({"type": "or", "elements": [WORDS, {"type": "const_string", "value": "B"}]}), "<a>A x</a>", True),
        (within({"type": "any_text", "excludes": ["<b>", "</tool_call>"]}, "</tool_call>"), "<a>x</tool_call>", True),
        (within({"type": "any_text", "excludes": ["<b>"]}, "</tool_call>"), "<a>x<b></tool_call>", False),
        (within({"type": "any_text", "excludes": ["<b>"]}, "; </tool_call>"), "<a>x; </tool_call>", True),
        (within({"type": "any_text", "excludes": ["<b>"]}, "; </tool_call>"), "<a><b>; </tool_call>", False),
        ({"format": {"type": "any_text", "excludes": ["<b>"]}}, "x <b>", False),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, DIGITS, DIGITS]}}, "any 11", True),
        ({"format": {"type": "optional", "content": DIGITS}}, "", True),
        ({"format": {"type": "plus", "content": DIGITS}}, "", False),
        ({"format": {"type": "plus", "content": DIGITS}}, "11", True),
        ({"format": {"type": "star", "content": DIGITS}}, "", True),
        ({"format": {"type": "repeat", "min": 1, "max": 2, "content": DIGITS}}, "11", True),
        ({"format": {"type": "repeat", "min": 1, "max": 2, "content": DIGITS}}, "111", False),
        ({"format": {"type": "repeat", "min": 2, "max": -1, "content": DIGITS}}, "111", True),
        ({"format": {"type": "repeat", "min": 2, "max": -1, "content": DIGITS}}, "1", False),
        (tags("triggered_tags", triggers=["<n"], stop_after_first=True), "text <n>1</n> text", False),
        (then(TEXT, ONE), "text <n>1</n>", True),
        (then(TEXT, ONE), "text <n>x", False),
        (then(TEXT, ONE, DIGITS), "text <n>1</n>1", True),
        (within(then(TEXT, ONE)["format"]), "<a>text <n>1</n></a>", True),
        (then(TEXT, either(ONE, OTHER)), "text <m>1</m>", True),
        (then(TEXT, either(ONE, OTHER)), "text <n>x", False),
        (then(TEXT, maybe(ONE), DIGITS), "text 1", True),
        (then(TEXT, maybe(ONE), DIGITS), "text <n>1</n>1", True),
        (then(TEXT, maybe(ONE), DIGITS), "text <n>1</n>", False),
        (then(TEXT, then(ONE, TEXT)["format"], DIGITS), "text <n>1</n> 1", True),
        (within(maybe(TEXT)), "<a>x</a>", True),
        (within(maybe(TEXT)), "<a>x</a>y</a>", False),
        (within(tags("triggered_tags", triggers=["<"])["format"]), "<a>x <n>1</n> y</a>", True),
        (within(tags("triggered_tags", triggers=["<"])["format"]), "<a>x <m></a>", False),
        ({"format": MARK}, "<tool_call>", True),
        (then(MARK, DIGITS), "<tool_call>1", True),
        (tags("tags_with_separator", separator="<tool_call>"), "<n>1</n><tool_call><n>2</n>", True),
        ({"format": {"type": "repeat", "min": 0, "max": 0, "content": DIGITS}}, "", True),
        ({"format": {"type": "regex", "pattern": r"a\\/b\/"}}, r"a\/b/", True),
    ],
)
def test_formats_are_trees(tag: dict[str, Any], text: str, allowed: bool) -> None:
    assert allows(tag, text) is allowed


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({}, "structures"),
        ({"structures": [], "triggers": ["x"]}, "empty"),
        ({"structures": [structure("<a>", {})], "triggers": ["<b"]}, "no tag begins"),
        ({"structures": [structure("<a>", {}), structure("b", {})], "triggers": ["<a"]}, "none of the triggers"),
        ({"structures": [structure("<a>", {})], "triggers": [""]}, "triggers"),
        ({"format": {"type": "or", "elements": ["x"]}}, "object"),
        ({"format": {"type": "any_text", "excludes": "x"}}, "excludes must be"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": {"type": "any_text"}}}, "min and max"),
        ({"format": {"type": "repeat", "max": 1, "content": {"type": "any_text"}}}, "min is missing"),
        ({"format": {"type": "tag", "begin": "<a>", "end": 3, "content": {}}}, "end"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}] * (MOST_PARTS + 1)}}, str(MOST_PARTS)),
    ],
)
def test_a_tag_of_another_form_is_refused(tag: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTag, match=says):
        write_tags(GrammarWriter(lambda mark: None), tag)


@pytest.mark.parametrize(
    "tag",
    [
        within(either(*[TEXT] * 100), ["b"] * 100),
        tags("triggered_tags", triggers=["<n"] * 600),
        {"format": {"type": "triggered_tags", "triggers": ["<n"] * 100, "tags": [ONE] * 100}},
        within(TEXT | {"excludes": ["b"] * 500}, ["b"] * 500),
    ],
)
def test_a_small_tag_becomes_no_large_grammar(tag: dict[str, Any]) -> None:
    writer = GrammarWriter(lambda mark: None)
    with pytest.raises((BadTag, LargeGrammar), match=f"{MOST_PARTS}|{MAX_BYTES}"):
        write_tags(writer, tag)
    assert len(writer.text("")) < 2 * MAX_BYTES


def test_text_whose_end_cannot_be_seen_is_refused() -> None:
    for following in ({"type": "regex", "pattern": "[0-9]+"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(CannotExpress, match="put a const_string or a tag"):
            write_tags(GrammarWriter(lambda mark: None), then(TEXT, following))


def test_a_kind_that_is_not_supported_is_named() -> None:
    with pytest.raises(CannotExpress, match="qwen_xml_parameter"):
        write_tags(GrammarWriter(lambda mark: None), {"format": {"type": "qwen_xml_parameter"}})
    with pytest.raises(CannotExpress, match="style 'glm_xml'"):
        write_tags(GrammarWriter(lambda mark: None), {"format": {"type": "json_schema", "style": "glm_xml"}})
