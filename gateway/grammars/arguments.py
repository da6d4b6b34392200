"""Arguments that are written one by one instead of as one JSON object."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.gateway.grammars.writer import ANY_TEXT, CannotExpress, GrammarWriter
from penstock.infra.constraints.constraints import quoted
from penstock.infra.constraints.llguidance_releases import ESCAPES
from penstock.infra.constraints.schema_kinds import kinds, texts

_TEXT_KEYWORDS = {"type", "enum", "const", "title", "description", "default", "examples", "minLength", "maxLength"}
_KEY = re.compile(r"[^<>\n=,()\[\]{}\"']{1,128}")


class Pieces(NamedTuple):
    """How one argument is written.

    Attributes:
        lead: from its key and the JSON type of its value to what stands before that.
        text_end: from its key to what ends a value; "": texts are JSON strings.
        typed: ``lead`` depends on the type, and texts that are not marked so are JSON strings.
        between: arguments.
    """

    lead: Callable[[str, str], str]
    text_end: Callable[[str], str] = lambda key: ""
    typed: bool = False
    between: str = ""


def by_property(writer: GrammarWriter, schema: dict[str, Any], pieces: Pieces, *, strict: bool) -> str:
    """The arguments that ``schema`` describes: its properties in their order, those that are not required at will.

    Raises:
        CannotExpress: it is strict, and has keywords beyond properties whose values are independent.
    """
    properties, needed_names = schema.get("properties") or {}, schema.get("required") or ()
    if not isinstance(properties, dict) or not isinstance(needed_names, list | tuple):
        if strict:
            raise CannotExpress("properties must be an object, and required a list")
        properties, needed_names = {}, ()
    required = {name for name in needed_names if isinstance(name, str)}
    extra = schema.keys() - {"type", "properties", "required", "additionalProperties", "title", "description", "$defs",
                             "definitions", "$schema", "$id", "default", "examples"}  # fmt: skip
    if strict and extra:
        raise CannotExpress(f"this model writes arguments one by one: {min(extra)!r} is not supported for them")
    if strict and not required <= properties.keys():
        raise CannotExpress(f"{min(required - properties.keys())!r} is required and not among the properties")
    if any(not _KEY.fullmatch(key) for key in properties):
        raise CannotExpress("this model's format has no place for a property with such a name")
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    arguments = [
        (key in required, _argument(writer, key, value, schema, shared, pieces, strict=strict))
        for key, value in properties.items()
    ]
    # Two chains of rules from the last argument to the first: with and without one before.
    first = rest = '""'
    separator = quoted(pieces.between) + " " if pieces.between else ""
    for needed, argument in reversed(arguments):
        chain = rest
        rest = writer.rule(f"{separator}{argument} {chain}" + ("" if needed else f" | {chain}"))
        first = writer.rule(f"{argument} {chain}" + ("" if needed else f" | {first}"))
    return first


def _argument(
    writer: GrammarWriter,
    key: str,
    schema: Any,
    root: dict[str, Any],
    shared: dict[str, Any],
    pieces: Pieces,
    *,
    strict: bool,
) -> str:
    """
    Args:
        root: schema of all arguments.
        shared: its definitions.
    """
    found = kinds(schema, root)
    end = pieces.text_end(key)
    if end and "string" in found <= ({"string"} if pieces.typed else {"string", "null"}):
        lead = writer.literal(pieces.lead(key, "string"))
        return writer.rule(f"{lead} {_text(writer, schema, root, end, strict=strict)}")
    whole = schema | shared if isinstance(schema, dict) else schema
    escapes = {} if end else ESCAPES
    value = f"{writer.json(whole, lenient=not strict, **escapes)} {writer.literal(end)}".strip()
    leads = sorted({pieces.lead(key, kind) for kind in found - ({"string"} if pieces.typed else set())} or
                   {pieces.lead(key, "object")})  # fmt: skip
    if len(leads) == 1:
        return writer.rule(f"{writer.literal(leads[0])} {value}")
    return writer.rule(f"({' | '.join(map(writer.literal, leads))}) {value}")


def _text(writer: GrammarWriter, schema: dict[str, Any], root: dict[str, Any], end: str, *, strict: bool) -> str:
    """A text, or null where the schema allows it, without quotes, and ``end`` behind it."""
    try:
        alternatives = texts(schema, root)
    except ValueError as error:
        if strict:
            raise CannotExpress(f"this model writes texts without quotes: {error}, which is not supported") from None
        alternatives = [{}]
    return f"({' | '.join(_alternative(writer, each, end, strict=strict) for each in alternatives)})"


def _alternative(writer: GrammarWriter, schema: dict[str, Any], end: str, *, strict: bool) -> str:
    if strict and (extra := schema.keys() - _TEXT_KEYWORDS):
        raise CannotExpress(f"this model writes texts without quotes: {min(extra)!r} is not supported for them")
    kind = schema.get("type", "string")
    named = [kind] if isinstance(kind, str) else kind
    null = "null" in named
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        values = [each for each in values if isinstance(each, str) or (each is None and ("type" not in schema or null))]
        if not values:
            raise CannotExpress("its enum has no text")
        return f"({' | '.join(quoted('null' if each is None else each) for each in values)}) {writer.literal(end)}"
    if named == ["null"]:
        return f"{quoted('null')} {writer.literal(end)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    bounded = isinstance(least, int) and isinstance(most, int | None) and (least or most is not None)
    text = writer.text_until(end, pattern=rf"(.|\n){{{least},{'' if most is None else most}}}" if bounded else ANY_TEXT)
    return (
        f"{quoted('null')} {writer.literal(end)} | {text}"
        if null and bounded and not least <= len("null") <= (len("null") if most is None else most)
        else text
    )
