"""Parts of tools' schemas that the grammar library cannot compile: ignored, or refused by their tool and place."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway.base.request_bodies import CHAT, MESSAGE, RESPONSE, PrepareContext
from penstock.gateway.service.preparation import RequestPreparer
from penstock.infra.constraints.constraint_grammar import check
from penstock.infra.model import modeldir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import Code, ServingError

ZOD = {"type": "string", "pattern": r"^(?!\.)[a-z@.]+$"}  # as zod 4 writes it for an e-mail address
MODEL = modeldir.load(modeldir.DEMO)


class Fleet:
    embedding_models = SimpleNamespace(known={})
    diffusion_models = SimpleNamespace(known={})

    def __init__(self, tools: str) -> None:
        context = PrepareContext(MODEL, ["m"], "gw1", parsers=ParserNames("basic", tools))
        self.only_context = lambda: context
        self.longest = context.max_model_len

    def sight(self, caller: Any) -> Any:
        return caller.sees


class Conversations:
    async def history(self, previous: str | None, sees: str | None) -> Any:
        return SimpleNamespace(turns=[], size=0, ancestors=())

    async def without_references(self, body: Any, sees: str | None) -> Any:
        return body, 0


class Settings:
    default_deadline_s = 60.0
    always_no_store = False
    strict_options = False
    cell = -1
    template_cpu_s = 1.0
    fallback: tuple[str, ...] = ()


@pytest.fixture(params=["hermes", "qwen3_coder"])
async def preparer(request: pytest.FixtureRequest) -> AsyncIterator[RequestPreparer]:
    fleet, settings = Fleet(request.param), Settings()
    made = RequestPreparer(fleet, None, Conversations(), "gw1", settings)  # type: ignore[arg-type]
    yield made
    await made.close()


def tool(name: str, properties: dict[str, Any], *, strict: bool = False, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def chat(tools: list[dict[str, Any]], **options: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, **options}
    return json.dumps(body).encode()


FREE = tool("mail", {"to": ZOD, "count": {"type": "integer", "maximum": 7}, "list": {"items": ZOD}})
FINE = tool("fine", {"x": {"type": "integer"}}, strict=True, required=["x"], additionalProperties=False)
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [FREE, tool("other", {})], "tool_choice": "required"},
        {"tools": [FREE, FINE]},  # auto beside a strict tool
        {"tools": [FREE], "response_format": SCHEMA},
        {"tools": [FREE], "tool_choice": {"type": "function", "function": {"name": "mail"}}},
        {"tools": [tool("mail", {"n": {"minimum": 5, "maximum": 1, "type": "integer"}}, required=["n"])],
         "tool_choice": "required"},
        {"tools": [tool("mail", {"a": {"$ref": "#/gone"}, "b": {"anyOf": [ZOD, {"type": "null"}]}})],
         "tool_choice": "required"},
        {"tools": [tool("mail", {"a": {"type": "string"}}, required=None)], "tool_choice": "required"},
        {"tools": [tool("mail", {"a": {"type": "strnig"}}, patternProperties={"(": {}})], "tool_choice": "required"},
    ],
)  # fmt: skip
async def test_tools_that_are_not_strict_lose_only_what_cannot_be_compiled(
    preparer: RequestPreparer, options: dict[str, Any]
) -> None:
    prepared = await preparer.prepare(CHAT, chat(**options))
    constraint = prepared.request.constraint
    assert constraint is not None
    check(constraint)
    assert "(?!" not in constraint.text


async def test_what_can_be_compiled_of_such_a_tool_still_holds() -> None:
    preparer = RequestPreparer(Fleet("hermes"), None, None, "gw1", Settings())  # type: ignore[arg-type]
    try:
        prepared = await preparer.prepare(CHAT, chat([FREE], tool_choice="required"))
        assert prepared.request.constraint is not None
        assert '"maximum":7' in prepared.request.constraint.text
        assert '"to":{"type":"string"}' in prepared.request.constraint.text
    finally:
        await preparer.close()


STRICT = tool("mail", {"a": {"type": "object", "properties": {"to": ZOD}}}, strict=True)


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_strict_tools_refusal_names_tool_and_place(choice: str) -> None:
    preparer = RequestPreparer(Fleet("hermes"), None, None, "gw1", Settings())  # type: ignore[arg-type]
    try:
        with pytest.raises(ServingError) as refusal:
            await preparer.prepare(CHAT, chat([FINE, FREE, STRICT], tool_choice=choice))
        assert (refusal.value.code, refusal.value.param) == (Code.invalid_request, "tools")
        assert "tool 'mail', parameters.properties.a.properties.to" in str(refusal.value)
    finally:
        await preparer.close()


BAD = {"type": "object", "properties": {"to": ZOD}}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
         "response_format.json_schema.schema"),
        (CHAT, {"guided_regex": "(?!a)b"}, "guided_regex"),
        (CHAT, {"structured_outputs": {"grammar": 'root ::= "a" gone'}}, "structured_outputs.grammar"),
        (CHAT, {"grammar": 'x ::= "a"'}, "grammar"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}, "tools": [FREE]},
         "response_format.json_schema.schema"),
        ("text", {"guided_json": BAD, "prompt": "hi"}, "guided_json"),
        (RESPONSE, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
         "text.format.schema"),
        (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": BAD}}, "max_tokens": 9},
         "output_config.format.schema"),
    ],
)  # fmt: skip
async def test_every_error_about_a_constraint_has_its_param(endpoint: str, body: dict[str, Any], param: str) -> None:
    preparer = RequestPreparer(Fleet("hermes"), None, Conversations(), "gw1", Settings())  # type: ignore[arg-type]
    messages = {"messages": [{"role": "user", "content": "hi"}]} if endpoint in (CHAT, MESSAGE) else {}
    try:
        with pytest.raises(ServingError) as refusal:
            await preparer.prepare(endpoint, json.dumps({"model": "m", **messages, **body}).encode())
        assert (refusal.value.code, refusal.value.param) == (Code.invalid_request, param)
    finally:
        await preparer.close()


async def test_messages_with_any_tool_ignore_a_pattern_too(preparer: RequestPreparer) -> None:
    tools = [{"name": "mail", "input_schema": FREE["function"]["parameters"]}]
    body = {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools,
        "tool_choice": {"type": "any"},
    }  # fmt: skip
    prepared = await preparer.prepare(MESSAGE, json.dumps(body).encode())
    assert prepared.request.constraint is not None
    check(prepared.request.constraint)
