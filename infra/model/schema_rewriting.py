"""Rewrites JSON schemas into keywords that llguidance has. Pure.

Every value of the result is a value of the schema. Where the result allows less, it is by an order or a length: what an
array ``contains`` comes first, and one with ``maxContains`` has no more items than that.
"""

from typing import Any

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "then", "else")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
           "maxContains")  # fmt: skip
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)  # that llguidance enforces; others are annotations, as JSON schema says
_MOST_COPIES = 32  # of what an array contains
_MOST_PARTS = 8  # of a oneOf
_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


def rewritten(schema: Any) -> Any:
    """The schema without what can be said by other keywords. What cannot stays, and is refused by the compiler."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in _MAPS:
        if isinstance(out.get(key), dict):
            out[key] = {name: rewritten(value) for name, value in out[key].items()}
    for key in _LISTS:
        if isinstance(out.get(key), list):
            out[key] = [rewritten(value) for value in out[key]]
    for key in _SINGLE:
        if key in out:
            out[key] = rewritten(out[key])
    for key in _COUNTS:
        if isinstance(value := out.get(key), float) and value.is_integer():
            out[key] = int(value)
    if out.get("uniqueItems") is False:
        del out["uniqueItems"]
    if isinstance(kind := out.get("format"), str) and kind not in _FORMATS:
        del out["format"]
    _exactly_one(out, schema)
    _conditions(out)
    _negations(out)
    _property_names(out)
    _dependencies(out)
    _contains(out)
    return out


def _also(schema: Schema, *others: Any) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), *others]


def _conditions(schema: Schema) -> None:
    """``if`` with ``then`` and ``else``; without one another they mean nothing."""
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
        return
    condition, opposite = rewritten(schema["if"]), negated(schema["if"])
    if opposite is None:
        return
    del schema["if"]
    then, otherwise = schema.pop("then", True), schema.pop("else", True)
    _also(schema, {"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]})


def _exactly_one(schema: Schema, original: Schema) -> None:
    """``oneOf`` as each of its parts without the others, where that can be said. Else the compiler tells them apart."""
    parts = original.get("oneOf")
    if not isinstance(parts, list) or not 1 < len(parts) <= _MOST_PARTS:
        return
    opposites = [negated(part) for part in parts]
    if None in opposites:
        return
    del schema["oneOf"]
    alone = [
        {"allOf": [rewritten(part), *(each for other, each in enumerate(opposites) if other != number)]}
        for number, part in enumerate(parts)
    ]
    _also(schema, {"anyOf": alone})


def _negations(schema: Schema) -> None:
    if "not" in schema and (opposite := negated(schema["not"])) is not None:
        del schema["not"]
        _also(schema, opposite)


def negated(schema: Any) -> Any:
    """A schema of values that another (not rewritten) does not have, of nearly all of them; None: it cannot be said."""
    if isinstance(schema, bool) or schema == {}:
        return schema is False
    rest = {key: value for key, value in schema.items() if key not in ("title", "description", "$comment")}
    if len(rest) != 1:
        if set(rest) == {"properties", "required"} and len(rest["properties"]) == len(rest["required"]) == 1:
            parts = [negated({"properties": rest["properties"]}), negated({"required": rest["required"]})]
            return None if None in parts else {"anyOf": parts}
        return None
    [(key, value)] = rest.items()
    if key == "type":
        # Numbers that are no integers are left out: no keyword has them.
        kinds = {"number" if kind == "integer" else kind for kind in ([value] if isinstance(value, str) else value)}
        return {"type": [kind for kind in _TYPES if kind not in kinds]} if kinds < set(_TYPES) else False
    if key in _OPPOSITE:
        kind, other, offset = _OPPOSITE[key]
        return {"type": kind, other: value + offset} if value + offset >= 0 or kind == "number" else False
    if key == "required" and value:
        return {"anyOf": [{"type": "object", "properties": {name: False}} for name in value]}
    if key == "properties" and value:
        parts = [(name, negated(each)) for name, each in value.items()]
        if any(part is None for _, part in parts):
            return None
        return {"anyOf": [{"type": "object", "required": [n], "properties": {n: part}} for n, part in parts]}
    if key == "not":
        return rewritten(value)
    if key == "const" and isinstance(value, bool):
        return {"anyOf": [{"const": not value}, {"type": [kind for kind in _TYPES if kind != "boolean"]}]}
    if key in ("anyOf", "allOf"):
        parts = [negated(each) for each in value]
        return None if None in parts else {"allOf" if key == "anyOf" else "anyOf": parts}
    return None


def _property_names(schema: Schema) -> None:
    names = schema.get("propertyNames")
    if names is None or schema.keys() & {"properties", "patternProperties"}:
        return
    values = schema.get("additionalProperties", True)
    if names is True or names == {}:
        del schema["propertyNames"]
    elif names is False:
        schema.pop("propertyNames")
        schema["additionalProperties"] = False
    elif isinstance(names, dict) and names.keys() <= {"enum", "const", "type"} and names.keys() & {"enum", "const"}:
        allowed = [names["const"]] if "const" in names else names["enum"]
        del schema["propertyNames"]
        schema["properties"] = {name: values for name in allowed if isinstance(name, str)}
        schema["additionalProperties"] = False
    elif isinstance(names, dict) and names.keys() <= {"pattern", "minLength", "maxLength", "type"}:
        lengths = f"^(.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        if "pattern" in names and names.keys() & {"minLength", "maxLength"}:
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {names.get("pattern", lengths): values}
        schema["additionalProperties"] = False


def _dependencies(schema: Schema) -> None:
    """``dependentRequired``: without the one property, or with all of the others."""
    needs = schema.get("dependentRequired")
    if not isinstance(needs, dict) or len(needs) > 8:
        return
    del schema["dependentRequired"]
    for name, others in needs.items():
        if others:
            with_all = {"type": "object", "required": [name, *others]}
            other_kinds = {"type": [kind for kind in _TYPES if kind != "object"]}
            without = {"type": "object", "properties": {name: False}}
            _also(schema, {"anyOf": [without, with_all, other_kinds]})


def _contains(schema: Schema) -> None:
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if "prefixItems" in schema or not isinstance(least, int) or least > _MOST_COPIES:
        return
    wanted, items = schema.pop("contains"), schema.get("items", True)
    schema.pop("minContains", None)
    schema.pop("maxContains", None)
    if most is not None:
        schema["maxItems"] = min(most, schema.get("maxItems", most))
    if least:
        first = wanted if items is True else {"allOf": [wanted, items]}
        schema["prefixItems"] = [first] * least
        schema["minItems"] = max(least, schema.get("minItems", 0))
