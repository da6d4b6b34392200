"""The constraint on a whole chat answer: reasoning and its budget, tool calls, and what the content must match."""

import re

import msgspec

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest
from penstock.gateway.apis.chat.tool_choice import ToolChoice, resolve_tool_choice
from penstock.gateway.base.errors import invalid, unsupported
from penstock.gateway.base.prepare_context import PrepareContext
from penstock.gateway.grammars.answers import Calls, Reasoning, write_answer
from penstock.gateway.grammars.calls import Tool, call_grammar
from penstock.gateway.grammars.structural_tags import BadTag, write_tags
from penstock.gateway.grammars.writer import CannotExpress, GrammarWriter
from penstock.infra.constraints.constraints import CHOICE, GRAMMAR, JSON_SCHEMA, LARK, around, quoted
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.registry import format_tokens
from penstock.schemas.requests import CONSTRAINT_LARK, Constraint, Parsing

STRUCTURAL_TAG = "structural_tag"  # a kind that becomes a grammar here, and never leaves the gateway

Asked = tuple[str, Constraint]  # a constraint, and the field that asks for it

_SLASH = re.compile(r"(\\.)|/|\n", re.S)


def whole_answer(
    body: ChatCompletionRequest, asked: Asked | None, parsing: Parsing | None, context: PrepareContext
) -> tuple[str, Constraint | None, tuple[Tool, ...]]:
    """The field to name in an error, the constraint on an answer, and the tools that are a part of it.

    Args:
        asked: on the content.
    Raises:
        ServingError: the model has no known format for what is asked.
    """
    budget = None if _within_content(parsing) else _budget(body, context)
    if asked is None and budget is None and not body.tools:
        return "", None, ()
    choice = resolve_tool_choice(body.tool_choice, body.tools, body.parallel_tool_calls)
    if context.loosened:
        choice = choice._replace(tools=tuple(each.loosened(context.loosened) for each in choice.tools))
    reasoning = _reasoning(parsing, budget)
    called = parsing.tools if parsing is not None else ""
    if choice.restricts and not called:
        if choice.must:
            raise unsupported(
                "tool_choice",
                "this model's format of tool calls is not known, so calls cannot be forced; start its workers with "
                "--tool-call-parser",
            )
        choice = ToolChoice()  # what the model writes is shown as text, whichever tools there are
    if budget is not None and reasoning is None:
        if body.max_thinking_tokens is None and body.thinking_token_budget is None:
            budget = None  # only the template knows what the effort means
        else:
            raise unsupported(
                "max_thinking_tokens",
                "this model's format of reasoning is not known, so it cannot be limited; start its workers with "
                "--reasoning-parser",
            )
    with_calls = bool(choice.tools and called and (choice.restricts or (asked and asked[1].kind == JSON_SCHEMA)))
    if not with_calls and (asked is None or reasoning is None) and budget is None:
        return (*asked, ()) if asked is not None else ("", None, ())
    field = asked[0] if asked is not None else "tool_choice" if with_calls else "max_thinking_tokens"
    assert parsing is not None
    try:
        text = _written(asked, choice if with_calls else None, reasoning, parsing, context)
        return field, text, choice.tools if with_calls else ()
    except BadTag as error:
        raise invalid(field, f"{field}: {error}") from None
    except CannotExpress as error:
        raise unsupported("tools" if with_calls else field, str(error)) from None


def tags_alone(constraint: Constraint, field: str, context: PrepareContext) -> Constraint:
    """The grammar of an output that has a structural tag's parts and nothing around them.

    Raises:
        ServingError: it is not of the form.
    """
    writer = GrammarWriter(context.model.added_tokens.get, list(context.model.added_tokens))
    try:
        return Constraint(LARK, writer.text(write_tags(writer, msgspec.json.decode(constraint.text))))
    except BadTag as error:
        raise invalid(field, f"{field}: {error}") from None
    except CannotExpress as error:
        raise unsupported(field, f"{field}: {error}") from None


def _budget(body: ChatCompletionRequest, context: PrepareContext) -> int | None:
    """Tokens of reasoning; None: no limit."""
    given = [count for count in (body.max_thinking_tokens, body.thinking_token_budget) if count is not None]
    if given:
        return min(given)
    can = context.logits_processors is not None and CONSTRAINT_LARK in context.logits_processors
    return 0 if can and body.reasoning_effort == "none" else None


def _within_content(parsing: Parsing | None) -> bool:
    """The prompt ends within the content, so that no reasoning follows."""
    return parsing is not None and parsing.prefilled and not parsing.thinking


def _reasoning(parsing: Parsing | None, budget: int | None) -> Reasoning | None:
    if _within_content(parsing):
        return None
    thoughts = TABLE.thoughts(parsing.reasoning) if parsing is not None else None
    if parsing is None or thoughts is None:
        return None
    return Reasoning(None if thoughts.channels else thoughts, parsing.thinking, budget)


def _written(
    asked: Asked | None,
    choice: ToolChoice | None,
    reasoning: Reasoning | None,
    parsing: Parsing,
    context: PrepareContext,
) -> Constraint:
    added = context.model.added_tokens

    def token_id(mark: str) -> int | None:
        return added.get(mark)

    marks = format_tokens(parsing, added)
    if asked is not None and asked[1].kind == STRUCTURAL_TAG:
        marks = (*marks, *added)
    writer = GrammarWriter(token_id, marks)
    content = None if asked is None or (choice is not None and choice.must) else _content(writer, asked[1])
    calls = None
    if choice is not None:
        calls = Calls(call_grammar(parsing.tools, token_id), choice.tools, choice.must, choice.one)
    text = write_answer(writer, content, calls, reasoning)
    if content == "@answer":
        assert asked is not None
        text = around(text, asked[1].text)
    return Constraint(LARK, text)


def _content(writer: GrammarWriter, constraint: Constraint) -> str:
    """A rule for what the content must match."""
    kind, text = constraint.kind, constraint.text
    if kind == JSON_SCHEMA:
        return writer.json(msgspec.json.decode(text))
    if kind == STRUCTURAL_TAG:
        return write_tags(writer, msgspec.json.decode(text))
    if kind == CHOICE:
        return writer.terminal(" | ".join(map(quoted, msgspec.json.decode(text))))
    if kind == GRAMMAR:
        return "@answer"
    pattern = _SLASH.sub(lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], text)
    return writer.rule(f"/{pattern}/")
