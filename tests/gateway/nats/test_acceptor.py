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
