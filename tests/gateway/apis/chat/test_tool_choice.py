from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.chat.bodies import resolve_tool_choice
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.constraints.constraint_grammar import LARK, check
from penstock.infra.model import modeldir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import Code
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK
from tests.gateway.apis.chat.test_bodies import chat as parsed
from tests.gateway.apis.chat.test_prepare import chat, refusal

DEMO = modeldir.load(modeldir.DEMO)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


TOOLS = [tool("read"), tool("write")]
NAMED = {"type": "function", "function": {"name": "write"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


@pytest.fixture
def calling() -> PrepareContext:
    return PrepareContext(DEMO, ["tiny"], "gw1", parsers=ParserNames("basic", "hermes"))


@pytest.mark.parametrize(
    ("options", "names", "must", "one", "restricts"),
    [
        ({}, ["read", "write"], False, False, False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["read", "write"], False, True, False),
        ({"tool_choice": "none"}, [], False, False, False),
        ({"tool_choice": {"type": "auto"}}, ["read", "write"], False, False, False),
        ({"tool_choice": {"type": "none"}}, [], False, False, False),
        ({"tool_choice": "any"}, ["read", "write"], True, False, True),
        ({"tool_choice": {"type": "required"}}, ["read", "write"], True, False, True),
        ({"tool_choice": "required"}, ["read", "write"], True, False, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["read", "write"], True, True, True),
        ({"tool_choice": NAMED}, ["write"], True, True, True),
        ({"tool_choice": {"type": "function", "name": "read"}}, ["read"], True, True, True),
        ({"tool_choice": allowed("auto", "read")}, ["read"], False, False, True),
        ({"tool_choice": allowed("required", "read", "write")}, ["read", "write"], True, False, True),
        ({"tools": [tool("read", strict=True), tool("write")]}, ["read", "write"], False, False, True),
    ],
)
def test_a_choice_says_what_may_and_must_be_called(
    options: dict[str, Any], names: list[str], must: bool, one: bool, restricts: bool
) -> None:
    body = parsed(**{"tools": TOOLS} | options)
    choice = resolve_tool_choice(body.tool_choice, body.tools, body.parallel_tool_calls)
    assert [each.name for each in choice.tools] == names
    assert (choice.must, choice.one, choice.restricts) == (must, one, restricts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_choice": "required", "tools": None}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "delete"}}}, "delete"),
        ({"tool_choice": {"type": "function", "function": {}}}, "names no tool"),
        ({"tool_choice": allowed("sometimes", "read")}, "mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "mode"),
        ({"tool_choice": "maybe"}, "maybe"),
        ({"tool_choice": {"type": "custom"}}, "custom"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused(
    calling: PrepareContext, options: dict[str, Any], says: str
) -> None:
    error = refusal(chat, calling, **{"tools": TOOLS} | options)
    assert error.code.status == 400
    assert error.param == "tool_choice"
    assert says in error.message


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": [tool("read", strict=True)]},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required", "max_thinking_tokens": 8},
        {"max_thinking_tokens": 8},
        {"thinking_token_budget": 0},
        {"guided_regex": "a/b\\/c\n"},
        {"guided_choice": ["a", 'b"']},
        {"guided_json": {"type": "string"}},
        {"guided_grammar": 'start: "a" x\nx: "b"'},
        {"guided_grammar": 'root ::= "a" | "b"'},
    ],
)
def test_the_whole_answer_gets_a_grammar_that_compiles(calling: PrepareContext, options: dict[str, Any]) -> None:
    request = chat(calling, **options).request
    assert request.constraint is not None
    assert request.constraint.kind == LARK
    assert {CONSTRAINT, CONSTRAINT_LARK} <= {each.name for each in request.sampling.logits_processors}
    check(request.constraint)


def test_effort_none_means_no_reasoning_where_that_can_be_kept(calling: PrepareContext) -> None:
    assert chat(calling, reasoning_effort="none").request.constraint is None
    able = calling._replace(logits_processors=frozenset({CONSTRAINT, CONSTRAINT_LARK}))
    assert chat(able, reasoning_effort="none").request.constraint is not None
    assert chat(able, reasoning_effort="high").request.constraint is None


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"), ({"max_thinking_tokens": 1}, "max_thinking_tokens")],
)
def test_without_a_known_format_nothing_is_forced(calling: PrepareContext, options: dict[str, Any], field: str) -> None:
    error = refusal(chat, calling._replace(parsers=None), **options)
    assert (error.code, error.param) == (Code.unsupported, field)
    assert "--" in error.message  # the flag that names the format


def test_tools_that_may_be_called_freely_cost_nothing(calling: PrepareContext) -> None:
    request = chat(calling, tools=TOOLS).request
    assert request.constraint is None
    assert msgspec.structs.asdict(request.sampling)["logits_processors"] == ()


def test_strict_is_not_part_of_the_prompt(calling: PrepareContext) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"strict": {"type": "string"}}}}
    prompts = [
        chat(calling, tools=[{"type": "function", "function": function | strict}]).request.prompt
        for strict in ({}, {"strict": True}, {"strict": False})
    ]
    assert len(set(prompts)) == 1
