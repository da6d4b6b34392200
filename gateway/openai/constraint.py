"""From a body's options to the constraint on its output: response_format, structured_outputs, guided_*. Pure."""

from typing import Any

import msgspec

from gateway.openai.answer_grammar import Asked, whole_answer
from gateway.openai.errors import invalid, unsupported
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from infra.model.constraints import CHOICE, GRAMMAR, JSON_SCHEMA, LARK, REGEX
from schemas.requests import CONSTRAINT, CONSTRAINT_LARK, Constraint, Parsing

MAX_BYTES = 196_608  # of a constraint's text
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 4_096

ANY_OBJECT = b'{"type":"object"}'
NOT_HERE = (
    "no worker of this model applies structured output: native and mock workers need llguidance, "
    "pip install 'penstock[structured]'"
)


def resolve_constraint(
    body: ChatCompletionRequest | CompletionRequest, parsing: Parsing | None, context: PrepareContext
) -> Constraint | None:
    """What the body asks the output to match; None: nothing.

    Args:
        parsing: of the answer.
    Raises:
        ServingError: several constraints, one beyond a limit, one that the model's formats cannot express, or no worker
            applies any.
    """
    asked = _content(body)
    field, constraint = asked if asked is not None else ("", None)
    if isinstance(body, ChatCompletionRequest):
        field, constraint = whole_answer(body, asked, parsing, context)
    if constraint is None:
        return None
    if (size := len(constraint.text.encode())) > MAX_BYTES:
        raise invalid(field, f"{field} takes {size} bytes as a grammar; the limit is {MAX_BYTES}")
    if context.logits_processors is not None and not context.logits_processors.issuperset(marks(constraint)):
        raise unsupported(field, NOT_HERE)
    return constraint


def marks(constraint: Constraint) -> tuple[str, ...]:
    """The reserved logits processors that a request with this constraint names."""
    return (CONSTRAINT, CONSTRAINT_LARK) if constraint.kind == LARK else (CONSTRAINT,)


def _content(body: ChatCompletionRequest | CompletionRequest) -> Asked | None:
    """What the content must match, and the field that says so.

    Raises:
        ServingError: several fields do.
    """
    found = [*_from_response_format(body), *_from_structured_outputs(body), *_from_guided(body)]
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second} and {first} are given; the output can match only one of them")
    return found[0] if found else None


Found = list[Asked]


def _from_response_format(body: ChatCompletionRequest | CompletionRequest) -> Found:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", Constraint(JSON_SCHEMA, ANY_OBJECT.decode()))]
    if wanted.type != "json_schema":
        raise unsupported(
            "response_format",
            f"response_format type {wanted.type[:40]!r} is not supported; use 'text', 'json_object' or 'json_schema'",
        )
    field = "response_format.json_schema"
    if wanted.json_schema is None:
        raise invalid(field, f"{field} is missing")
    schema = wanted.json_schema.schema
    return [(f"{field}.schema", _json(f"{field}.schema", {"type": "object"} if schema is None else schema))]


def _from_structured_outputs(body: ChatCompletionRequest | CompletionRequest) -> Found:
    options, at = body.structured_outputs, "structured_outputs"
    if options is None:
        return []
    found = _each(at + ".", options.json, options.regex, options.choice, options.grammar)
    if options.json_object:
        found.append((f"{at}.json_object", Constraint(JSON_SCHEMA, ANY_OBJECT.decode())))
    if not found:
        raise invalid(at, f"{at} needs one of json, json_object, regex, choice and grammar")
    return found


def _from_guided(body: ChatCompletionRequest | CompletionRequest) -> Found:
    return _each("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


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
