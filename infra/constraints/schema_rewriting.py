"""Rewrites JSON schemas into the keywords that llguidance supports, and tells which types a schema allows. Pure.

Every value that the result allows is a value of the schema. The result may allow less: what an array ``contains`` comes
first, an array with ``maxContains`` has no more items than that, an object with ``minProperties`` has that many of its
declared ones, and numbers end where the compiler's do.
"""

import itertools
import math
import re
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Schema = dict[str, Any]

TEXT = "string"
ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))
_DEPTH = 32  # nested references and combinations
_ASIDE = ("title", "description", "default", "examples", "$comment", "deprecated", "$defs", "definitions")


class RootSchema:
    """A whole schema, to resolve the references in its parts. Each is followed once, however often it is asked for."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.kinds: dict[str, frozenset[str]] = {}  # by reference
        self.texts: dict[str, list[Schema] | None] = {}  # by reference; None: it leads to itself


def kinds(schema: Any, document: RootSchema, depth: int = _DEPTH) -> frozenset[str]:
    """The types that a value may have. Integers count as numbers. An unclear schema allows all types.

    Args:
        schema: a part of the document.
    """
    if not isinstance(schema, dict) or depth <= 0:
        return ALL
    found = ALL
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in document.kinds:
            document.kinds[reference] = ALL  # where it leads to itself
            document.kinds[reference] = kinds(resolved(reference, document.root), document, depth - 1)
        found &= document.kinds[reference]
    if isinstance(given := schema.get("type"), str | list):
        named = [given] if isinstance(given, str) else given
        found &= {"number" if each == "integer" else each for each in named if isinstance(each, str)}
    if "const" in schema:
        found &= {_kind(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        found &= {_kind(each) for each in values}
    for part in _list(schema, "allOf"):
        found &= kinds(part, document, depth - 1)
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            found &= frozenset[str]().union(*(kinds(part, document, depth - 1) for part in parts))
    return found


def texts(schema: Any, document: RootSchema, depth: int = _DEPTH) -> list[Schema]:
    """A schema of text or null as a list of alternatives without references and combinations.

    Raises:
        ValueError: it is nested too deeply, or some of its parts cannot be merged.
    """
    if not isinstance(schema, dict):
        return [{}]
    if depth <= 0:
        raise ValueError("its references are too deep")
    found: list[Schema] = [{key: value for key, value in schema.items() if key not in _REFERRING + _ASIDE}]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in document.texts:
            document.texts[reference] = None
            document.texts[reference] = texts(resolved(reference, document.root), document, depth - 1)
        if (named := document.texts[reference]) is None:
            raise ValueError("its references are too deep")
        found = _each_with(found, named)
    for part in _list(schema, "allOf"):
        found = _each_with(found, texts(part, document, depth - 1))
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            others: list[Schema] = []
            for part in parts:
                others += texts(part, document, depth - 1)
                if len(others) > _MOST:
                    break
            found = _each_with(found, others)
    return found


def _each_with(found: list[Schema], others: list[Schema]) -> list[Schema]:
    """The schemas of values that one of each list allow."""
    if len(found) * len(others) > _MOST:
        raise ValueError("it has too many alternatives")
    return [_both(each, other) for each in found for other in others]


_REFERRING = ("$ref", "allOf", "anyOf", "oneOf")
_MOST = 256


def resolved(reference: str, root: Any) -> Any:
    """The schema that a reference within a document names. Empty if there is none."""
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
    """A schema of the values that both schemas allow."""
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


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "then", "else")
_MAY_BE_NULL = ("const", "default", "enum", "examples")  # null in other keywords means that they are absent
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
           "maxContains")  # fmt: skip
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)  # the formats that llguidance enforces; JSON schema allows to treat others as annotations
_LARGEST = 2**63 - 1024  # bound that llguidance compiles, as a float; -_LARGEST is the lowest
_MOST_CHOICES = 64  # of declared properties
_MOST_COPIES = 32  # of what an array contains
_MOST_PARTS = 8  # of a oneOf
_MOST_STEPS = 1 << 22  # for matching patterns with names
_FEW = 8  # more repeats than this count as unbounded
_PLAIN = (parser.LITERAL, parser.NOT_LITERAL, parser.ANY, parser.IN, parser.AT)
_NO_SCHEMA = ("const", "enum", "default", "examples")
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
    """The schema in keywords that the compiler supports. What cannot be rewritten stays, and the compiler refuses it.

    Raises:
        ValueError: the compiler would accept a keyword, but not enforce it.
    """
    return _rewritten(_with_names(schema, RootSchema(schema)))


def _alike(parts: list[Any], document: RootSchema) -> bool:
    """Whether two parts may have a value of the same type."""
    found = [kinds(part, document) for part in parts]
    return sum(map(len, found)) > len(frozenset[str]().union(*found))


def _with_names(part: Any, document: RootSchema) -> Any:
    """Resolve references and combinations in ``propertyNames``, where that is possible."""
    if isinstance(part, list):
        return [_with_names(each, document) for each in part]
    if not isinstance(part, dict):
        return part
    out = {key: value if key in _NO_SCHEMA else _with_names(value, document) for key, value in part.items()}
    names = part.get("propertyNames")
    if isinstance(names, dict) and names.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
        alternatives = texts(names, document)
        if len(alternatives) == 1:
            out["propertyNames"] = alternatives[0]
        elif all(each.keys() <= {"enum", "const", "type"} and each.keys() & {"enum", "const"} for each in alternatives):
            listed = [each.get("enum", [each["const"]] if "const" in each else []) for each in alternatives]
            out["propertyNames"] = {"enum": [name for each in listed for name in each]}
    return out


def _rewritten(schema: Any, *, exact: bool = False) -> Any:
    """
    Args:
        exact: allow no less, because the compiler has to see whether parts of a ``oneOf`` exclude each other.
    """
    if not isinstance(schema, dict):
        return schema
    out = {key: value for key, value in schema.items() if value is not None or key in _MAY_BE_NULL}
    for key in _MAPS:
        if isinstance(out.get(key), dict):
            out[key] = {name: _rewritten(value, exact=exact) for name, value in out[key].items()}
    for key in _LISTS:
        if isinstance(out.get(key), list):
            within = exact or (key == "oneOf" and _alike(out[key], RootSchema({})))
            out[key] = [_rewritten(value, exact=within) for value in out[key]]
    for key in _SINGLE:
        if key in out:
            out[key] = _rewritten(out[key], exact=exact)
    for key in _COUNTS:
        if isinstance(value := out.get(key), float) and value.is_integer():
            out[key] = int(value)
    if out.get("uniqueItems") is False:
        del out["uniqueItems"]
    if isinstance(kind := out.get("format"), str) and kind not in _FORMATS:
        del out["format"]
    _bounds(out)
    _sizes(out, exact=exact)
    _exactly_one(out, schema, exact=exact)
    _conditions(out, exact=exact)
    _negations(out)
    _declared(out)
    _property_names(out)
    _dependencies(out)
    _contains(out)
    return out


_NO_TEXT = ("title", "description", "$comment", "default", "examples", "example")


def texts_of(schema: Any) -> list[str]:
    """All texts that may occur in a value: enums, constants, names of properties, and patterns."""
    found: list[str] = []
    left = [(schema, True)]  # parts to look at, and whether each is a schema
    while left:
        part, is_schema = left.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, list):
            left += [(each, is_schema) for each in part]
        elif isinstance(part, dict):
            for key, value in part.items():
                if not is_schema:
                    found.append(key)
                    left.append((value, False))
                elif key in _MAPS and isinstance(value, dict):
                    found += value
                    left += [(each, True) for each in value.values()]
                elif key not in _NO_TEXT:
                    left.append((value, key not in ("enum", "const")))
    return [*found, *(text.replace("\\", "") for text in found if "\\" in text)]


def _bounds(schema: Schema) -> None:
    """Bring bounds of numbers into the compiler's range, as those of 64-bit integers, where they allow less then."""
    for key, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        value = schema.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value * sign > _LARGEST:
            schema[key] = _LARGEST * sign


def _sizes(schema: Schema, *, exact: bool) -> None:
    """Rewrite ``minProperties`` and ``maxProperties``, which the compiler takes only where no property is optional."""
    declared, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(declared, dict) or not isinstance(required, list | tuple):
        return
    most, closed = schema.get("maxProperties"), schema.get("additionalProperties") is False
    if isinstance(most, int) and most >= len(declared) and closed and "patternProperties" not in schema:
        del schema["maxProperties"]
    least = schema.get("minProperties")
    if not isinstance(least, int):
        return
    needed = {*required}
    optional = [name for name in declared if name not in needed]
    more = least - len(needed)
    if (
        not optional
        or (exact and more > 0)
        or more > len(optional)
        or (more > 0 and math.comb(len(optional), more) > _MOST_CHOICES)
    ):
        return
    del schema["minProperties"]
    if more > 0:
        _also(schema, {"anyOf": [{"required": [*each]} for each in itertools.combinations(optional, more)]})


def _also(schema: Schema, *others: Any) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), *others]


def _conditions(schema: Schema, *, exact: bool) -> None:
    """Rewrite ``if`` with ``then`` and ``else``. Alone, they mean nothing and are removed."""
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
        return
    condition, opposite = _rewritten(schema["if"], exact=exact), negated(schema["if"])
    if opposite is None:
        return
    del schema["if"]
    then, otherwise = schema.pop("then", True), schema.pop("else", True)
    _also(schema, {"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]})


def _exactly_one(schema: Schema, original: Schema, *, exact: bool) -> None:
    """Rewrite ``oneOf`` as each part without the others, if those can be negated. Else it is left to the compiler."""
    parts = original.get("oneOf")
    if not isinstance(parts, list) or not 1 < len(parts) <= _MOST_PARTS:
        return
    opposites = [negated(part) for part in parts]
    if None in opposites:
        return
    del schema["oneOf"]
    alone = [
        {"allOf": [_rewritten(part, exact=exact), *(each for other, each in enumerate(opposites) if other != number)]}
        for number, part in enumerate(parts)
    ]
    _also(schema, {"anyOf": alone})


def _negations(schema: Schema) -> None:
    if "not" in schema and (opposite := negated(schema["not"])) is not None:
        del schema["not"]
        _also(schema, opposite)


def negated(schema: Any) -> Any:
    """A schema of (nearly) all values that another schema excludes. None if the keywords cannot express it.

    Args:
        schema: not rewritten yet.
    """
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
        # Numbers that are not integers are left out, because no keyword describes them.
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
        return _rewritten(value, exact=True)
    if key == "const" and isinstance(value, bool):
        return {"anyOf": [{"const": not value}, {"type": [kind for kind in _TYPES if kind != "boolean"]}]}
    if key in ("anyOf", "allOf"):
        parts = [negated(each) for each in value]
        return None if None in parts else {"allOf" if key == "anyOf" else "anyOf": parts}
    return None


def _property_names(schema: Schema) -> None:
    names = schema.get("propertyNames")
    if names is None or "patternProperties" in schema:
        return
    values, declared = schema.get("additionalProperties", True), schema.get("properties")
    declared = declared if isinstance(declared, dict) else {}
    if names is True or names == {}:
        del schema["propertyNames"]
    elif names is False:
        schema.pop("propertyNames")
        schema["properties"] = dict.fromkeys(declared, False)
        schema["additionalProperties"] = False
    elif isinstance(names, dict) and names.keys() <= {"enum", "const", "type"} and names.keys() & {"enum", "const"}:
        allowed = [names["const"]] if "const" in names else names["enum"]
        del schema["propertyNames"]
        others = {name: values for name in allowed if isinstance(name, str)}
        kept = {name: value if name in others else False for name, value in declared.items()}
        schema["properties"] = kept | {name: value for name, value in others.items() if name not in kept}
        schema["additionalProperties"] = False
    elif isinstance(names, dict) and names.keys() <= {"pattern", "minLength", "maxLength", "type"}:
        lengths = f"^(.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        if "pattern" in names and names.keys() & {"minLength", "maxLength"}:
            return
        least, most = names.get("minLength", 0), names.get("maxLength", 1 << 31)
        kept = {}
        for name, value in declared.items():
            fits = matches(names["pattern"], name) if "pattern" in names else least <= len(name) <= most
            if fits is None:
                return
            kept[name] = value if fits else False
        del schema["propertyNames"]
        if kept:
            schema["properties"] = kept
        schema["patternProperties"] = {names.get("pattern", lengths): values}
        schema["additionalProperties"] = False


def _declared(schema: Schema) -> None:
    """Apply ``patternProperties`` to declared properties as well, which the compiler would not do."""
    declared, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(declared, dict) or not isinstance(patterns, dict):
        return
    if sum(len(name) ** 2 for name in declared) * len(patterns) > _MOST_STEPS:
        raise ValueError("patternProperties with that many properties are not supported")
    for pattern, value in patterns.items():
        for name in declared:
            found = matches(pattern, name)
            if found is None:
                raise ValueError(
                    f"patternProperties {pattern[:80]!r} beside properties is not supported: use a pattern without "
                    "groups and alternatives, and with one * or + at most"
                )
            if found and value is not True and value != {}:
                declared[name] = value if declared[name] in (True, {}) else {"allOf": [declared[name], value]}


def matches(pattern: str, text: str) -> bool | None:
    """Whether a regular expression occurs in a text. None if that could take long to find out."""
    try:
        parts = list(parser.parse(pattern))
        repeats = [item for item in parts if item[0] in (parser.MAX_REPEAT, parser.MIN_REPEAT)]
        items = [item for item in parts if item not in repeats] + [each for one in repeats for each in one[1][2]]
        unbounded = sum(one[1][1] > _FEW for one in repeats)
        if unbounded > 1 or len(repeats) > _FEW or any(item[0] not in _PLAIN for item in items):
            return None
        return re.search(pattern, text) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def _dependencies(schema: Schema) -> None:
    """Rewrite ``dependentRequired``: an object lacks the property, or has all that it needs."""
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
