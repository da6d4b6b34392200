"""What a router asks workers for, on a connection that answers at once."""

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.infra.bus.tasks import Tasks
from penstock.router.state.caches import AT_ONCE, IndexLoader
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import wire
from penstock.schemas.kv import KvDump
from penstock.schemas.subjects import Subjects

WORKERS = 10 * AT_ONCE


async def test_when_a_whole_fleet_joins_its_caches_are_asked_for_in_several_turns() -> None:
    """A thousand requests in one turn of the loop took 5 to 8 ms, in which the router placed nothing."""
    left = {f"w{number}" for number in range(WORKERS - 10, WORKERS)}  # while they wait for their turn
    registered: set[str] = set()
    asked: list[str] = []
    loaded: list[str] = []
    all_loaded = asyncio.Event()

    async def request(subject: str, body: bytes, timeout: float) -> Any:
        worker = subject.rpartition(".")[2]
        asked.append(worker)
        return SimpleNamespace(data=wire.encode(KvDump(worker, 1, -1)))

    def on_loaded(worker: str) -> None:
        loaded.append(worker)
        if len(loaded) == WORKERS - len(left):
            all_loaded.set()

    bus: Any = SimpleNamespace(nc=SimpleNamespace(request=request), subjects=Subjects())
    tasks = Tasks("test")
    loader = IndexLoader(bus, PrefixIndex(1000), tasks, registered.__contains__, on_loaded)
    for number in range(WORKERS):
        registered.add(f"w{number}")
        loader.ensure(f"w{number}", 1)
    await asyncio.sleep(0)
    assert 0 < len(asked) <= AT_ONCE
    registered -= left
    await asyncio.wait_for(all_loaded.wait(), 10)
    await asyncio.wait_for(asyncio.gather(*loader._running.values()), 10)
    assert sorted(asked) == sorted(registered)
    await loader.stop()
    await tasks.aclose()
