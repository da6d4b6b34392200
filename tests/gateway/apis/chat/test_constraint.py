import json
from typing import Any

import pytest

from penstock.gateway.apis.chat.constraint import MAX_BYTES, MAX_CHOICES, MAX_DEPTH
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.constraints.constraint_grammar import LARK, check
from penstock.schemas.errors import Code
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED, Constraint, GenerateRequest
from tests.gateway.apis.chat.test_prepare import chat, refusal, text

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


MANY_ENDS = {
    "type": "tag", "begin": "a", "end": ["b"] * 500, "content": {"type": "any_text", "excludes": ["b"] * 500},
}  # fmt: skip


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("options", "kind", "meaning"),
    [
        ({"response_format": named(SCHEMA)}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA, "response_format": named(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_choice": ["yes", "no"], "structured_outputs": {"choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
    ],
)
def test_every_spelling_of_a_schema_or_choice_gives_the_constraint(
    context: PrepareContext, options: dict[str, Any], kind: str, meaning: Any
) -> None:
    for request in (chat(context, **options).request, text(context, **options).request):
        assert request.constraint is not None
        assert (request.constraint.kind, json.loads(request.constraint.text)) == (kind, meaning)
        assert CONSTRAINT in [each.name for each in request.sampling.logits_processors]


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"structured_outputs": {"regex": r"\d+"}}, Constraint("regex", r"\d+")),
        ({"guided_regex": r"\d+"}, Constraint("regex", r"\d+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("grammar", 'start: "a"')),
        ({"guided_grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
        ({"regex": r"\d+"}, Constraint("regex", r"\d+")),
        ({"ebnf": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"')),
        ({"grammar": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"')),
        # As the client guidance writes it, for any version of vLLM.
        (
            {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
            Constraint("grammar", 'start: "a"'),
        ),
    ],
)
def test_expressions_and_grammars_are_passed_on(
    context: PrepareContext, options: dict[str, Any], constraint: Constraint
) -> None:
    assert text(context, **options).request.constraint == constraint


@pytest.mark.parametrize("options", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_without_a_constraint_nothing_is_asked_of_workers(context: PrepareContext, options: dict[str, Any]) -> None:
    request: GenerateRequest = chat(context, **options).request
    assert request.constraint is None
    assert request.sampling.logits_processors == ()


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"response_format": named(SCHEMA), "guided_regex": "a"}, "guided_regex", "only one"),
        ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": "b"}}, "guided_grammar", "only one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "only one"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
        ({"guided_json": nested(MAX_DEPTH)}, "guided_json", str(MAX_DEPTH)),
        ({"guided_regex": "a" * (MAX_BYTES + 1)}, "guided_regex", str(MAX_BYTES)),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", str(MAX_CHOICES)),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format.json_schema.schema",
            "write the schema there",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar", "only one"),
        ({"json_schema": "[]"}, "json_schema", "object"),
        ({"structural_tag": "nothing"}, "structural_tag", "not JSON"),
        ({"structural_tag": {"structures": []}}, "structural_tag", "structures"),
        ({"structural_tag": {"format": {"type": "grammar", "grammar": "x"}}}, "structural_tag", "not supported"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "a" * MAX_BYTES}}}, "structural_tag", "limit"),
        ({"structural_tag": {"format": MANY_ENDS}}, "structural_tag", str(MAX_BYTES)),
        ({"structured_outputs": {"structural_tag": {"format": 3}}}, "structured_outputs.structural_tag", "format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"best_of": 2}, "best_of", "unless it equals n"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"grammar_lazy": True}, "grammar_lazy", "not supported"),
        ({"logprob_token_ids": [7]}, "logprob_token_ids", "up to 20"),
        ({"logits_processors": [{"name": CONSTRAINT}]}, "logits_processors[0].name", "no worker"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_field(
    context: PrepareContext, options: dict[str, Any], field: str, says: str
) -> None:
    error = refusal(text, context, **options)
    assert error.code.status == 400
    assert error.param == field
    assert says in error.message


def test_a_fleet_without_the_library_refuses_and_names_the_extra(context: PrepareContext) -> None:
    without = context._replace(logits_processors=frozenset({"temperature"}))
    error = refusal(chat, without, response_format=named(SCHEMA))
    assert error.code is Code.unsupported
    assert "penstock[structured]" in error.message
    assert chat(context._replace(logits_processors=frozenset({CONSTRAINT})), guided_json=SCHEMA).request.constraint


def test_constraints_that_are_known_and_not_served_are_refused_in_chats(context: PrepareContext) -> None:
    for options in ({"best_of": 3}, {"use_beam_search": True}, {"web_search_options": {}}):
        error = refusal(chat, context, **options)
        assert (error.code, error.param) == (Code.unsupported, next(iter(options)))
    assert chat(context, best_of=1, use_beam_search=False, web_search_options=None).request.constraint is None


def test_a_chat_may_ask_for_an_echo_where_there_is_nothing_to_repeat(context: PrepareContext) -> None:
    assert chat(context, echo=True, logprob_token_ids=[])
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    error = refusal(chat, context, echo=True, messages=said)
    assert (error.code, error.param) == (Code.unsupported, "echo")
    assert chat(context, echo=False, messages=said)


CALL = {"begin": "<function=get>", "end": "</function>", "schema": {"type": "object", "required": ["a"]}}
OLDER = {"type": "structural_tag", "structures": [CALL], "triggers": ["<function="]}
NEWER = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<function="],
        "tags": [CALL | {"content": {"type": "json_schema", "json_schema": CALL["schema"]}}],
    }
}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": OLDER},
        {"response_format": {"type": "structural_tag", **NEWER}},
        {"structural_tag": json.dumps(OLDER)},
        {"structural_tag": NEWER},
        {"structured_outputs": {"structural_tag": json.dumps(NEWER)}},
    ],
)
@pytest.mark.parametrize("call", [chat, text])
def test_a_structural_tag_becomes_a_grammar(context: PrepareContext, options: dict[str, Any], call: Any) -> None:
    request = call(context, **options).request
    assert request.constraint.kind == LARK
    check(request.constraint)
    assert {CONSTRAINT, CONSTRAINT_LARK} <= {each.name for each in request.sampling.logits_processors}


SPECIAL = "<|im_end|>"


@pytest.mark.parametrize(
    "options",
    [
        {"guided_choice": ["a", f"b{SPECIAL}"]},
        {"guided_regex": "<\\|im_end\\|>"},
        {"guided_grammar": f'start: "{SPECIAL}"'},
        {"guided_json": {"enum": [SPECIAL]}},
        {"guided_json": {"properties": {SPECIAL: {}}}},
        {"response_format": named({"properties": {"a": {"const": f"x{SPECIAL}"}}})},
        {"response_format": named({"items": {"pattern": "<\\|im_end\\|>"}})},
    ],
)
def test_only_workers_that_can_write_a_special_tokens_text_get_a_constraint_with_it(
    context: PrepareContext, options: dict[str, Any]
) -> None:
    """vLLM, SGLang and TensorRT-LLM would write the token itself, and the output ended there."""
    for call in (chat, text):
        request = call(context, **options).request
        assert CONSTRAINT_SPELLED in {each.name for each in request.sampling.logits_processors}
        others = context._replace(logits_processors=frozenset({CONSTRAINT, CONSTRAINT_LARK}))
        error = refusal(call, others, **options)
        assert error.code is Code.unsupported
        assert error.param is not None
        assert error.param.partition(".")[0] in options
        assert SPECIAL in error.message
        able = context._replace(logits_processors=frozenset({CONSTRAINT, CONSTRAINT_LARK, CONSTRAINT_SPELLED}))
        assert call(able, **options).request.constraint is not None


def test_a_description_with_a_special_tokens_text_asks_nothing_of_workers(context: PrepareContext) -> None:
    schema = {"description": SPECIAL, "properties": {"a": {"title": SPECIAL, "default": SPECIAL}}}
    names = {each.name for each in chat(context, guided_json=schema).request.sampling.logits_processors}
    assert CONSTRAINT_SPELLED not in names
