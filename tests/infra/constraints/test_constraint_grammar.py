"""Constraints as grammars of llguidance, in both forms."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import is_lark_syntax

from penstock.infra.constraints import constraint_grammar
from penstock.infra.constraints.constraint_grammar import CHOICE, GRAMMAR, JSON_SCHEMA, LARK, REGEX, ConstraintError
from penstock.infra.constraints.llguidance_releases import vocabulary
from penstock.infra.model import modeldir
from penstock.schemas.requests import Constraint

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}
CONSTRAINTS = {
    "schema": Constraint(JSON_SCHEMA, json.dumps(PERSON)),
    "any value": Constraint(JSON_SCHEMA, "true"),
    "expression": Constraint(REGEX, r'(a/b|"c\n)+\d{2,4}'),
    "texts": Constraint(CHOICE, json.dumps(["yes", 'no "really"', "a/b", "start: x"])),
    "Lark": Constraint(GRAMMAR, 'start: WORD ("," WORD)*\nWORD: /[a-z]{1,5}/'),
    "GBNF": Constraint(GRAMMAR, 'root ::= "x" [0-9]+ ("." [0-9]+)?'),
    "the gateway's": Constraint(LARK, 'start: "<call>" %json {"type": "integer"} "</call>"'),
    "around Lark": Constraint(
        LARK, constraint_grammar.around('start: "@answer: " @answer "}"', 'start: "{" X\nX: /[a-f]{2}/')
    ),
    "around GBNF": Constraint(LARK, constraint_grammar.around('start: "[" @answer "]"', 'root ::= "y" | "n"')),
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    model = modeldir.load(modeldir.DEMO)
    return vocabulary(model.tokenizer.to_str(), model.eos_token_ids, model.vocab_size).tokenizer


def allowed(matcher: LLMatcher) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(matcher.compute_bitmask()) for bit in range(8) if byte >> bit & 1]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_single_grammar_allows_the_same_tokens_at_every_step(name: str, tokenizer: LLTokenizer) -> None:
    constraint = CONSTRAINTS[name]
    lark = constraint_grammar.as_lark(constraint)
    assert is_lark_syntax(lark)
    for seed in range(4):
        draw = random.Random(seed)
        one = constraint_grammar.compiled(constraint, tokenizer)
        other = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not other.get_error()
        for _ in range(24):
            tokens = allowed(one)
            assert allowed(other) == tokens
            if one.is_stopped():
                break
            token = draw.choice(tokens)
            assert one.consume_token(token)
            assert other.consume_token(token)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unknown", "x"),
        (CHOICE, "[]"),
        (GRAMMAR, "neither of them"),
        (JSON_SCHEMA, "{"),
        (LARK, constraint_grammar.around("start: @answer", "neither of them")),
    ],
)
def test_what_is_no_constraint_has_no_grammar(kind: str, text: str) -> None:
    with pytest.raises(ConstraintError):
        constraint_grammar.as_lark(Constraint(kind, text))
    with pytest.raises(ConstraintError):
        constraint_grammar.grammar(Constraint(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (GRAMMAR, 'root ::= "a" gone', "'gone' not found"),
        (GRAMMAR, 'x ::= "a"', "No 'root' rule"),
        (GRAMMAR, "root ::= " + "(" * 5_000, "nested too deeply"),
        (GRAMMAR, "", "root"),
        (LARK, constraint_grammar.around("start: @answer", 'root ::= "a" gone'), "'gone' not found"),
        (LARK, constraint_grammar.around("start: @answer", 'x ::= "a"'), "No 'root' rule"),
        (LARK, "{}", "KeyError"),
        (JSON_SCHEMA, '{"not": {"minimum": "x"}}', "TypeError"),
    ],
)
@pytest.mark.parametrize("form", [constraint_grammar.check, constraint_grammar.as_lark])
def test_whatever_the_library_raises_is_an_error_about_the_constraint(
    form: Any, kind: str, text: str, says: str
) -> None:
    with pytest.raises(ConstraintError, match=says):
        form(Constraint(kind, text))


NARROW = (  # a value of both, without what the compiler sees that they exclude each other by
    {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1},
    {"type": "object", "properties": {"a": {"type": "string"}, "e": {}}, "required": ["e"]},
)


def test_what_is_allowed_less_excludes_nothing_in_a_one_of() -> None:
    within = {"oneOf": [{"properties": {"x": each}, "required": ["x"]} for each in NARROW]}
    for schema in ({"oneOf": [*NARROW]}, within):
        with pytest.raises(ConstraintError, match="oneOf"):
            accepts(schema, {"e": 1, "b": 2})
    assert accepts({"oneOf": [NARROW[0], {"type": "null"}]}, {"a": 1})


def accepts(schema: Any, value: Any) -> bool:
    matcher = constraint_grammar.compiled(
        Constraint(JSON_SCHEMA, json.dumps(schema)), constraint_grammar.byte_tokenizer(0, ())
    )
    return matcher.try_consume_tokens(text := [*json.dumps(value).encode()]) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62], [2**63, 0.5]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.7976931348623157e308}, [0.5, 2**60], [-1]),
        (
            {"properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 2, "additionalProperties": False},
            [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}, []],
            [{}, {"c": 3}],
        ),
    ],
)
def test_bounds_of_64_bits_and_numbers_of_properties_are_kept(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [accepts(schema, value) for value in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
