from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.constraints.schema_rewriting import negated, rewritten, texts_of
from tests.properties import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats(-3, 12, width=16) | st.text("abfox1", max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abf"), inner, max_size=3),
    max_leaves=6,
)
PARTS: tuple[Any, ...] = (
    {"type": "integer"},
    {"type": ["string", "null"]},
    {"minimum": 5},
    {"exclusiveMaximum": 2},
    {"maxLength": 2},
    {"minItems": 2},
    {"required": ["a"]},
    {"properties": {"a": {"type": "string"}}},
    {"properties": {"a": {"const": True}}, "required": ["a"]},
    {"const": True},
    {"not": {"type": "string"}},
    {"anyOf": [{"type": "null"}, {"minimum": 3}]},
    True,
    False,
)
PART = st.sampled_from(PARTS)
SCHEMAS = st.one_of(
    PART,
    st.builds(lambda a: {"not": a}, PART),
    st.builds(lambda a: {"not": {"not": a}}, PART),
    st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, PART, PART, PART),
    st.builds(lambda a, b: {"if": a, "then": b}, PART, PART),
    st.builds(lambda a, b: {"oneOf": [a, b]}, PART, PART),
    st.builds(lambda a, n, m: {"contains": a, "minContains": n, "maxContains": m}, PART, st.integers(0, 2), st.just(3)),
    st.builds(lambda a: {"contains": a, "items": {"type": "integer"}}, PART),
    st.builds(lambda a: {"not": {"contains": a}}, PART),
    st.just({"dependentRequired": {"a": ["b"], "f": []}}),
    st.just({"propertyNames": {"pattern": "f"}, "additionalProperties": {"type": "integer"}}),
    st.just({"propertyNames": {"maxLength": 0}}),
    st.just({"propertyNames": {"enum": ["a"]}}),
    st.just({"properties": {"a": {"not": {"type": "integer"}}}, "minProperties": 1.0}),
    st.builds(
        lambda least, most, required, extra: {
            "properties": {"a": True, "b": {"type": "integer"}},
            "minProperties": least,
            "maxProperties": most,
            "required": required,
            "additionalProperties": extra,
        },
        st.integers(0, 4),
        st.integers(0, 3),
        st.lists(st.sampled_from("abf"), max_size=2),
        st.booleans(),
    ),
)


@examples(400)
@given(SCHEMAS, VALUES)
def test_a_value_of_the_rewritten_schema_is_one_of_the_schema(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(rewritten(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


@examples(400)
@given(SCHEMAS, VALUES)
def test_no_value_is_in_a_schema_and_in_its_negation(schema: Any, value: Any) -> None:
    opposite = negated(schema)
    if opposite is not None and jsonschema.Draft202012Validator(opposite).is_valid(value):
        assert not jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"if": {"type": "string"}}, {}),
        ({"then": False, "type": "string"}, {"type": "string"}),
        ({"minContains": 2}, {}),
        ({"maxLength": 2.0}, {"maxLength": 2}),
        ({"uniqueItems": False}, {}),
        ({"format": "iri"}, {}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"const": {"if": {}}}, {"const": {"if": {}}}),
        ({"properties": {"if": {"then": 1}}}, {"properties": {"if": {}}}),
        (
            {"properties": {"a": {}}, "required": ["b"], "minProperties": 1},
            {"properties": {"a": {}}, "required": ["b"]},
        ),
        ({"maximum": 2**70, "minimum": 2**70}, {"maximum": 2**63 - 1024, "minimum": 2**70}),
    ],
)
def test_what_means_nothing_is_left_out_and_values_are_not_touched(schema: Any, plain: Any) -> None:
    assert rewritten(schema) == plain


@pytest.mark.parametrize(
    ("schema", "rewritten_to"),
    [
        (
            {"properties": {"foo": {"type": "integer"}}, "patternProperties": {"^f": {"minimum": 3}}},
            {"foo": {"allOf": [{"type": "integer"}, {"minimum": 3}]}},
        ),
        ({"properties": {"foo": True}, "patternProperties": {"o$": {"type": "null"}}}, {"foo": {"type": "null"}}),
        ({"properties": {"bar": {}}, "patternProperties": {"^[f-z]+$": {"type": "null"}}}, {"bar": {}}),
        ({"properties": {"a": {}, "bc": {}}, "propertyNames": {"maxLength": 1}}, {"a": {}, "bc": False}),
        (
            {"properties": {"a": {}}, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a", "b"]}}},
            {"a": {}, "b": True},
        ),
    ],
)
def test_patterns_and_names_hold_for_declared_properties(schema: Any, rewritten_to: Any) -> None:
    assert rewritten({"type": "object", **schema})["properties"] == rewritten_to


@pytest.mark.parametrize(
    "names",
    [
        {"$ref": "#/$defs/n"},
        {"allOf": [{"$ref": "#/$defs/n"}]},
        {"anyOf": [{"const": "a1"}, {"const": "a2"}]},
    ],
)
def test_names_of_properties_may_be_behind_references_and_combinations(names: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "$defs": {"n": {"pattern": "^a[12]$"}}}
    found = rewritten(schema)
    assert "propertyNames" not in found
    for value, valid in (({"a1": 1}, True), ({"b": 1}, False)):
        assert jsonschema.Draft202012Validator(found).is_valid(value) is valid


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(foo|bar)", "a*b*c*", r"(a)\1", "["])
def test_a_pattern_that_may_take_long_to_match_is_refused_beside_properties(pattern: str) -> None:
    with pytest.raises(ValueError, match="patternProperties"):
        rewritten({"properties": {"a" * 40 + "!": {}}, "patternProperties": {pattern: {"type": "null"}}})


def test_keywords_with_null_say_nothing() -> None:
    assert rewritten({"type": "object", "required": None, "const": None}) == {"type": "object", "const": None}


def test_only_what_a_value_may_have_in_it_is_a_text_of_a_schema() -> None:
    schema = {
        "title": "T", "description": "<think>", "properties": {"title": {"enum": ["<a>"], "default": "<b>"}},
        "patternProperties": {r"\<c\>": {"const": {"description": "<d>"}}},
    }  # fmt: skip
    found = texts_of(schema)
    assert {"title", "<a>", "<c>", "description", "<d>"} <= set(found)
    assert not {"T", "<think>", "<b>"} & set(found)
