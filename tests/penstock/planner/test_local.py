"""Which workers of a `penstock up` come next; that they come and go is in tests/pipeline/test_planner.py."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.state import DeploymentState, Running, write_state
from penstock.planner import connectors
from penstock.planner.connectors import ConnectorFailed, LocalWorkers, in_the_way, joining
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


def on_gpus(gpus: tuple[str, ...] | None, *processes: Running) -> DeploymentState:
    return DeploymentState("", "", "", "", "penstock", "demo", processes, gpus=gpus)


def held(name: str, *gpus: str, drained: bool = False) -> Running:
    return Running(name, "worker", None if drained else 1, drained=drained, gpus=gpus)


ALONE = held("prefill-0", "0"), held("decode-0", "1"), held("decode-1", "2")
WIDE = held("prefill-0", "0"), held("decode-0", "1", "2"), held("decode-1", "3", "4"), held("decode-2", "5", "6")


@pytest.mark.parametrize(
    ("state", "wanted", "leaving", "expected"),
    [
        (on_gpus(("0", "1", "2"), *ALONE), ["prefill-1"], ["decode-1"], ["decode-1"]),
        (on_gpus(("0", "1", "2", "3"), *ALONE), ["prefill-1"], ["decode-1"], []),
        (on_gpus(("0", "1", "2", "3"), *ALONE), ["prefill-1", "prefill-2"], ["decode-1"], ["decode-1"]),
        (on_gpus(("0", "1", "2"), *ALONE[:2], held("decode-1", "2", drained=True)), ["decode-1"], ["decode-1"], []),
        (on_gpus(("0",), *(held(f"worker-{n}", "0") for n in range(3))), ["worker-3"], ["worker-1"], ["worker-1"]),
        (on_gpus(("all",), *(held(f"worker-{n}", "all") for n in range(2))), ["worker-2"], ["worker-1"], ["worker-1"]),
        (on_gpus((), held("prefill-0"), held("decode-1")), ["prefill-1"], ["decode-1"], []),
        (on_gpus(("all",), held("prefill-0"), held("decode-1")), ["prefill-1"], ["decode-1"], []),
        (on_gpus(tuple("01234567"), *WIDE), ["decode-3"], ["decode-1", "decode-2"], ["decode-1", "decode-2"]),
        (on_gpus(tuple("01234567"), *WIDE), ["prefill-1"], ["decode-1", "decode-2"], []),
        (on_gpus(None, held("prefill-0"), held("decode-1")), ["prefill-1"], ["decode-1"], ["decode-1"]),
    ],
)  # fmt: skip
def test_only_workers_that_hold_gpus_which_the_new_ones_need_are_waited_for(
    state: DeploymentState, wanted: list[str], leaving: list[str], expected: list[str]
) -> None:
    """All were waited for, for up to a minute, also where GPUs were free."""
    assert in_the_way(wanted, leaving, state) == expected


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
