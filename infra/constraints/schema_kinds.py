"""Which values a JSON schema describes, as far as a format without quotes must know: text, or something else. Pure."""

from typing import Any

Schema = dict[str, Any]

TEXT = "string"
ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))
_DEPTH = 32  # of references and combinations
_OF_TEXTS = ("enum", "const", "minLength", "maxLength", "pattern", "format")
_ASIDE = ("title", "description", "default", "examples", "$comment", "deprecated", "$defs", "definitions")


def kinds(schema: Any, root: Any, depth: int = _DEPTH) -> frozenset[str]:
    """The types that a value may have. Integers are numbers. What cannot be told may be anything.

    Args:
        root: of the document, for references.
    """
    if not isinstance(schema, dict) or depth <= 0:
        return ALL
    found = ALL
    if isinstance(reference := schema.get("$ref"), str):
        found &= kinds(resolved(reference, root), root, depth - 1)
    if isinstance(given := schema.get("type"), str | list):
        named = [given] if isinstance(given, str) else given
        found &= {"number" if each == "integer" else each for each in named if isinstance(each, str)}
    if "const" in schema:
        found &= {_kind(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        found &= {_kind(each) for each in values}
    for part in _list(schema, "allOf"):
        found &= kinds(part, root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            found &= frozenset[str]().union(*(kinds(part, root, depth - 1) for part in parts))
    return found


def texts(schema: Any, root: Any, depth: int = _DEPTH) -> list[Schema]:
    """A schema of text or null as alternatives, each without references and combinations.

    Raises:
        ValueError: it is too deep, or has parts that cannot be said together.
    """
    if not isinstance(schema, dict):
        return [{}]
    if depth <= 0:
        raise ValueError("its references are too deep")
    found: list[Schema] = [{key: value for key, value in schema.items() if key not in _REFERRING + _ASIDE}]
    together = [resolved(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    for part in (*together, *_list(schema, "allOf")):
        found = [_both(each, other) for each in found for other in texts(part, root, depth - 1)]
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            others = [other for part in parts for other in texts(part, root, depth - 1)]
            found = [_both(each, other) for each in found for other in others]
    if len(found) > _MOST:
        raise ValueError("it has too many alternatives")
    return found


_REFERRING = ("$ref", "allOf", "anyOf", "oneOf")
_MOST = 256


def resolved(reference: str, root: Any) -> Any:
    """What a reference within a document refers to; {}: nothing."""
    if not reference.startswith("#"):
        return {}
    found = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return {}
    return found if isinstance(found, dict) else {}


def _both(one: Schema, other: Schema) -> Schema:
    """A schema of what two describe."""
    out = one | other
    if "enum" in one and "enum" in other:
        out["enum"] = [each for each in one["enum"] if each in other["enum"]]
    if "const" in one and other.get("const", one["const"]) != one["const"]:
        out["enum"] = []
    for key, choose in (("minLength", max), ("maxLength", min)):
        if key in one and key in other:
            out[key] = choose(one[key], other[key])
    for key in one.keys() & other.keys() - {"enum", "const", "minLength", "maxLength", "type"}:
        if one[key] != other[key]:
            raise ValueError(f"{key!r} twice")
    if "type" in one and "type" in other:
        first, second = ([each] if isinstance(each, str) else each for each in (one["type"], other["type"]))
        out["type"] = [each for each in first if each in second]
    return out


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return TEXT
    return "array" if isinstance(value, list) else "object"
