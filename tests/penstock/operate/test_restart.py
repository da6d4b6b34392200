"""``penstock restart`` signals processes of its own deployment only."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.infra.nats_server.datadir import Lock
from penstock.launch.state import CellState, DeploymentState, GatewayState, Running, start_of, write_state
from penstock.operate.restart import outdated, run
from penstock.schemas.fleet import Load, Registration


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that got the pid of one that is gone."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def left_behind(folder: Path, pid: int, began: int) -> None:
    """The state of a deployment."""
    running = Running("gateway-0", "gateway", pid, began=began)
    write_state(
        folder / "state.json",
        DeploymentState(
            "http://127.0.0.1:1", "nats://127.0.0.1:1", "", "", "ps", "tiny", (running,), http_urls=("http://x",)
        ),
    )


def test_of_a_deployment_that_was_killed_no_process_is_signalled(
    tmp_path: Path, other: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    left_behind(tmp_path, other.pid, start_of(other.pid))
    assert run(["--rolling", "--data-dir", str(tmp_path)]) == 1
    assert "no `penstock up` runs on" in capsys.readouterr().err
    assert other.poll() is None


def test_start_times_tell_two_processes_of_one_pid_apart(other: subprocess.Popen[bytes]) -> None:
    own, others = start_of(os.getpid()), start_of(other.pid)
    assert 0 < own < others
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert start_of(other.pid) == start_of(None) == 0


async def test_a_process_that_has_a_pid_since_later_is_not_signalled(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    from penstock.operate import restart

    left_behind(tmp_path, other.pid, start_of(other.pid) - 1)
    lock = Lock(tmp_path / "up.lock")
    lock.acquire("penstock up")
    try:
        (process,) = restart._ordered(restart._state(tmp_path), [])
        with pytest.raises(restart.RestartFailed, match="no longer gateway-0"):
            await restart._restart({}, tmp_path, process, 1.0)
    finally:
        lock.release()
    assert other.poll() is None


async def test_where_nothing_can_be_written_the_command_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.operate import restart

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(restart, "ask_for_cells", write)
    with pytest.raises(ValueError, match=f"cannot write to {tmp_path}: No space left"):
        await restart._with_cells(tmp_path, 3, 1.0)


async def test_the_command_ends_when_penstock_up_is_killed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state.json stays, so it would wait for processes that nothing starts, for 15 minutes each."""
    from penstock.operate import restart

    monkeypatch.setattr(restart, "UP_S", 0.01)
    lock = Lock(tmp_path / "up.lock")
    lock.acquire("penstock up")
    ended = list[str]()

    async def wait() -> None:
        try:
            lock.release()
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    with pytest.raises(restart.RestartFailed, match="has ended; start it"):
        await restart._while_up_runs(tmp_path, wait())
    assert ended == ["work"]


async def test_a_failed_restart_says_why(tmp_path: Path) -> None:
    from penstock.operate import restart

    async def fail() -> None:
        raise restart.RestartFailed("worker-0 is not ready")

    with pytest.raises(restart.RestartFailed, match="worker-0 is not ready"):
        await restart._while_up_runs(tmp_path, fail())


@pytest.mark.parametrize("pid", [None, 1 << 22], ids=["it has ended", "it is ending"])
async def test_a_worker_that_is_known_to_be_drained_a_moment_later_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | None
) -> None:
    """What it ran is returned first, which takes a moment; until then it has only ended, or is ending."""
    from penstock.operate import restart

    def note(pid: int | None, *, drained: bool) -> None:
        running = Running("worker-0", "worker", pid, drained=drained)
        state = DeploymentState("http://127.0.0.1:1", "nats://127.0.0.1:1", "", "", "ps", "tiny", (running,))
        write_state(tmp_path / "state.json", state)

    note(pid, drained=False)
    (process,) = restart._ordered(restart._state(tmp_path), [])
    looks, signals = 0, list[int]()

    async def ready(*_: object) -> bool:
        nonlocal looks
        looks += 1
        note(None, drained=looks > 1 and restart.RESUME not in signals)
        return restart.RESUME in signals

    monkeypatch.setattr(restart, "_ready", ready)
    monkeypatch.setattr(restart, "holder", lambda path: 1)
    monkeypatch.setattr(restart.os, "kill", lambda pid, number: signals.append(number))
    await restart._restart({}, tmp_path, process, 10.0)
    assert signals == ([signal.SIGTERM] if pid else []) + [restart.RESUME]
    assert (tmp_path / "resume").read_text() == "worker-0\n"


def deployment_of(active: int, *processes: tuple[str, int, bool]) -> DeploymentState:
    """Four cells; of each process the name, the cell and whether it is outdated."""
    running = [
        Running(name, name.rpartition("-")[0].replace("prefill", "worker"), 1, cell=cell, outdated=old)
        for name, cell, old in processes
    ]
    cells = tuple(CellState(number, f"ps-{number}", "") for number in range(4))
    return DeploymentState("", "", "", "", "ps", "tiny", tuple(running), cells=cells, active_cells=active)


def test_gateways_read_a_cell_before_workers_are_there() -> None:
    workers = [("worker-0", 0, False), ("worker-1", 0, True), ("worker-2", 0, True)]
    state = deployment_of(3, *workers, ("router-0", 0, True), ("router-1", 1, False), ("gateway-0", 0, True))
    assert [each.name for each in outdated(state)] == ["router-0", "gateway-0", "worker-1", "worker-2"]


def test_a_cell_that_is_given_up_keeps_a_worker_of_each_role_until_no_gateway_sends_requests_there() -> None:
    state = deployment_of(
        2,
        ("worker-0", 0, False), ("worker-2", 2, True), ("worker-6", 2, True), ("worker-3", 3, True),
        ("prefill-2", 2, True), ("prefill-6", 2, True), ("worker-5", 1, True), ("gateway-0", 0, True),
    )  # fmt: skip
    assert [each.name for each in outdated(state)] == [
        "worker-6", "prefill-6", "gateway-0", "worker-5", "worker-2", "worker-3", "prefill-2",
    ]  # fmt: skip


async def test_the_last_workers_of_a_cell_wait_until_nothing_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.operate import restart

    waiting = [({"standard": 1}, {"standard": 0}), ({"standard": 0}, {"standard": 2}), ({"standard": 0}, {})]
    loads = [1, 0]

    async def queued(bus: object) -> tuple[dict[str, int], dict[str, int]]:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    async def registrations(bus: object) -> list[Registration]:
        load = Load(waiting=loads.pop(0) if len(loads) > 1 and len(waiting) == 1 else loads[0])
        return [Registration("w", "m", "aggregated", "mock", 1, 32, 100, 4, 4096, load=load)]

    monkeypatch.setattr(restart, "queued", queued)
    monkeypatch.setattr(restart, "registrations", registrations)
    monkeypatch.setattr(restart, "POLL_S", 0.0)
    await restart._until_empty(None, 3, 60.0)  # type: ignore[arg-type]
    assert (len(waiting), loads) == (1, [0])
    loads[0] = 5
    with pytest.raises(restart.RestartFailed, match="cell 3 still has 5 waiting requests"):
        await restart._until_empty(None, 3, 0.0)  # type: ignore[arg-type]


def test_one_of_an_earlier_release_is_not_asked_for_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_behind(tmp_path, os.getpid(), 0)
    lock = Lock(tmp_path / "up.lock")
    lock.acquire("penstock up")
    try:
        assert run(["--rolling", "--cells", "2", "--data-dir", str(tmp_path)]) == 1
    finally:
        lock.release()
    assert "is of an earlier release" in capsys.readouterr().err
    assert not (tmp_path / "cells.wanted").exists()


def test_another_number_of_cells_is_for_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--cells", "2", "gateway-0"])
    assert "--cells is for --rolling" in capsys.readouterr().err


async def test_a_gateway_that_has_left_meanwhile_is_neither_signalled_nor_awaited(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    from penstock.operate import restart

    began = start_of(other.pid)
    stays = Running("gateway-0", "gateway", os.getpid())
    leaves = Running("gateway-1", "gateway", other.pid, began=began)
    state = DeploymentState(
        "http://127.0.0.1:1", "nats://127.0.0.1:1", "", "", "ps", "tiny", (stays, leaves), http_urls=("http://x", "http://y"),
        gateways=GatewayState(1, 2),
    )  # fmt: skip
    assert state.gateway_urls == {"gateway-0": "http://x", "gateway-1": "http://y"}
    leaving = msgspec.structs.replace(leaves, leaving=True)
    for processes in ((stays, leaving), (stays,)):
        now = msgspec.structs.replace(state, processes=processes, http_urls=("http://x",))
        assert now.gateway_urls == {"gateway-0": "http://x"}
        assert [each.name for each in restart._ordered(now, [])] == ["gateway-0"]
        write_state(tmp_path / "state.json", now)
        await restart._restart({}, tmp_path, leaves, 5.0)
        assert await restart._ready({}, tmp_path, "gateway-1", None)
        assert other.poll() is None
