"""Continuing a response whose client has read its end before its record was stored."""

from collections.abc import Iterator

import msgspec
import pytest

from penstock.gateway.apis.responses.bodies import ResponsesRequest
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
from tests.gateway.answers import DETOKENIZER
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


def over(log: Log, *, answered: bool) -> Conversations:
    async def has_ended(request: GenerateRequest) -> bool:
        return answered

    async def detokenizer(request: GenerateRequest) -> Detokenizer:
        return DETOKENIZER

    return Conversations(log.find, has_ended, detokenizer, 1 << 20)  # type: ignore[arg-type]


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
