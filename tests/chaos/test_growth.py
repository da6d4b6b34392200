"""What a deployment keeps of requests that have ended: each kind of growth is found, and a small load leaves none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos import brokers, growth
from tests.chaos.audit import Footprint
from tests.chaos.growth import Growth, Sample, Stored, compare, measure
from tests.chaos.topology import TOPOLOGIES

MIB = 1 << 20


def sample(requests: int, **changes: object) -> Sample:
    """As it should be: what is stored grows with the requests, nothing else does."""
    processes = {"gateway-0": Footprint(1, 60 * MIB, 17), "nats": Footprint(2, 50 * MIB + 9000 * requests, 40)}
    streams = {
        "ps_DONE": Stored(requests, 6000 * requests + 500),
        "KV_ps_workers": Stored(3, 2000),
        "ps_MEMORY": Stored(0, 0, memory=True),
        "OBJ_ps_snapshots": Stored(requests, 400 * requests if requests > 3000 else 0),
    }
    made = Sample(requests, processes, {"gateway-0": 29.0}, {}, streams, {"nats": 6 * MIB + 900 * requests})
    return msgspec.structs.replace(made, **changes)


IDLE, FEW, MANY = sample(0), sample(3000), sample(30_000)


def test_what_grows_with_what_is_stored_and_nothing_else_is_right() -> None:
    assert compare(IDLE, FEW, MANY) == []


def process(name: str, rss: int = 60 * MIB, files: int = 17, pid: int = 1) -> Callable[[], Sample]:
    return lambda: sample(30_000, processes=MANY.processes | {name: Footprint(pid, rss, files)})


def stream(name: str, messages: int, size: int, *, memory: bool = False) -> Callable[[], Sample]:
    return lambda: sample(30_000, streams=MANY.streams | {name: Stored(messages, size, memory)})


GROWN = {
    "gateway-0 has 80 MiB": process("gateway-0", rss=80 * MIB),
    "nats uses 60 MiB": lambda: sample(30_000, heaps={"nats": 60 * MIB}),
    "gateway-0 has 25 open descriptors": process("gateway-0", files=25),
    "gateway-0 is not the process": process("gateway-0", pid=9),
    "gateway-0 has 60 tasks": lambda: sample(30_000, tasks={"gateway-0": 60.0}),
    "penstock_handoff_open_leases is 1": lambda: sample(30_000, open={"penstock_handoff_open_leases": 1.0}),
    "ps_MEMORY still has 2 messages": stream("ps_MEMORY", 2, 99, memory=True),
    "ps_DONE grew by 6000 bytes a request at first, and by 6400": stream("ps_DONE", 30_000, 6400 * 27_000 + 18_000_500),
    "KV_ps_workers grew by 0": stream("KV_ps_workers", 9, 27_000 * 80),
    "ps_NEW grew by 0": stream("ps_NEW", 9, 27_000 * 80),
}


@pytest.mark.parametrize("what", GROWN)
def test_each_kind_of_growth_is_found_and_named(what: str) -> None:
    problems = compare(IDLE, FEW, GROWN[what]())
    assert len(problems) == 1
    assert what in problems[0]


async def test_once_time_is_up_nothing_more_is_asked_and_that_is_said() -> None:
    said: list[str] = []
    nobody: Any = None  # whoever asks or looks fails
    await Growth(nobody, nobody, nobody, said.append, limit_s=0.0).ask(10)
    assert said == ["0 requests, since time was up before 10; waiting until all is quiet"]


@pytest.mark.slow  # `make growth` compares rates, pipeline/shared/test_limits has the tasks
@pytest.mark.timeout(240)
async def test_fifty_mixed_requests_leave_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small version of ``python -m tests.chaos.growth``: rates need more requests than this to be compared."""
    monkeypatch.setattr(growth, "STREAM", 0.5)
    monkeypatch.setattr(growth, "SETTLE_S", 0.0)  # so blocks are in memory
    monkeypatch.setattr(brokers, "HEAP_SLACK", 64 * MIB)
    pairs = TOPOLOGIES["pd"]
    lone = pairs._replace(flags=tuple("1" if each == "2" else each for each in pairs.flags))  # one process of each role
    result = await measure(tmp_path, lone, 20, 50, print, each=2)
    assert result.problems == []
    assert result.many.requests == 50
    assert len(result.many.processes) >= 7
    assert 1 * MIB < result.many.heaps["nats"] < result.many.processes["nats"].rss
    assert set(result.many.tasks) >= {"gateway-0", "router-0", "prefill-0", "encode-0"}
