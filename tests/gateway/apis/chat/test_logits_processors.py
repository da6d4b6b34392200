"""The request field ``logits_processors``: its limits, what of it reaches the worker, what is refused at once."""

import json
from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.chat.bodies import MAX_PROCESSORS
from penstock.gateway.apis.chat.prepare_chat import (
    MAX_PROCESSOR_BYTES,
    PreparedRequest,
    prepare_chat,
    prepare_completion,
)
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import LogitsProcessor

NOW = 1_700_000_000 * 10**9
ANY = {"name": "temperature", "args": {"temperature": 0.5}}


def asked(context: PrepareContext, processors: Any, *, chat: bool = True) -> tuple[LogitsProcessor, ...]:
    body: dict[str, Any] = {"model": "tiny", "logits_processors": processors}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    prepared = (prepare_chat if chat else prepare_completion)(
        json.dumps(body).encode(), context, now_ns=NOW, request_id="r"
    )
    assert isinstance(prepared, PreparedRequest)
    return prepared.request.sampling.logits_processors


def refusal(context: PrepareContext, processors: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        asked(context, processors)
    return caught.value


@pytest.mark.parametrize("chat", [True, False])
def test_names_and_arguments_reach_the_request_in_their_order(context: PrepareContext, chat: bool) -> None:
    args = {"tokens": [1, 2], "text": "ü\n", "deep": {"a": [None, True, 1.5, -3]}}
    given = [ANY, {"name": "x.y-z_1", "args": args}, {"name": "bare"}, {"name": "null", "args": None}, ANY]
    found = asked(context, given, chat=chat)
    assert [each.name for each in found] == ["temperature", "x.y-z_1", "bare", "null", "temperature"]
    assert json.loads(found[1].args) == args
    assert found[2:4] == (LogitsProcessor("bare"), LogitsProcessor("null"))


@pytest.mark.parametrize("given", [None, []])
def test_none_are_none(context: PrepareContext, given: Any) -> None:
    assert asked(context, given) == ()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([ANY] * (MAX_PROCESSORS + 1), "logits_processors"),
        ([{"name": ""}], "logits_processors[0].name"),
        ([{"name": "n" * 65}], "logits_processors[0].name"),
        ([{"args": {}}], "logits_processors[0]"),
        ([{"name": "a", "arguments": {}}], "logits_processors[0]"),
        ([{"name": "a", "args": [1]}], "logits_processors[0].args"),
        (["temperature"], "logits_processors[0]"),
        ({"name": "a"}, "logits_processors"),
        ([{"name": "a", "args": {"text": "x" * MAX_PROCESSOR_BYTES}}], "logits_processors"),
        ([{"name": "a", "args": {"t": "x" * (MAX_PROCESSOR_BYTES // 8)}}] * 8, "logits_processors"),
    ],
)
def test_what_is_too_much_or_of_another_shape_is_refused(context: PrepareContext, given: Any, field: str) -> None:
    error = refusal(context, given)
    assert (error.code, error.param) == (Code.invalid_request, field)


def test_the_limit_of_the_arguments_is_named_and_can_be_reached(context: PrepareContext) -> None:
    def full(spare: int) -> Any:
        return [{"name": "a", "args": {"t": "x" * (MAX_PROCESSOR_BYTES - len('{"t":""}') - spare)}}]

    assert len(asked(context, full(0))[0].args) == MAX_PROCESSOR_BYTES
    message = refusal(context, full(-1)).message
    assert str(MAX_PROCESSOR_BYTES) in message
    assert str(MAX_PROCESSOR_BYTES + 1) in message


def test_a_name_that_no_worker_has_is_refused_with_the_known_ones(context: PrepareContext) -> None:
    known = context._replace(logits_processors=frozenset({"temperature", "forced_text"}))
    assert asked(known, [ANY])[0].name == "temperature"
    error = refusal(known, [ANY, {"name": "nobody"}])
    assert (error.code, error.param) == (Code.invalid_request, "logits_processors[1].name")
    assert "'nobody'" in error.message
    assert "forced_text, temperature" in error.message
    assert "registered: none" in refusal(context._replace(logits_processors=frozenset()), [ANY]).message


def test_while_no_worker_is_known_any_name_is_taken(context: PrepareContext) -> None:
    assert context.logits_processors is None
    assert asked(context, [{"name": "anything"}]) == (LogitsProcessor("anything"),)


def test_the_field_is_in_the_api_document() -> None:
    from penstock.gateway.apis.chat.bodies import ChatCompletionRequest

    _, schemas = msgspec.json.schema_components([ChatCompletionRequest])
    assert schemas["ProcessorOptions"]["additionalProperties"] is False
