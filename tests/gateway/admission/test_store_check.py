"""Whether the broker stores messages, on a real broker."""

import asyncio
import time

import pytest

from penstock.gateway.admission import queues
from penstock.gateway.admission.queues import StoreCheck
from penstock.infra.bus.connection import Bus
from penstock.schemas.errors import ServingError
from tests.infra.bus.support import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("EVERY_S", 0.0), ("FAILING_S", 0.3), ("CONFIRM_S", 0.1), ("AGAIN_S", 0.02)):
        monkeypatch.setattr(queues, name, seconds)


async def looks(check: StoreCheck, failing: bool, *, position: int = 0) -> None:
    """Look until it is known whether the broker stores nothing."""

    def look() -> bool:
        check.look(time.monotonic(), quiet=True, position=position)
        return check.failing is failing

    await eventually(look)


async def test_a_broker_that_does_not_confirm_an_entry_is_noticed_and_so_is_its_recovery(bus: Bus) -> None:
    check = StoreCheck(bus, "gateway-1", bus.tasks)
    bucket = f"KV_{bus.subjects.bucket('idempotency')}"
    config = (await bus.js.stream_info(bucket)).config
    await bus.js.delete_stream(bucket)
    await looks(check, True)
    with pytest.raises(ServingError, match="stores nothing"):
        check.check()
    await bus.js.add_stream(config)
    await looks(check, False)
    check.check()


async def test_tokens_that_arrive_show_that_messages_are_stored(bus: Bus) -> None:
    check = StoreCheck(bus, "gateway-1", bus.tasks)
    await bus.js.delete_stream(f"KV_{bus.subjects.bucket('idempotency')}")
    await looks(check, True)
    check.look(time.monotonic(), quiet=True, position=7)
    assert not check.failing


async def test_a_bucket_that_is_full_says_nothing_of_other_streams(bus: Bus) -> None:
    check = StoreCheck(bus, "gateway-1", bus.tasks)
    bucket = f"KV_{bus.subjects.bucket('idempotency')}"
    config = (await bus.js.stream_info(bucket)).config
    config.max_bytes = 1_000
    await bus.js.update_stream(config)
    until = time.monotonic() + 5 * queues.FAILING_S
    while time.monotonic() < until:
        check.look(time.monotonic(), quiet=True, position=0)
        assert not check.failing
        await asyncio.sleep(0.01)


async def test_nothing_is_written_while_no_request_is_quiet(bus: Bus) -> None:
    check = StoreCheck(bus, "gateway-1", bus.tasks)
    bucket = f"KV_{bus.subjects.bucket('idempotency')}"
    before = (await bus.js.stream_info(bucket)).state.last_seq
    for _ in range(20):
        check.look(time.monotonic(), quiet=False, position=0)
        await asyncio.sleep(0)
    assert (await bus.js.stream_info(bucket)).state.last_seq == before
