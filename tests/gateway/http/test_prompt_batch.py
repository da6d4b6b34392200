from unittest.mock import AsyncMock, MagicMock

import pytest

from gateway.http.idempotency import ClientIds
from gateway.http.prompt_batch import answer_prompts
from schemas.errors import Code, ServingError


async def test_each_prompt_of_a_batch_waits_for_its_portion() -> None:
    steps: list[str] = []
    gateway = MagicMock()

    async def enter() -> None:
        steps.append("portion")

    async def prepare(body: bytes) -> MagicMock:
        steps.append(body.decode())
        if body == b"c":
            raise ServingError(Code.invalid_request, "this is all")
        return MagicMock()

    gateway.turns.enter, gateway.run_for = enter, AsyncMock(return_value=[b"a", b"b", b"c"])
    with pytest.raises(ServingError):
        await answer_prompts(gateway, b"", MagicMock(spec=ClientIds, key=""), prepare, {}, AsyncMock())
    assert steps == ["portion", "a", "portion", "b", "portion", "c"]
