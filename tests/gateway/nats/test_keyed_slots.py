import asyncio

import pytest

from penstock.gateway.nats.delivery import KeyedSlots
from penstock.schemas.errors import Code, ServingError


async def test_repeats_of_a_key_wait_for_its_slots_and_others_do_not() -> None:
    slots, go = KeyedSlots(2, 10), asyncio.Event()
    open_: dict[str, int] = {"a": 0, "b": 0}
    most: dict[str, int] = {"a": 0, "b": 0}

    async def answer(key: str) -> None:
        async with slots.hold(key, "answers"):
            open_[key] += 1
            most[key] = max(most[key], open_[key])
            await go.wait()
            open_[key] -= 1

    tasks = [asyncio.create_task(answer(key)) for key in "aaaaaaaab"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert open_ == {"a": 2, "b": 1}
    go.set()
    await asyncio.gather(*tasks)
    assert most == {"a": 2, "b": 1}
    assert len(slots) == 0


async def test_more_than_may_wait_are_refused_and_a_waiting_one_can_be_cancelled() -> None:
    slots = KeyedSlots(1, 1)

    async def wait() -> None:
        async with slots.hold("a", "answers"):
            raise AssertionError("the slot is taken")

    async with slots.hold("a", "answers"):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        with pytest.raises(ServingError, match="2 answers are open, 1 are answered at once") as refusal:
            async with slots.hold("a", "answers"):
                pass
        assert refusal.value.code is Code.queue_full
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(slots) == 0
