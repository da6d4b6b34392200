from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.model.schema_rewriting import negated, rewritten
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
    ],
)
def test_what_means_nothing_is_left_out_and_values_are_not_touched(schema: Any, plain: Any) -> None:
    assert rewritten(schema) == plain
