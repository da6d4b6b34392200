"""Arguments in a notation of their own, ``{key:<|"|>text<|"|>,number:3}``, with a mark around texts (Gemma 4)."""

from typing import Any

from penstock.gateway.grammars.writer import CannotExpress, GrammarWriter, escaped
from penstock.infra.constraints.schema_kinds import kinds, resolved

_DEEPEST = 16  # objects within objects; what is deeper may be anything
_KEPT = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "title", "description",
         "default", "examples", "$defs", "definitions", "$ref", "$schema", "$id"}  # fmt: skip


def notation_object(writer: GrammarWriter, schema: dict[str, Any], quote: str, *, strict: bool) -> str:
    """The arguments that a schema describes.

    Raises:
        CannotExpress: it is strict, and has keywords beyond types, properties, items and enums.
    """
    return _Notation(writer, schema, quote, strict=strict).object(schema, 0)


class _Notation:
    def __init__(self, writer: GrammarWriter, root: dict[str, Any], quote: str, *, strict: bool) -> None:
        self._writer = writer
        self._root = root
        self._quote = quote
        self._strict = strict
        self._free = ""

    def object(self, schema: dict[str, Any], depth: int) -> str:
        properties = schema.get("properties") or {}
        needed = schema.get("required") or ()
        if self._strict and (extra := schema.keys() - _KEPT):
            raise CannotExpress(f"this model's format of calls cannot keep {min(extra)!r}")
        if not isinstance(properties, dict) or not isinstance(needed, list | tuple):
            properties, needed = {}, ()
        if not properties and schema.get("additionalProperties") is not False and depth:
            return self._any_object()
        first = rest = '""'
        for key, value in reversed(properties.items()):
            if any(each in key for each in ",:{}[]"):
                raise CannotExpress("this model's format has no place for a property with such a name")
            pair = f"{self._writer.literal(key + ':')} {self._value(value, depth + 1)}"
            chain = rest
            rest = self._writer.rule(f'"," {pair} {chain}' + ("" if key in needed else f" | {chain}"))
            first = self._writer.rule(f"{pair} {chain}" + ("" if key in needed else f" | {first}"))
        return self._writer.rule(f'"{{" {first} "}}"')

    def _value(self, schema: Any, depth: int) -> str:
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            schema = resolved(reference, self._root)
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return self._any()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._writer.rule(" | ".join(self._fixed(each) for each in values))
        found = kinds(schema, self._root)
        ways = []
        if "string" in found:
            ways.append(self._text(schema))
        if "object" in found:
            ways.append(self.object(schema, depth))
        if "array" in found:
            item = self._value(schema.get("items", {}), depth + 1)
            ways.append(f'"[" ({item} ("," {item})*)? "]"')
        if scalars := sorted(found & {"number", "boolean", "null"}):
            kept = {key: value for key, value in schema.items() if key not in ("type", "properties", "items")}
            integer = schema.get("type") == "integer" or (
                isinstance(schema.get("type"), list) and "number" not in found
            )
            named = ["integer" if integer and each == "number" else each for each in scalars]
            ways.append(self._writer.json(kept | {"type": named}, lenient=not self._strict))
        return self._writer.rule(" | ".join(ways))

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if self._strict and "pattern" in schema:
            raise CannotExpress("this model's format of calls cannot keep 'pattern'")
        bounded = isinstance(least, int) and isinstance(most, int | None) and (least or most is not None)
        pattern = rf"(.|\n){{{least},{'' if most is None else most}}}" if bounded else r"(.|\n)*"
        return f"{self._writer.literal(self._quote)} {self._writer.text_until(self._quote, pattern=pattern)}"

    def _fixed(self, value: Any) -> str:
        if isinstance(value, str):
            return self._writer.literal(f"{self._quote}{value}{self._quote}")
        return self._writer.json({"const": value})

    def _any(self) -> str:
        """Any value."""
        if not self._free:
            names = self._writer.rule(f"/[^,:{escaped('{}[]')}<>\\n]+/")
            text = f"{self._writer.literal(self._quote)} {self._writer.text_until(self._quote)}"
            scalar = self._writer.json({"type": ["number", "boolean", "null"]})
            self._free = self._writer.recursive(
                lambda own: (
                    f'{text} | {scalar} | "[" ({own} ("," {own})*)? "]" | '
                    f'"{{" ({names} ":" {own} ("," {names} ":" {own})*)? "}}"'
                )
            )
        return self._free

    def _any_object(self) -> str:
        own = self._any()
        names = self._writer.rule(f"/[^,:{escaped('{}[]')}<>\\n]+/")
        return self._writer.rule(f'"{{" ({names} ":" {own} ("," {names} ":" {own})*)? "}}"')
