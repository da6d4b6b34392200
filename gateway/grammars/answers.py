"""Grammars of a whole answer: reasoning within a budget, then calls or content; and of structural tags. Pure.

Structural tags are those of vLLM, SGLang and xgrammar: the parts of an output between marks must match. The older form
has structures and triggers, the newer one a format that is a tree:
https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_format.html
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.gateway.grammars.calls import CallGrammar, Tool
from penstock.gateway.grammars.writer import ANY_TEXT, CannotExpress, GrammarWriter, escaped
from penstock.infra.constraints.lark_expression import slashed
from penstock.infra.text.parsers.families import Thoughts

LAYOUT = r"/\n{0,2}/"  # between reasoning and what follows
ANYTHING = "<[*]>*"


class Reasoning(NamedTuple):
    """
    Attributes:
        tags: marks around it; None: messages in channels (harmony).
        begun: the prompt ends within it.
        max_tokens: of it; None: no limit.
    """

    tags: Thoughts | None
    begun: bool = False
    max_tokens: int | None = None


class CallRules(NamedTuple):
    """``must``: the answer has calls; otherwise it may have. ``one``: at most one."""

    grammar: CallGrammar
    tools: Sequence[Tool]
    must: bool
    one: bool


def write_answer(
    writer: GrammarWriter, content: str | None, calls: CallRules | None, reasoning: Reasoning | None
) -> str:
    """The grammar.

    Args:
        content: a rule that the content must match; None: any text.
        calls: None: there are none, or nothing is asked of them.
        reasoning: None: the model has none.
    Raises:
        CannotExpress: the format of the calls cannot keep a strict schema.
    """
    if reasoning is not None and reasoning.tags is None:
        return writer.text(_harmony(writer, content, calls, reasoning.max_tokens))
    following = _content_or_calls(writer, content, calls)
    if reasoning is None:
        return writer.text(following)
    return writer.text(_with_reasoning(writer, reasoning, following, free=following == ANYTHING))


def _content_or_calls(writer: GrammarWriter, content: str | None, calls: CallRules | None) -> str:
    if calls is None:
        return content or ANYTHING
    grammar = calls.grammar
    called = grammar.calls(writer, calls.tools, one=calls.one)
    if calls.must:
        return called
    if content is not None:
        return f"({content} | {called})"
    if grammar.starts:
        other = writer.terminal(rf"/([^ \n{escaped(grammar.starts)}](.|\n)*)?/")
        return f"({called} | {other})"
    before, token = writer.spelled(grammar.opener)
    if not token:
        raise CannotExpress(
            f"this model spells {grammar.opener!r} as text; set tool_choice to 'required', or strict to false"
        )
    if before:  # of the mark, which content ends with if calls follow
        begun = grammar.calls(writer, calls.tools, one=calls.one, begun=before)
        text = writer.rule(f"/{ANY_TEXT}{escaped(before)}/")
        return f"({writer.text_without(grammar.opener)} | {text} {begun})"
    return f"{writer.text_without(grammar.opener)} {called}?"


def _with_reasoning(writer: GrammarWriter, reasoning: Reasoning, following: str, *, free: bool) -> str:
    """Reasoning, if the answer has some, before ``following``; ``free``: that is any text."""
    tags = reasoning.tags
    assert tags is not None
    body = writer.text_until(tags.closing[0], max_tokens=reasoning.max_tokens)
    layout = "" if free else f"{LAYOUT} "
    if reasoning.begun:
        return f"{body} {layout}{following}"
    opening = f"({' | '.join(map(writer.literal, tags.opening))})"
    if not free:
        return f"({opening} {body} {layout})? {following}"
    tokens = [token for each in tags.opening if (token := writer.mark_id(each.strip())) is not None]
    first = f"<[^{','.join(map(str, tokens))}]>" if tokens else "<[*]>"
    return f"({opening} {body} {following} | ({first} {following})?)"


def _harmony(writer: GrammarWriter, content: str | None, calls: CallRules | None, max_tokens: int | None) -> str:
    """Messages in channels; a message's end token ends the answer."""
    analysis = writer.text_until("<|end|>", max_tokens=max_tokens)
    before = f"({writer.literal('<|channel|>analysis<|message|>')} {analysis} {writer.literal('<|start|>assistant')})?"
    final = f"{writer.literal('<|channel|>final<|message|>')} {content or writer.text_without('<|end|>')}"
    if calls is None:
        return f"{before} {final}"
    called = calls.grammar.calls(writer, calls.tools, one=True)
    return f"{before} {called}" if calls.must else f"{before} ({called} | {final})"


MOST_PARTS = 512
_UNSEEN = ("json_schema", "plus", "regex", "repeat", "tags_with_separator")  # what begins with no certain text


class BadTag(ValueError):
    """It is not of the form; the text says which part."""


def write_tags(writer: GrammarWriter, tag: dict[str, Any]) -> str:
    """A rule for the whole output.

    Raises:
        BadTag: a part is missing or of another type.
        CannotExpress: a part is of a kind that is not supported.
    """
    return _Tags(writer).whole(tag)


class _Tags:
    def __init__(self, writer: GrammarWriter) -> None:
        self._writer = writer
        self._left = MOST_PARTS
        self._kinds: dict[str, Callable[[dict[str, Any]], str]] = {
            "any_text": lambda part: self._rule(self._writer.text_without(*_texts(part, "excludes"))),
            "const_string": lambda part: writer.literal(_text(part, "value")) or '""',
            "grammar": self._grammar,
            "json_schema": self._schema,
            "optional": lambda part: f"({self._part(part.get('content'))})?",
            "or": self._or,
            "plus": lambda part: f"({self._part(part.get('content'))})+",
            "regex": lambda part: self._rule(f"/{slashed(_text(part, 'pattern'))}/"),
            "repeat": self._repeat,
            "sequence": self._sequence,
            "star": lambda part: f"({self._part(part.get('content'))})*",
            "tag": lambda part: self._rule(self._tag(part, part.get("content"))),
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def whole(self, tag: dict[str, Any]) -> str:
        if "format" in tag:
            return self._part(_get(tag, "format", dict))
        structures = [
            each | {"content": {"type": "json_schema", "json_schema": each.get("schema") or {}}}
            for each in _list(tag, "structures")
            if isinstance(each, dict)
        ]
        return self._triggered({"triggers": tag.get("triggers"), "tags": structures})

    def _rule(self, body: str) -> str:
        return self._writer.rule(body)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise BadTag(f"it has more than {MOST_PARTS} parts, each counted once for each end that may follow it")

    def _part(self, part: Any) -> str:
        self._count()
        if not isinstance(part, dict):
            raise BadTag("each part must be an object with a type")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise CannotExpress(f"type {str(kind)[:40]!r} is not supported; use one of {', '.join(self._kinds)}")
        return self._kinds[kind](part)

    def _grammar(self, part: dict[str, Any]) -> str:
        raise CannotExpress("type 'grammar' is not supported within a structural tag; use regex or json_schema")

    def _schema(self, part: dict[str, Any]) -> str:
        if (style := part.get("style") or "json") != "json":
            raise CannotExpress(f"style {str(style)[:40]!r} of a json_schema is not supported; leave it out")
        return self._writer.json(_get(part, "json_schema", (dict, bool)))

    def _repeat(self, part: dict[str, Any]) -> str:
        least, most = _get(part, "min", int), _get(part, "max", int)
        if not 0 <= least <= MOST_PARTS or (most != -1 and not least <= most <= MOST_PARTS):
            raise BadTag(f"min and max must be from 0 to {MOST_PARTS}, min at most max; max: -1 means no limit")
        content = self._part(part.get("content"))
        return f"({content}){{{least},{'' if most == -1 else most}}}" if most else '""'

    def _tag(self, part: dict[str, Any], content: Any, cut: str = "") -> str:
        """``begin``, without what ``cut`` is of it, to ``end``."""
        begin, ends = _text(part, "begin"), part.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise BadTag("end must be a text or a list of texts")
        lead = self._writer.literal(begin[len(cut) :]) if len(begin) > len(cut) else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and not all(ends):
            raise BadTag("any_text needs an end")
        return f"{lead} ({' | '.join(self._before(content, each) for each in ends)})"

    def _before(self, part: Any, end: str) -> str:
        """A part and the text after it, at which free text in the part ends."""
        kind = part.get("type") if end and isinstance(part, dict) else ""
        if kind not in ("any_text", "optional", "or", "sequence", "triggered_tags"):
            return f"{self._part(part)} {self._writer.literal(end)}"
        self._count()
        if kind == "any_text":
            return self._writer.text_until(end, excludes=_texts(part, "excludes"))
        if kind == "optional":
            return self._rule(f"({self._before(part.get('content'), end)} | {self._writer.literal(end)})")
        return {"or": self._or, "sequence": self._sequence, "triggered_tags": self._triggered}[kind](part, end)

    def _or(self, part: dict[str, Any], end: str = "") -> str:
        return self._rule(" | ".join(f"({self._before(each, end)})" for each in _list(part, "elements")))

    def _sequence(self, part: dict[str, Any], end: str = "") -> str:
        elements, made = deque(_list(part, "elements")), list[str]()
        while elements:
            first = elements.popleft()
            following: Any = elements[0] if elements and isinstance(elements[0], dict) else {}
            kind = following.get("type")
            free = isinstance(first, dict) and first.get("type") in ("any_text", "triggered_tags")
            if free and kind in ("optional", "or"):  # the text ends where one of them begins
                elements.popleft()
                choices = [[each] for each in _list(following, "elements")] if kind == "or" else []
                choices = choices or [[following.get("content")], []]
                ways = [self._sequence({"elements": [first, *each, *elements]}, end) for each in choices]
                made.append(f"({' | '.join(ways)})")
                break
            if kind == "sequence":
                self._count()
                elements.popleft()
                elements.extendleft([*reversed(_list(following, "elements")), first])
            elif kind == "const_string" or (kind == "tag" and _text(following, "begin")):
                elements.popleft()
                text = _text(following, "value" if kind == "const_string" else "begin")
                made.append(self._before(first, text))
                if kind == "tag":
                    made.append(self._rule(self._tag(following, following.get("content"), text)))
                if not elements:
                    made.append(self._writer.literal(end))
            elif free and kind in _UNSEEN:
                raise CannotExpress(
                    f"{kind} does not show where {first['type']} ends; put a const_string or a tag between them"
                )
            else:
                made.append(self._before(first, "" if elements else end))
        return self._rule(" ".join(made))

    def _separated(self, part: dict[str, Any]) -> str:
        tags = [self._rule(self._tag(each, each.get("content"))) for each in _objects(part, "tags")]
        one = self._rule(" | ".join(tags))
        separator = self._writer.literal(_text(part, "separator"))
        many = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._rule(many if part.get("at_least_one") else f"({many})?")

    def _triggered(self, part: dict[str, Any], end: str = "") -> str:
        """Any text; where it has a trigger, one of the tags that begin with it follows.

        With ``at_least_one``, it begins with a tag.
        """
        triggers, tags, excludes = _list(part, "triggers"), _objects(part, "tags"), _texts(part, "excludes")
        excludes = [*excludes, end] if end else excludes
        if not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise BadTag("triggers must be a list of texts")
        begun: list[str] = []
        for trigger in triggers:
            own = [each for each in tags if _text(each, "begin").startswith(trigger)]
            if not own:
                raise BadTag(f"no tag begins with the trigger {trigger[:40]!r}")
            rest = self._rule(" | ".join(f"({self._tag(each, each.get('content'), trigger)})" for each in own))
            begun.append(f"{self._writer.text_until(trigger, excludes=excludes)} {rest}")
        for each in tags:
            if not _text(each, "begin").startswith(tuple(triggers)):
                raise BadTag(f"the tag {each['begin'][:40]!r} begins with none of the triggers")
        one = self._rule(" | ".join(f"({each})" for each in begun))
        first = ""
        if part.get("at_least_one"):
            first = self._rule(" | ".join(f"({self._tag(each, each.get('content'))})" for each in tags))
        tail = self._writer.text_until(end, excludes=[*triggers, *excludes]) if end else ""
        tail = tail or self._writer.text_without(*triggers, *excludes)
        for trigger in triggers:
            if end.startswith(trigger) and end != trigger and not self._writer.spelled(end)[1]:
                text = self._writer.text_until(trigger, excludes=excludes)
                tail = f"({tail} | {text} {self._writer.literal(end[len(trigger) :])})"
        if part.get("stop_after_first"):
            closing = self._writer.literal(end)
            return self._rule(f"{first} {closing}" if first else f"({one} {closing} | {tail})")
        return self._rule(f"{first} {one}* {tail}")


def _get(part: dict[str, Any], name: str, kinds: type | tuple[type, ...]) -> Any:
    value = part.get(name)
    if not isinstance(value, kinds):
        raise BadTag(f"{name} is missing or of another type")
    return value


def _text(part: dict[str, Any], name: str) -> str:
    value: str = _get(part, name, str)
    return value


def _list(part: dict[str, Any], name: str) -> Sequence[Any]:
    value: list[Any] = _get(part, name, list)
    if not value:
        raise BadTag(f"{name} is empty")
    if len(value) > MOST_PARTS:
        raise BadTag(f"{name} has {len(value)} parts; the limit is {MOST_PARTS}")
    return value


def _texts(part: dict[str, Any], name: str) -> list[str]:
    """A list of texts that may be left out."""
    found = part.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise BadTag(f"{name} must be a list of texts")
    return found


def _objects(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = _list(part, name)
    if not all(isinstance(each, dict) for each in found):
        raise BadTag(f"{name} must be a list of objects")
    return list(found)
