"""Writes a grammar in llguidance's dialect of Lark, for one vocabulary. Pure.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.infra.constraints.constraint_grammar import quoted
from penstock.infra.constraints.llguidance_releases import WHITESPACE
from penstock.infra.constraints.schema_rewriting import rewritten

ANY_TEXT = r"(.|\n)*"
MAX_BYTES = 196_608  # of a constraint's text
_MALFORMED = (TypeError, ValueError, AttributeError, KeyError, RecursionError)  # what a schema of another form raises
_REGEX_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/\-]")


class CannotExpress(ValueError):
    """The model's own format cannot keep what is asked; the text says which part."""


class LargeGrammar(ValueError):
    """The grammar has more than ``MAX_BYTES``."""


class GrammarWriter:
    """
    Args:
        token_id: id of a mark (``<tool_call>``) that is a single token; None: it is spelled as text.
        marks: of the formats in use.
    Raises:
        LargeGrammar: of each method that adds to the grammar.
    """

    def __init__(self, token_id: Callable[[str], int | None], marks: Sequence[str] = ()) -> None:
        self._token_id = token_id
        self._rules: list[str] = []
        self._size = 0
        longest_first = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first))) if marks else None

    def mark_id(self, mark: str) -> int | None:
        """The id of a mark that is a single token."""
        return self._token_id(mark)

    def literal(self, text: str) -> str:
        """This text; the marks in it are tokens where the vocabulary has them."""
        parts, at = [], 0
        for found in self._marks.finditer(text) if self._marks is not None else ():
            parts += [quoted(text[at : found.start()])] if found.start() > at else []
            token = self._token_id(found.group())
            parts.append(quoted(found.group()) if token is None else f"<[{token}]>")
            at = found.end()
        parts += [quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def rule(self, body: str, *, options: str = "") -> str:
        """Add a rule; returns its name."""
        return self._add("r", lambda name: f"{name}{options}: {body}")

    def recursive(self, body: Callable[[str], str]) -> str:
        """Add a rule that refers to itself; ``body`` is made from its name. Returns the name."""
        return self._add("n", lambda name: f"{name}: {body(name)}")

    def terminal(self, pattern: str) -> str:
        """Add a terminal, from texts and expressions between slashes, joined by |, & and ~; returns its name."""
        return self._add("T", lambda name: f"{name}: {pattern}")

    def _add(self, kind: str, rule: Callable[[str], str]) -> str:
        name = f"{kind}{len(self._rules)}"
        self._rules.append(rule(name))
        self._size += len(self._rules[-1])
        if self._size > MAX_BYTES:
            raise LargeGrammar(f"it takes more than {MAX_BYTES} bytes as a grammar, which is the limit")
        return name

    def json(self, schema: Any, *, lenient: bool = False, **options: Any) -> str:
        """A value of a JSON schema.

        Args:
            lenient: keywords that are not implemented are ignored.
            options: of llguidance's compiler.
        Raises:
            CannotExpress: a keyword has a value of a wrong type.
        """
        try:
            schema = rewritten(schema)
        except _MALFORMED as error:
            if not lenient:
                raise CannotExpress(f"the schema cannot be compiled: {str(error)[:300]}") from None
            try:
                schema = rewritten(_without_patterns(schema))
            except _MALFORMED:
                schema = {}
        schema = dict(schema) if isinstance(schema, dict) else {} if schema is not False else {"enum": []}
        schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": lenient, **options}
        return self.rule("%json " + msgspec.json.encode(schema).decode())

    def spelled(self, mark: str) -> tuple[str, str]:
        """A mark in two parts: what of it is text, and the rest, which begins with a token; that may be empty."""
        for found in self._marks.finditer(mark) if self._marks is not None else ():
            if self._token_id(found.group()) is not None:
                return mark[: found.start()], mark[found.start() :]
        return mark, ""

    def text_until(
        self, end: str, *, max_tokens: int | None = None, pattern: str = ANY_TEXT, excludes: Sequence[str] = ()
    ) -> str:
        """Text of a pattern, then ``end``, which does not occur in it. After ``max_tokens``, ``end`` is forced.

        Args:
            excludes: texts that do not occur in it either.
        Raises:
            CannotExpress: ``max_tokens`` with an end that does not begin with a token.
        """
        before, rest = self.spelled(end)
        if max_tokens == 0:
            return self.literal(end)
        text = self.text_without(*excludes) if excludes else f"/{pattern}/"
        if rest and not before:
            options = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
            return f"{self.rule(text, options=options)} {self.literal(rest)}"
        if max_tokens is not None:
            raise CannotExpress(f"this model ends its reasoning by the words {end!r}, so it cannot be limited")
        if rest:  # text cannot contain the token, so the last ``before`` in it is the one
            body = self.terminal(f"{text} {quoted(before)}") if excludes else f"/({pattern}){escaped(before)}/"
            return f"{self.rule(body)} {self.literal(rest)}"
        return self.rule(text, options=f"[suffix={quoted(end)}]")

    def text_without(self, *texts: str) -> str:
        """Any text in which none of these occurs; it may be empty."""
        pattern = f"/{ANY_TEXT}/"
        for text in texts:
            pattern += f" & ~/{ANY_TEXT}{escaped(text)}{ANY_TEXT}/"
        return self.terminal(pattern)

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_patterns(value) for key, value in schema.items() if key != "patternProperties"}


def escaped(text: str) -> str:
    """A text as a part of a regular expression."""
    return _REGEX_SPECIAL.sub(lambda found: "\\" + found.group(), text).replace("\n", "\\n")
