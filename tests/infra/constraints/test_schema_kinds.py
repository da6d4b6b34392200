"""Whether a schema describes text, which formats without quotes must know."""

from typing import Any

import pytest

from penstock.infra.constraints.schema_rewriting import ALL, RootSchema, kinds, texts

ROOT = {
    "$defs": {
        "code": {"enum": ["1", "2"]},
        "again": {"$ref": "#/$defs/code"},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"type": "integer"},
    }
}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string"}, {"string"}),
        ({"enum": ["1", "2"]}, {"string"}),
        ({"const": "5"}, {"string"}),
        ({"$ref": "#/$defs/again"}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/code"}, {"maxLength": 3}]}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, {"string", "null"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"oneOf": [{"const": "a"}, {"const": 1}]}, {"string", "number"}),
        ({"$ref": "#/$defs/a~1b"}, {"number"}),
        ({"type": ["string", "integer"], "enum": [1, 2]}, {"number"}),
    ],
)
def test_a_schema_has_the_kinds_of_its_values(schema: Any, found: set[str]) -> None:
    assert kinds(schema, RootSchema(ROOT)) == found


@pytest.mark.parametrize(
    "schema",
    [{}, True, None, {"$ref": "#/$defs/gone"}, {"$ref": "#/$defs/loop"}, {"$ref": "http://a/b"}, {"minimum": 1}],
)
def test_what_cannot_be_told_may_be_anything(schema: Any) -> None:
    assert {"string", "number", "object"} < kinds(schema, RootSchema(ROOT))


def test_references_and_combinations_of_texts_become_alternatives() -> None:
    assert texts({"$ref": "#/$defs/again", "description": "x"}, RootSchema(ROOT)) == [{"enum": ["1", "2"]}]
    both = {"allOf": [{"$ref": "#/$defs/code"}, {"enum": ["2", "3"]}, {"maxLength": 4}, {"maxLength": 2}]}
    assert texts(both, RootSchema(ROOT)) == [{"enum": ["2"], "maxLength": 2}]
    assert texts({"anyOf": [{"const": "a"}, {"type": "null"}]}, RootSchema(ROOT)) == [{"const": "a"}, {"type": "null"}]


def test_each_reference_is_followed_once() -> None:
    """Each of 30 definitions refers to the next one three times: 3^30 ways."""
    for key in ("anyOf", "allOf"):
        definitions: dict[str, Any] = {f"d{at}": {key: [{"$ref": f"#/$defs/d{at + 1}"}] * 3} for at in range(30)}
        assert kinds({"$ref": "#/$defs/d0"}, RootSchema({"$defs": definitions})) == ALL
        definitions["d8"] = {"type": "string"}
        assert kinds({"$ref": "#/$defs/d0"}, RootSchema({"$defs": definitions})) == {"string"}
    definitions["d12"] = {"enum": ["a"]}
    assert texts({"$ref": "#/$defs/d0"}, RootSchema({"$defs": definitions})) == [{"type": ["string"]}]
    with pytest.raises(ValueError, match="deep"):
        texts(
            {"$ref": "#/$defs/d9"},
            RootSchema({"$defs": definitions | {"d12": {"anyOf": [{"$ref": "#/$defs/d9"}] * 3}}}),
        )


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/loop"}, {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}])
def test_what_cannot_be_said_together_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"deep|twice"):
        texts(schema, RootSchema(ROOT))
