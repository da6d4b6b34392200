"""Which workers of a `penstock up` come next; that they come and go is in tests/pipeline/test_planner.py."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.state import DeploymentState, Running, write_state
from penstock.planner import connectors
from penstock.planner.connectors import ConnectorFailed, LocalWorkers, joining
from penstock.schemas.fleet import Registration

PROCESSES = [
    Running("worker-0", "worker", 1),
    Running("worker-1", "worker", drained=True),
    Running("worker-3", "worker", 3),
    Running("decode-1", "worker", drained=True),
    Running("demo-worker-7", "worker", drained=True),
]


def test_drained_workers_come_first_then_the_numbers_that_are_free() -> None:
    assert joining("worker", 4, PROCESSES) == ["worker-1", "worker-2", "worker-4", "worker-5"]
    assert joining("decode", 2, PROCESSES) == ["decode-1", "decode-0"]
    assert joining("demo-worker", 2, PROCESSES) == ["demo-worker-7", "demo-worker-0"]
    assert joining("prefill", 1, PROCESSES) == ["prefill-0"]
    assert joining("worker", 0, PROCESSES) == joining("worker", -2, PROCESSES) == []


async def test_a_folder_without_a_deployment_is_said(tmp_path: Path) -> None:
    nobody: Any = None
    workers = LocalWorkers(nobody, tmp_path, "demo")
    with pytest.raises(ConnectorFailed, match="no `penstock up` runs on"):
        await workers.counts()


async def test_a_worker_that_crashes_while_it_leaves_and_starts_again_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing could be added any more: the others would wait for its end."""
    decode = [Registration(f"d{n}", "demo", "decode", "mock", 1, 4, 9, 4, 99, name=f"decode-{n}") for n in range(2)]
    started: list[str] = []

    async def registered(bus: object) -> list[Registration]:
        return decode

    async def asked(*order: object) -> None: ...

    async def start(self: LocalWorkers, names: list[str]) -> None:
        started.extend(names)

    def runs(pid: int | None) -> None:
        processes = Running("decode-0", "worker", 10), Running("decode-1", "worker", pid)
        write_state(tmp_path / "state.json", DeploymentState("", "", "", "", "penstock", "demo", processes))

    monkeypatch.setattr(connectors, "registrations", registered)
    monkeypatch.setattr(connectors, "ask", asked)
    monkeypatch.setattr(connectors, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(connectors, "LEAVE_S", 0.2)
    monkeypatch.setattr(LocalWorkers, "_start", start)
    bus: Any = SimpleNamespace(nc=None, subjects=None)
    workers = LocalWorkers(bus, tmp_path, "demo")
    runs(11)
    await workers.apply({"decode": 1})
    for pid in (11, None):  # it finishes what it runs, has ended
        runs(pid)
        assert await workers.counts() == {"decode": 1}
        with pytest.raises(ConnectorFailed, match="decode-1 did not end within"):
            await workers.apply({"decode": 2})
    runs(12)
    assert await workers.counts() == {"decode": 2}
    await workers.apply({"decode": 3})
    assert started == ["decode-2"]
