"""The grammar of a whole answer: reasoning within a budget, then calls, content, or either."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.gateway.grammars.calls import CallGrammar, Tool
from penstock.gateway.grammars.writer import ANY_TEXT, CannotExpress, GrammarWriter, escaped
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
