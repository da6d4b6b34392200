from unittest.mock import MagicMock

import pytest

from gateway.nats.acceptor import RequestAcceptor
from gateway.nats.protocol import origin_of
from schemas.errors import Code, ServingError


async def test_a_message_waits_for_its_portion_before_it_is_prepared() -> None:
    steps: list[str] = []
    gateway = MagicMock()

    async def enter() -> None:
        steps.append("portion")

    async def run_for(*_: object) -> None:
        steps.append("prepare")
        raise ServingError(Code.invalid_request, "this is all")

    gateway.turns.enter, gateway.run_for = enter, run_for
    acceptor = RequestAcceptor(gateway, MagicMock(), MagicMock())
    with pytest.raises(ServingError):
        await acceptor.accept(MagicMock(data=b"{}"), origin_of("ps.ask.tiny", "ask"), "")
    assert steps == ["portion", "prepare"]


async def test_the_id_of_a_submission_is_made_where_that_of_an_http_request_is() -> None:
    gateway = MagicMock()
    given: list[object] = []

    async def nothing(*_: object) -> MagicMock:
        return MagicMock(endpoint="chat")

    async def prepare(*args: object, **_: object) -> None:
        given.extend(args)
        raise ServingError(Code.invalid_request, "this is all")

    gateway.turns.enter, gateway.run_for, gateway.prepare = nothing, nothing, prepare
    gateway.bus.subjects.namespace = "ps"
    acceptor = RequestAcceptor(gateway, MagicMock(), MagicMock())
    message = MagicMock(data=b"{}", headers={})
    with pytest.raises(ServingError, match="this is all"):
        await acceptor.accept(message, origin_of("ps.ask.tiny", "ask"), "")
    assert given == ["chat", b"{}"]  # no id: it has the number of the cell, too
