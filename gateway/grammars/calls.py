"""The grammar of tool calls of each row of the table that ``penstock.infra.text.parsers`` reads by."""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.gateway.grammars.writer import ANY_TEXT, CannotExpress, GrammarWriter, escaped
from penstock.infra.constraints.constraint_grammar import quoted
from penstock.infra.constraints.lark_expression import slashed
from penstock.infra.constraints.llguidance_releases import ESCAPES
from penstock.infra.constraints.schema_rewriting import RootSchema, kinds, resolved, texts
from penstock.infra.text.parsers.families import CHANNELS, TABLE, CallFormat
from penstock.schemas.requests import Constraint

_TEXT_KEYWORDS = {
    "type",
    "enum",
    "const",
    "title",
    "description",
    "default",
    "examples",
    "minLength",
    "maxLength",
    "pattern",
}
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
    document = RootSchema(schema)
    arguments = [
        (key in required, _argument(writer, key, value, document, shared, pieces, strict=strict))
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
    document: RootSchema,
    shared: dict[str, Any],
    pieces: Pieces,
    *,
    strict: bool,
) -> str:
    """
    Args:
        document: schema of all arguments.
        shared: its definitions.
    """
    found = kinds(schema, document)
    end = pieces.text_end(key)
    if end and "string" in found <= ({"string"} if pieces.typed else {"string", "null"}):
        lead = writer.literal(pieces.lead(key, "string"))
        return writer.rule(f"{lead} {_text(writer, schema, document, end, strict=strict)}")
    whole = schema | shared if isinstance(schema, dict) else schema
    escapes = {} if end else ESCAPES
    value = f"{writer.json(whole, lenient=not strict, **escapes)} {writer.literal(end)}".strip()
    leads = sorted({pieces.lead(key, kind) for kind in found - ({"string"} if pieces.typed else set())} or
                   {pieces.lead(key, "object")})  # fmt: skip
    if len(leads) == 1:
        return writer.rule(f"{writer.literal(leads[0])} {value}")
    return writer.rule(f"({' | '.join(map(writer.literal, leads))}) {value}")


def _text(writer: GrammarWriter, schema: dict[str, Any], document: RootSchema, end: str, *, strict: bool) -> str:
    """A text, or null where the schema allows it, without quotes, and ``end`` after it."""
    try:
        alternatives = texts(schema, document)
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
    if strict and "pattern" in schema:
        return writer.text_until(end, pattern=_whole(schema))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    bounded = isinstance(least, int) and isinstance(most, int | None) and (least or most is not None)
    text = writer.text_until(end, pattern=rf"(.|\n){{{least},{'' if most is None else most}}}" if bounded else ANY_TEXT)
    return (
        f"{quoted('null')} {writer.literal(end)} | {text}"
        if null and bounded and not least <= len("null") <= (len("null") if most is None else most)
        else text
    )


_DEEPEST = 16  # objects within objects; what is deeper may be anything
_KEPT = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "title", "description",
         "default", "examples", "$defs", "definitions", "$ref", "$schema", "$id"}  # fmt: skip


def _whole(schema: dict[str, Any]) -> str:
    """The pattern of a whole text, for a rule: a client's slash would end the expression there.

    Raises:
        CannotExpress: it is another one.
    """
    pattern = schema["pattern"]
    if not isinstance(pattern, str) or schema.keys() & {"minLength", "maxLength"}:
        raise CannotExpress("this model writes texts without quotes: 'pattern' is not supported beside their lengths")
    if not pattern.startswith("^(?:") or not pattern.endswith(")$"):
        raise CannotExpress("this model writes texts without quotes: a pattern is supported as ^(?:…)$ only")
    return slashed(pattern[1:-1])


def notation_object(writer: GrammarWriter, schema: dict[str, Any], quote: str, *, strict: bool) -> str:
    """The arguments that a schema describes.

    Raises:
        CannotExpress: it is strict, and has keywords beyond types, properties, items and enums.
    """
    return _Notation(writer, schema, quote, strict=strict).object(schema, 0)


class _Notation:
    def __init__(self, writer: GrammarWriter, root: dict[str, Any], quote: str, *, strict: bool) -> None:
        self._writer = writer
        self._document = RootSchema(root)
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
            schema = resolved(reference, self._document.root)
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return self._any()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._writer.rule(" | ".join(self._fixed(each) for each in values))
        found = kinds(schema, self._document)
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
            return f"{self._writer.literal(self._quote)} {self._writer.text_until(self._quote, pattern=_whole(schema))}"
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


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """A function that may be called.

    Attributes:
        strict: every keyword of its schema holds, or the request is refused.
        given: what its client wrote for the only argument, a text; None: a schema.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    given: Constraint | None = None

    def loosened(self, schemas: Mapping[str, Any]) -> "Tool":
        """With the schema of that name, unless it is strict."""
        return self if self.strict or self.name not in schemas else self._replace(parameters=schemas[self.name])


class CallGrammar(NamedTuple):
    """How calls are written: ``before call (between call)* after``.

    Attributes:
        call: from the writer and a tool to one call.
        opener: what a call begins with, wherever in the text; "": only whole answers are calls.
        one: a single call per answer.
        starts: characters with which no content begins, where calls have no opener.
    """

    call: Callable[[GrammarWriter, Tool], str]
    before: str = ""
    between: str = ""
    after: str = ""
    opener: str = ""
    one: bool = False
    starts: str = ""

    def _one(self, writer: GrammarWriter, tool: Tool) -> str:
        try:
            return self.call(writer, tool)
        except CannotExpress as error:
            raise CannotExpress(f"tool {tool.name!r}: {error}") from None

    def calls(self, writer: GrammarWriter, tools: Sequence[Tool], *, one: bool, begun: str = "") -> str:
        """At least one call of these tools.

        Args:
            one: exactly one.
            begun: what of ``before`` has been written.
        """
        call = writer.rule(" | ".join(self._one(writer, tool) for tool in tools))
        body = call if one or self.one else f"{call} ({writer.literal(self.between)} {call})*"
        before = writer.literal(self.before.removeprefix(begun))
        return writer.rule(f"{before} {body} {writer.literal(self.after)}".strip())


def call_grammar(parser: str, token_id: Callable[[str], int | None]) -> CallGrammar:
    """The grammar of a row's format.

    Where a format is a list of objects or, in newer vocabularies, a head before bare arguments, it is the newer one if
    there is a token for it.
    """
    form = TABLE.calls(parser)
    assert form is not None
    if form.reader == CHANNELS:
        head = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return CallGrammar(_headed(head, ""), one=True)
    before, after = ("", "") if form.starts else form.section
    headed = bool(form.head) and (not form.list or token_id(form.head.partition("{name}")[2]) is not None)
    if form.list and not headed:
        before, after = before + "[", "]" + after
    each = form.each and (headed or not form.list)
    lead, end = (before, after) if each else ("", "")
    call = _call(form, lead + form.call[0], form.call[1] + end, headed=headed)
    opener = "" if form.starts else form.openers[0]
    if each:
        return CallGrammar(call, between=form.between if not form.list else "", opener=opener)
    return CallGrammar(call, before, form.between, after, opener, starts=form.starts)


def _call(form: CallFormat, begin: str, end: str, *, headed: bool) -> Callable[[GrammarWriter, Tool], str]:
    """One call between ``begin`` and ``end``."""
    if form.reader == "markup":
        return _markup(form, begin, end)
    if form.reader == "pythonic":
        return _pythonic(begin, end)
    if form.reader == "notation":
        return _notation(form.quote, begin, end)
    if headed:
        return _headed(begin + form.head, end)
    if form.keyed:
        return _headed(begin + '{"{name}": ', "}" + end)
    return _headed(f'{begin}{{"{form.name_key}": "{{name}}", "{form.arguments_key}": ', "}" + end)


def _headed(head: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    """``head`` with the name in place of ``{name}``, then the arguments as JSON, then ``end``."""

    def call(writer: GrammarWriter, tool: Tool) -> str:
        arguments = writer.json(tool.parameters, lenient=not tool.strict)
        return f"{_numbered(writer, _named(head, tool.name))} {arguments} {writer.literal(end)}".strip()

    return call


def _markup(form: CallFormat, begin: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    """An element for each argument."""

    def lead(key: str, kind: str) -> str:
        behind = form.key[1].replace("{is_text}", "true" if kind == "string" else "false").replace("{type}", kind)
        return form.key[0] + (html.escape(key, quote=True) if form.entities else key) + behind

    pieces = Pieces(lead, text_end=lambda key: form.value_end.replace("{key}", key), typed=form.types != "schema")

    def call(writer: GrammarWriter, tool: Tool) -> str:
        head = _numbered(writer, begin + tool.name + form.name_end)
        return (
            f"{head} {by_property(writer, tool.parameters, pieces, strict=tool.strict)} {writer.literal(end)}".strip()
        )

    return call


def _pythonic(begin: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    pieces = Pieces(lambda key, kind: f"{key}=", between=", ")

    def call(writer: GrammarWriter, tool: Tool) -> str:
        arguments = by_property(writer, tool.parameters, pieces, strict=tool.strict)
        return f"{writer.literal(begin + tool.name + '(')} {arguments} {writer.literal(')' + end)}"

    return call


def _notation(quote: str, begin: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    def call(writer: GrammarWriter, tool: Tool) -> str:
        arguments = notation_object(writer, tool.parameters, quote, strict=tool.strict)
        return f"{writer.literal(begin + tool.name)} {arguments} {writer.literal(end)}".strip()

    return call


def _named(text: str, name: str) -> str:
    return text.replace("{name}", name)


def _numbered(writer: GrammarWriter, text: str) -> str:
    """A text in which ``{number}`` is the number of a call."""
    before, numbered, after = text.partition("{number}")
    if not numbered:
        return writer.literal(text)
    return f"{writer.literal(before)} /[0-9]{{1,3}}/ {writer.literal(after)}"
