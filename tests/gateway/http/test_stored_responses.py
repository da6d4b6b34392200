"""Stored responses, with the log of a test."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from penstock.gateway.access.authentication import ALL, ANYONE, CALLER, Sight
from penstock.gateway.base.request_bodies import RESPONSE
from penstock.gateway.http.stored_responses import StoredResponses
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.gateway.service.gateway import Gateway
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Stop

RUNNING = GenerateRequest("01932c07-a4b8-7000-8000-0123456789ab", "m", "g", b"", Stop(9), 1, 2, endpoint=RESPONSE)


class Log:
    """A running response that another DELETE erases at the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.records = SimpleNamespace(find=self._find)
        self.fleet = SimpleNamespace(sight=lambda caller: ALL)

    async def look_up(self, request_id: str, sight: Sight = ALL, *, deleted: bool = False) -> StoredRequest:
        self.looks += 1
        if self.looks > 2:
            raise ServingError(Code.request_not_found, "gone")
        return StoredRequest(RUNNING, None)

    async def _find(self, request_id: str) -> None:
        return None

    async def cancel_surely(self, request_id: str, reason: str) -> None:
        pass


async def test_a_delete_that_another_one_overtakes_says_so_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.http.stored_responses.CANCELLED_S", 3600.0)
    monkeypatch.setattr("penstock.gateway.http.stored_responses.LOOK_S", 0.0)
    scope: dict[str, Any] = {"type": "http", "path_params": {"id": "resp_" + RUNNING.id}, CALLER: ANYONE}
    async with asyncio.timeout(10):
        with pytest.raises(ServingError, match="it was deleted") as refused:
            await StoredResponses(cast(Gateway, Log())).delete(Request(scope))
    assert refused.value.code is Code.request_not_found
