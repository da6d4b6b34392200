"""Whether requests with ``no_store`` can be taken: how often the broker is asked."""

import asyncio
from typing import Any

import pytest

from penstock.gateway.admission.storage import MemoryCheck
from penstock.infra.bus.memory_storage import Fill
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Stop
from penstock.schemas.subjects import Subjects

REQUEST = GenerateRequest("r", "m", "gw", b"", Stop(100), 0, 0)


class Broker:
    """Its answers are given by the test."""

    subjects = Subjects()

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future[tuple[Fill, Fill]] = asyncio.get_running_loop().create_future()

    async def fill(self) -> tuple[Fill, Fill]:
        self.asked += 1
        return await self.answer


@pytest.fixture
async def broker() -> Broker:
    return Broker()


@pytest.fixture
def check(broker: Any) -> MemoryCheck:
    return MemoryCheck(broker, broker, lambda: ())


async def all_of(check: MemoryCheck, broker: Broker, count: int, answer: tuple[Fill, Fill] | ServingError) -> list[Any]:
    waiting = [asyncio.ensure_future(check.check(REQUEST, 100)) for _ in range(count)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    if isinstance(answer, ServingError):
        broker.answer.set_exception(answer)
    else:
        broker.answer.set_result(answer)
    return await asyncio.gather(*waiting, return_exceptions=True)


async def test_many_requests_at_a_time_ask_once(check: MemoryCheck, broker: Broker) -> None:
    assert await all_of(check, broker, 64, (Fill(0, 1 << 20), Fill(0, 64 << 20))) == [None] * 64
    await check.check(REQUEST, 100)
    assert broker.asked == 1


async def test_while_one_request_looks_the_others_continue(
    check: MemoryCheck, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await all_of(check, broker, 1, (Fill(0, 1 << 20), Fill(0, 64 << 20)))
    broker.answer = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("penstock.gateway.admission.storage.MEMORY_LOOK_S", 0.0)
    monkeypatch.setattr("penstock.gateway.admission.storage.TRUST_S", 3600.0)
    looking = asyncio.ensure_future(check.check(REQUEST, 100))
    await asyncio.sleep(0)
    await check.check(REQUEST, 100)
    assert not looking.done()
    broker.answer.set_result((Fill(0, 0), Fill(0, 0)))
    await looking
    assert broker.asked == 2


async def test_all_that_wait_for_a_look_that_fails_get_its_error(check: MemoryCheck, broker: Broker) -> None:
    error = ServingError(Code.broker_unavailable, "no answer")
    assert await all_of(check, broker, 64, error) == [error] * 64
    assert broker.asked == 1


async def test_what_was_taken_since_the_last_look_counts(check: MemoryCheck, broker: Broker) -> None:
    """10,000 bytes of the contents are free; nine tenths of all may be used, by twice what a request takes."""
    await all_of(check, broker, 1, (Fill(0, 10_000), Fill(0, 64 << 20)))
    await check.check(REQUEST, 4_000)
    with pytest.raises(ServingError, match="MEMORY_CONTENTS") as refused:
        await check.check(REQUEST, 4_000)
    assert refused.value.code is Code.broker_unavailable


async def test_a_small_limit_is_told_in_its_own_unit(check: MemoryCheck, broker: Broker) -> None:
    (refused,) = await all_of(check, broker, 1, (Fill(1_000, 64 << 10), Fill(90_000, 100 << 10)))
    assert refused.code is Code.broker_unavailable
    assert "_MEMORY_TOKENS holds 87.9 KiB of its 100.0 KiB" in refused.message
    assert "open requests need 19.5 KiB" in refused.message
    assert " 0 " not in refused.message
