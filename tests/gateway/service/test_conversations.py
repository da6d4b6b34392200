"""Continuing a response whose client has read its end before its record was stored."""

from collections.abc import Iterator

import msgspec
import pytest

from penstock.gateway.apis.responses.bodies import InputItem, InputPart, ResponsesRequest
from penstock.gateway.apis.responses.record import encode_stored
from penstock.gateway.base.request_bodies import RESPONSE
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.gateway.service import conversations
from penstock.gateway.service.conversations import Conversations
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.done import Done, Outcome, Usage
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import pack_tokens
from tests.gateway.answers import CONTEXT, DETOKENIZER
from tests.gateway.request_log.test_inflight import request_of

ASKED = msgspec.structs.replace(
    request_of(), endpoint=RESPONSE, client_body=encode_stored(ResponsesRequest(model="m", input="hi"))
)
RECORD = Done("r", "m", 1, choices=(Outcome(pack_tokens([]), "stop"),), usage=Usage(1, 0, 0))


class Log:
    """``looks``: what each look-up finds, the last one from then on."""

    def __init__(self, *looks: Done | None) -> None:
        self._looks: Iterator[Done | None] = iter(looks)
        self._last: Done | None = None

    async def find(self, request_id: str, tenant: str | None = None) -> StoredRequest:
        self._last = next(self._looks, self._last)
        return StoredRequest(ASKED, self._last)


def over(log: Log, *, answered: bool, max_bytes: int = 1 << 20) -> Conversations:
    async def has_ended(request: GenerateRequest) -> bool:
        return answered

    async def detokenizer(request: GenerateRequest) -> Detokenizer:
        return DETOKENIZER

    return Conversations(log.find, has_ended, detokenizer, max_bytes)  # type: ignore[arg-type]


async def test_the_record_of_an_answer_that_is_there_is_waited_for() -> None:
    history = await over(Log(None, None, RECORD), answered=True).history("resp_r")
    assert history.ancestors == ("r",)


async def test_a_response_that_runs_cannot_be_continued() -> None:
    with pytest.raises(ServingError, match="has not ended yet") as caught:
        await over(Log(None), answered=False).history("resp_r")
    assert caught.value.code is Code.invalid_request


async def test_a_record_that_does_not_come_is_to_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "RECORD_S", 0.2)
    with pytest.raises(ServingError, match="not stored yet") as caught:
        await over(Log(None), answered=True).history("resp_r")
    assert (caught.value.code, caught.value.retry_after) == (Code.broker_unavailable, 1.0)


RESPONSE_ID = "01932c07-a4b8-7000-8000-0123456789ab"
STORED = msgspec.structs.replace(ASKED, id=RESPONSE_ID)


class Responses(Log):
    async def find(self, request_id: str, tenant: str | None = None) -> StoredRequest:
        if request_id != RESPONSE_ID:
            raise ServingError(Code.request_not_found, "no such request")
        tokens = pack_tokens(DETOKENIZER_TEXT)
        return StoredRequest(STORED, msgspec.structs.replace(RECORD, choices=(Outcome(tokens, "stop"),)))


DETOKENIZER_TEXT = CONTEXT.model.tokenizer.encode("Yes.").ids


def referring(name: str) -> ResponsesRequest:
    return ResponsesRequest(
        model="m", input=[InputItem("item_reference", id=name), InputItem(role="user", content="b")]
    )


async def test_a_reference_is_the_item_of_the_stored_response() -> None:
    talk = over(Responses(), answered=True)
    for name, role, text in ((f"msg_{RESPONSE_ID}_0", "assistant", "Yes."), (f"msg_{RESPONSE_ID}_in0", "user", "hi")):
        found, size = await talk.without_references(referring(name))
        assert isinstance(found.input, list)
        [part] = found.input[0].content or ()
        assert isinstance(part, InputPart)
        assert (found.input[0].role, part.text, found.input[1].content) == (role, text, "b")
        assert size == len(msgspec.json.encode(found.input[0]))
        untyped = ResponsesRequest(model="m", input=[InputItem(id=name), InputItem(role="user", content="b")])
        assert await talk.without_references(untyped) == (found, size)
    plain = ResponsesRequest(model="m", input="hi")
    assert await talk.without_references(plain) == (plain, 0)


@pytest.mark.parametrize(
    "name", ["rs_1", f"msg_{RESPONSE_ID}_9", f"msg_{RESPONSE_ID[:-1]}0_0", "", f"msg_{RESPONSE_ID}"]
)
async def test_a_reference_to_what_is_not_stored_is_refused_by_name(name: str) -> None:
    with pytest.raises(ServingError, match=r"input\[0\].id") as caught:
        await over(Responses(), answered=True).without_references(referring(name))
    assert (caught.value.code, caught.value.param) == (Code.request_not_found, "input[0].id")


async def test_a_previous_response_that_is_not_stored_has_openais_code() -> None:
    """By which clients know to send the whole conversation instead."""
    with pytest.raises(ServingError, match="resp_1 is not known") as caught:
        await over(Responses(), answered=True).history("resp_1")
    assert (caught.value.code, caught.value.param) == (Code.previous_response_not_found, "previous_response_id")
    assert caught.value.code.status == 400


async def test_items_that_are_named_again_and_again_count_each_time() -> None:
    talk = over(Responses(), answered=True, max_bytes=1000)
    name = f"msg_{RESPONSE_ID}_0"
    few = ResponsesRequest(model="m", input=[InputItem("item_reference", id=name)] * 2)
    assert len((await talk.without_references(few))[0].input or ()) == 2
    many = ResponsesRequest(model="m", input=[InputItem("item_reference", id=name)] * 50)
    with pytest.raises(ServingError, match="the limit is 1000") as caught:
        await talk.without_references(many)
    assert caught.value.param == "input"


class Several(Log):
    """``found``: requests whose answers are ``Yes.``; it is noted which were looked for."""

    def __init__(self, *found: GenerateRequest) -> None:
        super().__init__()
        self._found = {request.id: request for request in found}
        self.sought: list[str] = []

    async def find(self, request_id: str, tenant: str | None = None) -> StoredRequest:
        self.sought.append(request_id)
        choices = (Outcome(pack_tokens(DETOKENIZER_TEXT), "stop"),)
        return StoredRequest(self._found[request_id], msgspec.structs.replace(RECORD, choices=choices))


def stored_as(number: int, *given: InputItem) -> GenerateRequest:
    body = encode_stored(ResponsesRequest(model="m", input=list(given)))
    return msgspec.structs.replace(STORED, id=f"{RESPONSE_ID[:-2]}{number:02d}", client_body=body)


async def test_large_items_are_not_collected_beyond_the_limit() -> None:
    large = InputItem("message", role="user", content="x" * 1000)
    log = Several(*(stored_as(number, large) for number in range(64)))
    refers = [InputItem("item_reference", id=f"msg_{RESPONSE_ID[:-2]}{number:02d}_in0") for number in range(64)]
    with pytest.raises(ServingError, match="the limit is 5000"):
        await over(log, answered=True, max_bytes=5000).without_references(ResponsesRequest(model="m", input=refers))
    assert len(log.sought) == conversations.LOOK_UPS, "the others are not read"


async def test_an_item_is_taken_from_the_response_that_made_it() -> None:
    """Later ones have copies of it in their input, as the client sent them."""
    first = stored_as(1, InputItem("message", role="user", content="a"))
    made = f"msg_{first.id}_0"
    second = stored_as(2, InputItem("message", id=made, role="assistant", content="No."))
    refers = [InputItem("item_reference", id=name) for name in (made, f"msg_{second.id}_0")]
    body, _ = await over(Several(first, second), answered=True).without_references(
        ResponsesRequest(model="m", input=refers)
    )
    assert [each.content for each in body.input or () if isinstance(each, InputItem)] == [
        [InputPart("output_text", text="Yes.")]
    ] * 2
