"""The grammar of tool calls of each row of the table that ``penstock.infra.text.parsers`` reads by."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.gateway.grammars.arguments import Pieces, by_property
from penstock.gateway.grammars.notation import notation_object
from penstock.gateway.grammars.writer import CannotExpress, GrammarWriter
from penstock.infra.text.parsers.families import CHANNELS, TABLE, Calls

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """A function that may be called. ``strict``: every keyword of its schema holds, or the request is refused."""

    name: str
    parameters: dict[str, Any]
    strict: bool

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


def _call(form: Calls, begin: str, end: str, *, headed: bool) -> Callable[[GrammarWriter, Tool], str]:
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


def _markup(form: Calls, begin: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    """An element for each argument."""

    def lead(key: str, kind: str) -> str:
        behind = form.key[1].replace("{is_text}", "true" if kind == "string" else "false").replace("{type}", kind)
        return form.key[0] + (html.escape(key, quote=True) if form.entities else key) + behind

    pieces = Pieces(
        lead,
        text_end=lambda key: form.value_end.replace("{key}", key),
        typed=form.types != "schema",
    )

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
