"""Parsers by name, and which one parses a request's answer."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from blake3 import blake3

from penstock.infra.constraints.schema_rewriting import RootSchema, kinds
from penstock.infra.text.detokenizer import NO_MARKS, Detokenizer, StopSearch, TextStream
from penstock.infra.text.parsers import reader
from penstock.infra.text.parsers.answer_parser import AnswerFormat, AnswerParser, ThoughtMarks
from penstock.infra.text.parsers.families import CHANNELS, TABLE, CallFormat, Family
from penstock.infra.text.parsers.harmony import HarmonyMarks
from penstock.infra.text.parsers.json_calls import json_calls
from penstock.infra.text.parsers.markup_calls import markup_calls
from penstock.infra.text.parsers.notation_calls import notation_calls, pythonic_calls
from penstock.infra.text.parsers.reader import NONE, Marks
from penstock.infra.text.parsers.tool_formats import ContentMarks, TextParameters, ToolFormat
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import GenerateRequest, Parsing, ThoughtTokens

_READERS = {"json": json_calls, "markup": markup_calls, "notation": notation_calls, "pythonic": pythonic_calls}
_ID_CHARS = {"short": 9}  # of ids that the format does not write; else "call_" and 24
_PROMPT_END = 16  # tokens; longer than any mark and a line break


class ParserNames(NamedTuple):
    """As the workers of a model name them; "": none, or unknown to this gateway."""

    reasoning: str = ""
    tools: str = ""


def agreed_parsers(workers: Iterable[Registration]) -> tuple[ParserNames, frozenset[ParserNames]]:
    """The parsers of a model, and all combinations that its workers name.

    The worker that registered first decides, so that all gateways agree.
    """
    decoding = [worker for worker in workers if worker.role in ("aggregated", "decode")]
    if not decoding:
        return ParserNames(), frozenset()
    first = min(decoding, key=lambda worker: (worker.epoch, worker.worker))
    named = frozenset(ParserNames(worker.reasoning_parser, worker.tool_call_parser) for worker in decoding)
    names = ParserNames(
        first.reasoning_parser if TABLE.thoughts(first.reasoning_parser) is not None else "",
        first.tool_call_parser if TABLE.calls(first.tool_call_parser) is not None else "",
    )
    return names, named


def answer_parsing(
    parsers: ParserNames,
    tools: Sequence[dict[str, Any]] | None,
    prompt_end: Callable[[int], str],
    *,
    one_call: bool,
    begins: bool = True,
    prefilled: str | None = None,
) -> Parsing | None:
    """How a request's answer is to be parsed, for its record; None: not at all.

    Args:
        tools: in the prompt.
        prompt_end: from a number of tokens to the text of the last ones of the prompt.
        one_call: return the first call only.
        begins: the prompt ends with the beginning of an answer.
        prefilled: what the prompt has of the answer already, which continues it; None: nothing.
    """
    called = parsers.tools if tools else ""
    if not parsers.reasoning and not called:
        return None
    thoughts, calls = TABLE.thoughts(parsers.reasoning), TABLE.calls(called)
    thinking = continued = False
    if prefilled is not None:
        thought = thoughts.open_thought(prefilled) if thoughts is not None else None
        thinking, continued = thought is not None, thought is None or bool(thought.strip())
    elif thoughts is not None:
        thinking = thoughts.begun(prompt_end(_PROMPT_END), begins=begins)
    return Parsing(
        reasoning=parsers.reasoning,
        tools=called,
        thinking=thinking,
        one_call=bool(called) and one_call,
        texts=_text_parameters(tools or (), every=calls.types == "string") if calls and calls.needs_texts else {},
        prefilled=continued,
        functions=tuple(_names(tools or ())) if calls is not None and calls.needs_names else (),
    )


def format_tokens(parsing: Parsing, vocabulary: Collection[str]) -> tuple[str, ...]:
    """The tokens of which the marks of an answer's formats consist.

    Args:
        vocabulary: texts of the tokens beside a vocabulary's own.
    """
    rows = (TABLE.find(parsing.reasoning), TABLE.find(parsing.tools))
    return reader.tokens_in([text for row in rows if row is not None for text in row.marks], vocabulary)


@lru_cache(maxsize=256)
def _format(reasoning: Family | None, tools: Family | None, marks: Marks) -> AnswerFormat:
    """Of answers with one row's reasoning and another's calls."""
    thoughts = reasoning.thoughts if reasoning is not None else None
    calls = tools.calls if tools is not None else None
    if (thoughts is not None and thoughts.channels) or (calls is not None and calls.reader == CHANNELS):
        return AnswerFormat(harmony=HarmonyMarks(marks), harmony_calls=calls is not None, marks=marks)
    rows = [row for row in (reasoning, tools) if row is not None]
    start, end = next((row.frame for row in rows if any(row.frame)), ("", ""))
    layout = dict.fromkeys(mark for row in rows for mark in row.layout)
    begin, message = next((row.header for row in rows if row.header[0]), ("", ""))
    frame = marks.within(start), marks.within(end)
    content = ContentMarks(frame, tuple(map(marks.within, layout)), header=(marks.within(begin), marks.within(message)))
    return AnswerFormat(
        reasoning=ThoughtMarks(thoughts, marks) if thoughts is not None else None,
        tools=_tool_format(calls, marks) if calls is not None else None,
        content=content if content != ContentMarks() else None,
        marks=marks,
    )


def _tool_format(calls: CallFormat, marks: Marks) -> ToolFormat:
    openers = tuple(map(marks.within, calls.openers))
    firsts: tuple[str, ...] = ()
    if openers and openers[0] != calls.openers[0]:
        # The format has a token: what else models write in its place is spelled, and may be quoted from a document.
        spelled = [each for each in openers if each in calls.openers]
        certain = marks.within(calls.section[1]) != calls.section[1]  # a call that its section's token must end
        firsts = tuple(each for each in spelled if not (certain and each == calls.call[0].strip()))
    anywhere = tuple(each for each in openers if each not in firsts)
    return ToolFormat(_READERS[calls.reader](calls, marks), anywhere, firsts, calls.starts)


def parser_for(request: GenerateRequest, choice: int, marks: Marks = NONE) -> AnswerParser:
    """A parser for the text of one choice. ``request.parsing`` is set.

    Args:
        marks: that are tokens, which come as their characters.
    """
    parsing = request.parsing
    assert parsing is not None
    tools = TABLE.find(parsing.tools)
    form = _format(TABLE.find(parsing.reasoning), tools, marks)
    chars = _ID_CHARS.get(tools.calls.ids, 0) if tools is not None and tools.calls is not None else 0

    def call_id(index: int) -> str:
        digest = blake3(f"{request.id}.{choice}.{index}".encode()).hexdigest()
        return digest[:chars] if chars else "call_" + digest[:24]

    return AnswerParser(form, parsing, request.stop, call_id, stops_shown=request.stops_shown)


class AnswerMarks(NamedTuple):
    """
    Attributes:
        marks: of an answer's formats, that are tokens of a vocabulary.
        shown: their characters, by the tokens' ids.
        texts: their texts, likewise, for what follows the parsed part of an answer.
        thoughts: the marks of reasoning; None: they are no tokens of their own, or the format has channels.
    """

    marks: Marks
    shown: dict[int, str]
    texts: dict[int, str]
    thoughts: ThoughtTokens | None


def answer_marks(parsing: Parsing, detokenizer: Detokenizer) -> AnswerMarks:
    """For the parser and the text stream of an answer."""
    return _answer_marks(parsing.reasoning, parsing.tools, detokenizer)


def forget_marks() -> None:
    """Drop the detokenizers of models that are no longer used."""
    _answer_marks.cache_clear()


@lru_cache(maxsize=16)
def _answer_marks(reasoning: str, tools: str, detokenizer: Detokenizer) -> AnswerMarks:
    marks = Marks(format_tokens(Parsing(reasoning, tools), detokenizer.added))
    ids = {detokenizer.added[token]: token for token in marks.tokens}
    shown = {token: marks.char(text) for token, text in ids.items()}
    tags, thoughts = _format(TABLE.find(reasoning), TABLE.find(tools), marks).reasoning, None
    by_char = {char: token for token, char in shown.items()}
    if tags is not None and by_char.keys() >= {*tags.opening, *tags.closing}:
        opening, closing = (tuple(by_char[mark] for mark in each) for each in (tags.opening, tags.closing))
        thoughts = ThoughtTokens(opening, closing, tags.again)
    return AnswerMarks(marks, shown, ids, thoughts)


def text_stream(request: GenerateRequest, detokenizer: Detokenizer) -> TextStream:
    """The text of one choice. Of an answer that is parsed, with the marks, and the parser searches its stop strings."""
    stop, special = request.stop, special_texts(request, detokenizer)
    if request.parsing is not None:
        shown = answer_marks(request.parsing, detokenizer).shown
        return detokenizer.marked_stream({**special, **shown} if special else shown, continues=request.continues)
    return detokenizer.stream(
        stop.strings,
        min_tokens=stop.min_tokens,
        stops_shown=request.stops_shown,
        marks=special,
        continues=request.continues,
    )


def special_texts(request: GenerateRequest, detokenizer: Detokenizer) -> Mapping[int, str]:
    """The texts of the special tokens that an answer shows."""
    return detokenizer.special if request.shown.special else NO_MARKS


def stop_search(request: GenerateRequest, choice: int, detokenizer: Detokenizer) -> StopSearch:
    """Whether the tokens of one choice have completed a stop string, as every gateway will find it."""
    text = text_stream(request, detokenizer)
    if request.parsing is None:
        return text
    return ContentSearch(text, parser_for(request, choice, answer_marks(request.parsing, detokenizer).marks))


class ContentSearch:
    """Searches stop strings in the content of an answer that is parsed."""

    __slots__ = ("_parser", "_text")

    def __init__(self, text: TextStream, parser: AnswerParser) -> None:
        self._text = text
        self._parser = parser

    @property
    def stop(self) -> str | None:
        return self._parser.stop

    def push(self, token: int) -> None:
        self._parser.push(self._text.push(token))


def _text_parameters(tools: Iterable[dict[str, Any]], *, every: bool) -> TextParameters:
    """Parameters that are text, from the tools' schemas; with ``every``, all, and whether they may be text."""
    named: TextParameters = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict) and isinstance(name := function.get("name"), str):
            document = RootSchema(parameters)
            found = {key: kinds(schema, document) for key, schema in properties.items()}
            texts = {key: "null" in each for key, each in found.items() if "string" in each <= {"string", "null"}}
            if every:
                texts = {key: "string" in each for key, each in found.items()}
            if texts:
                named[name] = texts
    return named


def _names(tools: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Of the functions."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name
