"""From a body's options to the constraint on its output: response_format, structured_outputs, guided_*. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest, ToolChoice, resolve_tool_choice
from penstock.gateway.base.request_bodies import PrepareContext, invalid, unsupported
from penstock.gateway.grammars.answers import BadTag, CallRules, Reasoning, write_answer, write_tags
from penstock.gateway.grammars.calls import Tool, call_grammar
from penstock.gateway.grammars.writer import MAX_BYTES, CannotExpress, GrammarWriter, LargeGrammar
from penstock.infra.constraints.constraint_grammar import CHOICE, GRAMMAR, JSON_SCHEMA, LARK, REGEX, around, quoted
from penstock.infra.constraints.lark_expression import slashed
from penstock.infra.constraints.schema_rewriting import texts_of
from penstock.infra.text.parsers.families import TABLE
from penstock.infra.text.parsers.registry import format_tokens
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED, Constraint, Parsing

STRUCTURAL_TAG = "structural_tag"  # a kind that becomes a grammar here, and never leaves the gateway

Asked = tuple[str, Constraint]  # a constraint, and the field that asks for it


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
    called = parsing.tools if parsing is not None else ""
    if context.inputs and choice.tools:
        choice = _with_inputs(choice, context, restricts=bool(called))
    if context.loosened:
        choice = choice._replace(tools=tuple(each.loosened(context.loosened) for each in choice.tools))
    reasoning = _reasoning(parsing, budget)
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
    except (BadTag, LargeGrammar) as error:
        raise invalid(field, f"{field}: {error}") from None
    except CannotExpress as error:
        raise unsupported("tools" if with_calls else field, str(error)) from None


def _with_inputs(choice: ToolChoice, context: PrepareContext, *, restricts: bool) -> ToolChoice:
    """A choice of tools whose texts match what their client wrote.

    Args:
        restricts: calls can be constrained where the model is free to make them.
    """
    found = tuple(
        each._replace(parameters=own.schema, strict=True, given=own.given)
        if (own := context.inputs.get(each.name)) is not None
        else each
        for each in choice.tools
    )
    able = context.logits_processors is not None and CONSTRAINT_LARK in context.logits_processors
    restricts = restricts and able and any(each.given is not None for each in found)
    return choice._replace(tools=found, restricts=choice.restricts or restricts)


def tags_alone(constraint: Constraint, field: str, context: PrepareContext) -> Constraint:
    """The grammar of an output that has a structural tag's parts and nothing around them.

    Raises:
        ServingError: it is not of the form.
    """
    writer = GrammarWriter(context.model.added_tokens.get, list(context.model.added_tokens))
    try:
        return Constraint(LARK, writer.text(write_tags(writer, msgspec.json.decode(constraint.text))))
    except (BadTag, LargeGrammar) as error:
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
    content = None if asked is None or (choice is not None and choice.must) else _content_rule(writer, asked[1])
    calls = None
    if choice is not None:
        calls = CallRules(call_grammar(parsing.tools, token_id), choice.tools, choice.must, choice.one)
    text = write_answer(writer, content, calls, reasoning)
    if content == "@answer":
        assert asked is not None
        text = around(text, asked[1].text)
    return Constraint(LARK, text)


def _content_rule(writer: GrammarWriter, constraint: Constraint) -> str:
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
    return writer.rule(f"/{slashed(text)}/")


MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 4_096

ANY_OBJECT = b'{"type":"object"}'
NOT_SPELLED = (
    "the constraint has the text of the special token {} in it, and no worker of this model can write that in ordinary "
    "tokens: workers of vLLM, SGLang and TensorRT-LLM would write the token itself"
)
NOT_HERE = (
    "no worker of this model applies structured output: native and mock workers need llguidance, "
    "pip install 'penstock[structured]'; a server that runs already needs --url-api chat"
)


class Wanted(NamedTuple):
    """What the output of a request must match.

    Attributes:
        field: of the body, that asks for it.
        marks: reserved logits processors that the request names.
        asked: of the content, with its field; None: anything.
        tools: that are a part of it.
    """

    constraint: Constraint
    field: str
    marks: tuple[str, ...]
    asked: Asked | None = None
    tools: tuple[Tool, ...] = ()


def resolve_constraint(
    body: ChatCompletionRequest | CompletionRequest, parsing: Parsing | None, context: PrepareContext
) -> Wanted | None:
    """What the body asks the output to match; None: nothing.

    Args:
        parsing: of the answer.
    Raises:
        ServingError: several constraints, one beyond a limit, one that the model's formats cannot express, or no worker
            applies any.
    """
    if context.carries_chat:
        return None  # the server applies it
    asked = asked_of_content(body)
    field, constraint = asked if asked is not None else ("", None)
    tools: tuple[Tool, ...] = ()
    if isinstance(body, ChatCompletionRequest):
        try:
            field, constraint, tools = whole_answer(body, asked, parsing, context)
        except ServingError as error:
            if not context.inputs or error.code != Code.unsupported:
                raise
            # The model is told what texts must match. That has to do where its format cannot keep it.
            return resolve_constraint(body, parsing, context._replace(inputs={}))
    if constraint is None:
        return None
    if constraint.kind == STRUCTURAL_TAG:
        constraint = tags_alone(constraint, field, context)
    if (size := len(constraint.text.encode())) > MAX_BYTES:
        raise invalid(field, f"{field} takes {size} bytes as a grammar; the limit is {MAX_BYTES}")
    marks: tuple[str, ...] = (CONSTRAINT, CONSTRAINT_LARK) if constraint.kind == LARK else (CONSTRAINT,)
    able = context.logits_processors
    refused = NOT_HERE if able is not None and not able.issuperset(marks) else ""
    if not refused and (special := _special_text(asked, tools, context)):
        marks += (CONSTRAINT_SPELLED,)
        if able is not None and CONSTRAINT_SPELLED not in able:
            refused = NOT_SPELLED.format(repr(special))
    if refused and context.inputs:
        return resolve_constraint(body, parsing, context._replace(inputs={}))
    if refused:
        raise unsupported(field, refused)
    return Wanted(constraint, field, marks, asked, tools)


def _special_text(asked: Asked | None, tools: Sequence[Tool], context: PrepareContext) -> str:
    """The first special token whose text a constraint has in it; "": none."""
    special = [each for each in context.model.added_tokens if len(each) > 2 and each[0] in "<[" and each[-1] in ">]"]
    texts = [text for tool in tools for text in (tool.name, *texts_of(tool.parameters))]
    texts += [text for tool in tools if tool.given for text in (tool.given.text, tool.given.text.replace("\\", ""))]
    if asked is not None:
        _, (kind, text) = asked[0], msgspec.structs.astuple(asked[1])
        if kind in (JSON_SCHEMA, CHOICE):
            value = msgspec.json.decode(text)
            texts += value if kind == CHOICE else texts_of(value)
        elif kind in (REGEX, GRAMMAR):
            texts += [text, text.replace("\\", "")]
    return next((each for each in special if any(each in text for text in texts)), "")


def asked_of_content(body: ChatCompletionRequest | CompletionRequest) -> Asked | None:
    """What the content must match, and the field that says so.

    Several fields may say the same: clients write a constraint under each name that some server's version knows.

    Raises:
        ServingError: several fields say different things.
    """
    found = [
        *_from_response_format(body), *_from_structured_outputs(body), *_from_guided(body), *_from_other_names(body)
    ]  # fmt: skip
    if second := next((field for field, constraint in found if constraint != found[0][1]), ""):
        first = found[0][0]
        raise invalid(second, f"{second} and {first} are given; the output can match only one of them")
    return found[0] if found else None


Found = list[Asked]


def _from_response_format(body: ChatCompletionRequest | CompletionRequest) -> Found:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    field = "response_format"
    if wanted.type == "structural_tag":
        tag = {"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}
        return [(field, _structural_tag(field, {key: value for key, value in tag.items() if value is not None}))]
    if wanted.type not in ("json_object", "json_schema"):
        raise unsupported(
            field,
            f"response_format type {wanted.type[:40]!r} is not supported; use 'text', 'json_object', 'json_schema' or "
            "'structural_tag'",
        )
    if wanted.schema is not None:
        return [(f"{field}.schema", _json(f"{field}.schema", wanted.schema))]
    if wanted.type == "json_object":
        return [(field, Constraint(JSON_SCHEMA, ANY_OBJECT.decode()))]
    field = "response_format.json_schema"
    if wanted.json_schema is None:
        raise invalid(field, f"{field} is missing")
    schema = wanted.json_schema.schema
    if schema is None and wanted.json_schema.name is None:  # many write the schema one level too high
        raise invalid(f"{field}.schema", f"{field}.schema is missing; write the schema there, and its name beside it")
    return [(f"{field}.schema", _json(f"{field}.schema", {"type": "object"} if schema is None else schema))]


def _from_structured_outputs(body: ChatCompletionRequest | CompletionRequest) -> Found:
    options, at = body.structured_outputs, "structured_outputs"
    if options is None:
        return []
    found = _each(at + ".", options.json, options.regex, options.choice, options.grammar)
    if options.json_object:
        found.append((f"{at}.json_object", Constraint(JSON_SCHEMA, ANY_OBJECT.decode())))
    if options.structural_tag is not None:
        found.append((f"{at}.structural_tag", _structural_tag(f"{at}.structural_tag", options.structural_tag)))
    if not found:
        raise invalid(at, f"{at} needs one of json, json_object, regex, choice, grammar and structural_tag")
    return found


def _from_guided(body: ChatCompletionRequest | CompletionRequest) -> Found:
    return _each("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _from_other_names(body: ChatCompletionRequest | CompletionRequest) -> Found:
    """Options of SGLang's and llama.cpp's."""
    found: Found = []
    if body.json_schema is not None:
        found.append(("json_schema", _json("json_schema", body.json_schema)))
    if body.regex is not None:
        found.append(("regex", Constraint(REGEX, body.regex)))
    found += [
        (name, Constraint(GRAMMAR, text))
        for name, text in (("ebnf", body.ebnf), ("grammar", body.grammar))
        if text is not None
    ]
    if body.structural_tag is not None:
        found.append(("structural_tag", _structural_tag("structural_tag", body.structural_tag)))
    return found


def _structural_tag(field: str, tag: dict[str, Any] | str) -> Constraint:
    """
    Raises:
        ServingError: neither an object nor its JSON, or nested too deeply.
    """
    text = _json(field, tag).text
    if text in ("true", "false"):
        raise invalid(field, f"{field} must be an object")
    if len(text) > MAX_BYTES:
        raise invalid(field, f"{field} has {len(text)} characters; the limit is {MAX_BYTES}")
    return Constraint(STRUCTURAL_TAG, text)


def _each(
    prefix: str, schema: dict[str, Any] | str | bool | None, regex: str | None, choice: list[str] | None,
    grammar: str | None,
) -> Found:  # fmt: skip
    found = []
    if schema is not None:
        found.append((f"{prefix}json", _json(f"{prefix}json", schema)))
    if regex is not None:
        found.append((f"{prefix}regex", Constraint(REGEX, regex)))
    if choice is not None:
        if not 0 < len(choice) <= MAX_CHOICES:
            raise invalid(f"{prefix}choice", f"{prefix}choice has {len(choice)} texts; it takes 1 to {MAX_CHOICES}")
        found.append((f"{prefix}choice", Constraint(CHOICE, msgspec.json.encode(choice).decode())))
    if grammar is not None:
        found.append((f"{prefix}grammar", Constraint(GRAMMAR, grammar)))
    return found


def _json(field: str, schema: dict[str, Any] | str | bool) -> Constraint:
    """A schema as an object, or as its JSON.

    Raises:
        ServingError: not a schema, or nested too deeply.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(field, f"{field} is not JSON: {error}"[:300]) from None
    if not isinstance(schema, dict | bool):
        raise invalid(field, f"{field} must be a JSON schema (an object)")
    if _deeper_than(schema, MAX_DEPTH):
        raise invalid(field, f"{field} is nested more than {MAX_DEPTH} levels deep")
    return Constraint(JSON_SCHEMA, msgspec.json.encode(schema).decode())


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
