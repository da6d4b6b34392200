"""The local supervisor: real processes, a real broker, small stand-ins for the roles."""

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.configs.flags import parse
from penstock.configs.settings import GatewaySettings, RouterSettings, TraceSettings, WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.infra.nats_server.datadir import DataDirBusy
from penstock.infra.process import supervisor
from penstock.infra.process.child import Process, bound_log
from penstock.infra.process.supervisor import RESUME, Keeper, RestartBackoff, is_stopped
from penstock.launch import deployment
from penstock.launch.deployment import Deployment, UpFailed
from penstock.launch.groups import fleet_of
from penstock.launch.plan import PlannedProcess, plan, sized
from penstock.launch.readiness import get
from penstock.launch.show import curl_line, readable, welcome
from penstock.launch.state import (
    CellCounts,
    DeploymentState,
    ask_for_cells,
    read_cells,
    read_resume,
    read_state,
    write_cells,
    write_resume,
    write_state,
)
from tests.infra.bus.support import eventually

READY = b'{"status":"ready"}'  # a fake gateway's answer
# By its path: its package would be imported, too, which is half of what a start costs.
FAKE = [sys.executable, "-P", str(Path(__file__).with_name("fake_child.py"))]


def fake(planned: PlannedProcess) -> list[str]:
    return [*FAKE, *planned.argv]


def up_settings(tmp_path: Path, **more: Any) -> UpSettings:
    settings: dict[str, Any] = {"http_port": 0, "ready_s": 30.0, "drain_s": 5.0, "dashboard_port": -1}
    settings["gateways"] = "1"
    return UpSettings(data_dir=str(tmp_path / "data"), **(settings | more))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


class Up:
    """A deployment in this process, and what it wrote."""

    def __init__(self, settings: UpSettings) -> None:
        self.path = Path(settings.data_dir) / "state.json"
        self.task = asyncio.create_task(Deployment(settings, command=fake).run())

    def state(self) -> DeploymentState:
        return read_state(self.path)

    def pids(self) -> dict[str, int]:
        if not self.path.exists():
            return {}
        return {process.name: process.pid for process in self.state().processes if process.pid is not None}

    async def ready(self) -> DeploymentState:
        await eventually(lambda: self.task.done() or (self.path.exists() and self.state().model))
        if self.task.done():
            self.task.result()
        return self.state()

    async def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await self.task


# -- a whole deployment -------------------------------------------------------------------------------------------


async def test_a_deployment_starts_prints_where_it_is_and_stops_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the user stands may hold folders named like ours.
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise RuntimeError('not ours')")
    monkeypatch.chdir(tmp_path)
    up = Up(up_settings(tmp_path, workers=2, gateways="2"))
    state = await up.ready()
    assert state.model == "fake"
    assert stat.S_IMODE(up.path.stat().st_mode) == 0o600
    pids = up.pids()
    assert sorted(pids) == ["gateway-0", "gateway-1", "nats", "router-0", "worker-0", "worker-1"]
    assert all(alive(pid) for pid in pids.values())
    assert "operator:" in state.nats_url
    assert "client:" in state.client_nats_url
    assert "sys:" in state.sys_nats_url
    # Passwords are in no command line, where any user of the machine could read them.
    for pid in pids.values():
        assert "nats://" not in command_line(pid)
    assert "worker runs" in (tmp_path / "data" / "logs" / "worker-1.log").read_text()
    assert await up.stop() == 0
    assert not any(alive(pid) for pid in pids.values())
    assert not up.path.exists()


async def test_a_deployment_whose_gateways_want_a_key_knows_its_model_and_says_how_to_make_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that it printed had no key, and an empty model."""
    said: list[str] = []

    def greet(*args: Any, **options: Any) -> str:
        said.append(welcome(*args, **options))
        return said[-1]

    monkeypatch.setattr("penstock.launch.deployment.welcome", greet)
    up = Up(up_settings(tmp_path, require_keys=True))
    state = await up.ready()
    assert (state.model, state.models, state.makes) == ("fake", ("fake",), "text")
    await eventually(lambda: said)
    assert f"KEY=$(penstock keys create --data-dir {tmp_path / 'data'} --quiet)" in said[0]
    (line,) = [line.strip() for line in said[0].splitlines() if line.startswith("  curl ")]
    words = shlex.split(line)
    assert "authorization: Bearer $KEY" in words
    assert '"authorization: Bearer $KEY"' in line  # for the shell to fill in
    assert json.loads(words[-1])["model"] == "fake"
    assert await up.stop() == 0


async def test_a_disk_that_is_smaller_than_the_streams_is_warned_of_before_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=60 << 30, free=3 << 30))
    up = Up(up_settings(tmp_path, store_size=4.0, workers=0))
    await up.ready()
    assert await up.stop() == 0
    said = f"warning: 3.0 GiB are free under {tmp_path / 'data'}, and the streams may grow to 4.0 GiB"
    assert said in capsys.readouterr().err
    up = Up(up_settings(tmp_path, store_size=4.0, workers=0))
    await up.ready()
    assert await up.stop() == 0
    assert "may grow" not in capsys.readouterr().err


async def test_the_dashboard_starts_last_and_stops_with_the_rest(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path, dashboard_port=0))
    state = await up.ready()
    await eventually(lambda: up.state().dashboard_url)
    url = up.state().dashboard_url
    assert url in welcome(up.state(), tmp_path, 1.0)
    port, path = int(url.split(":")[2].partition("/")[0]), "/?token=" + url.partition("=")[2]

    async def answers() -> int:
        return (await get("127.0.0.1", port, path))[0]

    async with asyncio.timeout(30):
        while await answers() != 303:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await get("127.0.0.1", port, "/"))[0] == 401
    pids = up.pids()
    assert "dashboard" in pids
    assert state.http_url
    assert await up.stop() == 0
    assert not any(alive(pid) for pid in pids.values())


async def test_killed_children_come_back_under_new_pids(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path))
    await up.ready()
    before = up.pids()
    nats_url = up.state().nats_url
    for name in ("worker-0", "nats"):
        os.kill(before[name], signal.SIGKILL)
    await eventually(lambda: all(up.pids().get(name, 0) not in (0, before[name]) for name in ("worker-0", "nats")))
    after = up.pids()
    assert after["gateway-0"] == before["gateway-0"]
    assert up.state().nats_url == nats_url  # same port, same secrets
    assert await up.stop() == 0


async def test_a_child_that_waits_to_be_started_again_has_no_pid_in_the_state_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict[str, dict[str, Any]]] = []

    def record(path: Path, state: DeploymentState) -> None:
        write_state(path, state)
        written.append({process["name"]: process for process in json.loads(path.read_text())["processes"]})

    monkeypatch.setattr("penstock.launch.deployment.write_state", record)
    up = Up(up_settings(tmp_path))
    await up.ready()
    before = up.pids()["worker-0"]
    os.kill(before, signal.SIGKILL)
    await eventually(lambda: up.pids().get("worker-0", before) != before)
    worker = [processes["worker-0"].get("pid") for processes in written if "worker-0" in processes]
    assert None in worker[worker.index(before) :]
    assert not any(process.get("pid") == 0 for processes in written for process in processes.values())
    assert await up.stop() == 0


async def test_a_child_that_refuses_its_settings_ends_the_start_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_BAD", "worker")
    up = Up(up_settings(tmp_path))
    with pytest.raises(UpFailed, match=r"(?s)worker-0 exited with status 2.*cannot use these settings"):
        await up.task
    assert "restart" not in capfd.readouterr().err  # it is not started again


def test_a_child_s_log_is_shown_as_what_happened_and_why() -> None:
    common = {"timestamp": "t", "level": "error", "process": "gateway-0", "logger": "gateway"}
    line = json.dumps(common | {"event": "start_failed", "error": 'model "x" is not a directory', "port": 5})
    assert readable(line) == 'start_failed: model "x" is not a directory (port=5)'
    assert readable(json.dumps(common | {"event": "died", "exception": "Traceback\n  x"})) == "died\nTraceback\n  x"
    for plain in ("Traceback (most recent call last):", "{", "[1]", '{"a": 1}', ""):
        assert readable(plain) == plain


async def test_a_start_that_takes_too_long_names_who_is_missing(tmp_path: Path) -> None:
    settings = UpSettings(data_dir=str(tmp_path), http_port=0, ready_s=0.3, drain_s=1.0)
    with pytest.raises(UpFailed, match=r"(?s)not ready after 0\.3 s.*worker-0: is not registered yet"):
        await Deployment(settings, command=lambda planned: ["sleep", "60"]).run()


async def test_one_deployment_per_data_directory(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path))
    await up.ready()
    with pytest.raises(DataDirBusy, match="penstock up is already running"):
        await Deployment(up_settings(tmp_path), command=fake).run()
    assert up.path.exists()  # the one that runs keeps its state
    assert await up.stop() == 0


async def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, asyncio; from penstock.launch.deployment import Deployment;"
        "from penstock.configs.up_settings import UpSettings;"
        "from tests.penstock.launch.test_up import fake;"
        "asyncio.run(Deployment(UpSettings(data_dir=sys.argv[1], http_port=0), command=fake).run())"
    )
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), stderr=subprocess.DEVNULL)
    path = tmp_path / "state.json"
    await eventually(lambda: path.exists() and read_state(path).model)
    pids = [process.pid for process in read_state(path).processes if process.pid]
    assert all(alive(pid) for pid in pids)
    killed.kill()
    await killed.wait()
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_gateways_share_one_port_and_a_killed_one_resets_nobody_there(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path, gateways="2"))
    state = await up.ready()
    assert len({state.http_url, *state.http_urls}) == 3
    ports = [int(url.rpartition(":")[2]) for url in (state.http_url, *state.http_urls)]
    for port in ports:
        assert await get("127.0.0.1", port, "/health/ready") == (200, READY)
    for name in ("gateway-0", "gateway-1"):
        os.kill(up.pids()[name], signal.SIGKILL)
    # Nobody accepts now: the connection waits until a gateway is there again.
    assert await get("127.0.0.1", ports[0], "/health/ready", timeout_s=30) == (200, READY)
    assert await up.stop() == 0


async def test_a_lone_gateway_has_no_port_but_the_shared_one(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path))
    state = await up.ready()
    assert state.http_urls == (state.http_url,)
    assert await up.stop() == 0


async def test_more_cells_are_there_at_once_and_what_cannot_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path, workers=2, cells=1, dashboard_port=0))
    await up.ready()
    await eventually(lambda: "dashboard" in up.pids())
    before = up.pids()
    folder = tmp_path / "data"

    async def set_cells(number: int) -> DeploymentState:
        asked = ask_for_cells(folder, number)
        os.kill(os.getpid(), RESUME)
        await eventually(lambda: not asked.exists())
        return up.state()

    state = await set_cells(3)
    assert "each cell needs a worker of each role, and a role has 2" in state.cells_refused
    assert (len(state.cells), state.active_cells) == (1, 1)
    state = await set_cells(2)
    assert (state.cells_refused, len(state.cells), state.active_cells) == ("", 2, 2)
    now = up.pids()
    assert sorted(now.keys() - before.keys()) == ["nats-1", "router-1"]
    assert before.items() <= now.items(), "what runs is left as it is"
    assert [each.name for each in state.processes if each.outdated] == [
        "worker-1", "gateway-0", "dashboard",
    ]  # fmt: skip
    assert [each.cell for each in state.processes if each.name == "worker-1"] == [0]
    os.kill(now["worker-1"], signal.SIGKILL)
    await eventually(lambda: up.pids().get("worker-1", 0) not in (0, now["worker-1"]))
    worker = next(each for each in up.state().processes if each.name == "worker-1")
    assert (worker.cell, worker.outdated) == (1, False), "it is where it belongs as soon as it starts again"
    state = await set_cells(1)
    assert (len(state.cells), state.active_cells) == (2, 1)
    assert [each.name for each in state.processes if each.outdated] == [
        "worker-1", "gateway-0", "dashboard",
    ]  # fmt: skip
    assert await up.stop() == 0


async def test_a_later_start_has_the_cells_of_before_and_reads_those_that_take_no_requests(tmp_path: Path) -> None:
    for cells, active in ((2, 2), (0, 1)):
        up = Up(up_settings(tmp_path, workers=2, cells=cells))
        state = await up.ready()
        assert (len(state.cells), state.active_cells) == (2, active)
        assert {each.name: each.cell for each in state.processes if each.role in ("worker", "router")} == {
            "worker-0": 0, "worker-1": active - 1, "router-0": 0, "router-1": 1,
        }  # fmt: skip
        assert not any(each.outdated for each in state.processes)
        assert await up.stop() == 0
        assert read_cells(tmp_path / "data") == CellCounts(2, active)
        write_cells(tmp_path / "data", CellCounts(2, 1))


@pytest.mark.slow  # pipeline/test_other_cells has cells
async def test_a_cell_that_lacks_workers_gets_one_of_another_cell_and_those_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.launch.deployment.LACKING_S", 0.3)
    up = Up(up_settings(tmp_path, workers=4, cells=2))
    await up.ready()
    await eventually(lambda: up.state().models)

    def cells() -> dict[str, int]:
        """Of the workers that run."""
        running = [each for each in up.state().processes if each.role == "worker" and each.pid is not None]
        return {each.name: each.cell for each in running if not each.outdated}

    async def resume(name: str) -> None:
        write_resume(tmp_path / "data", [name])
        os.kill(os.getpid(), RESUME)
        await eventually(lambda: name in cells())

    pids = up.pids()
    assert cells() == {"worker-0": 0, "worker-1": 1, "worker-2": 0, "worker-3": 1}
    for name in ("worker-1", "worker-3"):
        os.kill(pids[name], signal.SIGUSR2)
    await eventually(lambda: cells() == {"worker-0": 0, "worker-2": 1})
    assert up.pids()["worker-0"] == pids["worker-0"]
    await resume("worker-3")
    assert cells()["worker-3"] == 1, "where it was planned, as long as no cell has fewer"
    await resume("worker-1")
    assert cells()["worker-1"] == 0
    await resume("worker-4")
    assert cells()["worker-4"] == 0
    await resume("worker-6")
    assert cells()["worker-6"] == 1, "although by its number it would be in the first one"
    assert await up.stop() == 0


def test_processes_that_two_commands_ask_for_at_once_are_both_started(tmp_path: Path) -> None:
    write_resume(tmp_path, ["worker-1"])
    write_resume(tmp_path, ["demo-worker-1", "worker-1"])
    assert read_resume(tmp_path) == ["worker-1", "demo-worker-1"]
    assert read_resume(tmp_path) == []


async def test_a_cell_whose_broker_cannot_start_is_left_out(tmp_path: Path) -> None:
    up = Up(up_settings(tmp_path, workers=2, cells=1))
    await up.ready()
    await eventually(lambda: up.state().models)
    folder = tmp_path / "data"
    (folder / "cells").mkdir()
    (folder / "cells" / "1").write_text("in the way")
    before = up.pids()
    for _ in range(2):
        asked = ask_for_cells(folder, 2)
        os.kill(os.getpid(), RESUME)
        await eventually(lambda asked=asked: not asked.exists())  # type: ignore[misc]
        state = up.state()
        assert state.cells_refused
        assert (len(state.cells), state.active_cells, up.pids()) == (1, 1, before)
    (folder / "cells" / "1").unlink()
    asked = ask_for_cells(folder, 2)
    os.kill(os.getpid(), RESUME)
    await eventually(lambda: not asked.exists())
    assert (up.state().cells_refused, len(up.state().cells)) == ("", 2)
    assert await up.stop() == 0


# -- one child ----------------------------------------------------------------------------------------------------


def process(tmp_path: Path, code: str, *, echo: bool = False) -> Process:
    return Process("p", "p", [sys.executable, "-c", code], os.environ, tmp_path / "p.log", echo=echo)


async def test_a_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    child = process(
        tmp_path,
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()",
    )
    keeper = Keeper(child)
    await keeper.start()
    await eventually(lambda: child.last_lines() == ["up"])
    async with asyncio.timeout(10):
        await keeper.stop(timeout_s=0.2)
    assert child.pid is None


async def test_a_child_is_never_run_twice_at_once(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), time.time(), flush=True); time.sleep(0.05); print('end', time.time())"
    keeper = Keeper(process(tmp_path, code))
    await keeper.start()
    await eventually(lambda: keeper.exits >= 3)
    await keeper.stop(timeout_s=5)
    words = [line.split() for line in (tmp_path / "p.log").read_text().splitlines()]
    times = [float(word[1]) for word in words]
    assert times == sorted(times)
    assert [word[0] == "end" for word in words[:6]] == [False, True] * 3


async def test_ends_that_were_asked_for_make_no_pause_longer(tmp_path: Path) -> None:
    """A broker that was restarted five times after a full disk stayed away for 3 s, and later for 10 s."""
    keeper, pauses, first = Keeper(process(tmp_path, "import signal; signal.pause()")), list[float](), None
    await keeper.start()
    for _ in range(4):
        await eventually(lambda before=first: keeper.child.pid not in (None, before))  # type: ignore[misc]
        first = keeper.child.pid
        with capture_logs() as lines:
            keeper.restart()
            await eventually(lambda: bool(lines))
        pauses += [line["restart_in_s"] for line in lines if line["event"] == "process_ended"]
    await eventually(lambda: keeper.child.pid not in (None, first))
    with capture_logs() as lines:
        keeper.child.kill()
        await eventually(lambda: bool(lines))
    await keeper.stop(timeout_s=5)
    assert [*pauses, lines[0]["restart_in_s"]] == [0.2] * 5


async def test_a_child_at_a_standstill_is_killed_and_started_again_if_it_must_not_stand_still(tmp_path: Path) -> None:
    keeper = Keeper(process(tmp_path, "import signal; signal.pause()"), standstill_s=0.1)
    await keeper.start()
    first = keeper.child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await eventually(lambda: keeper.child.pid not in (None, first))
    assert keeper.last_status == -signal.SIGKILL
    await keeper.stop(timeout_s=5)


async def test_a_child_that_stood_still_with_its_supervisor_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a whole machine is stopped, and continues one process after the other."""
    looked: list[bool] = []

    def look(pid: int) -> bool:
        looked.append(is_stopped(pid))
        return looked[-1]

    monkeypatch.setattr(supervisor, "is_stopped", look)
    keeper = Keeper(process(tmp_path, "import signal; signal.pause()"), standstill_s=0.5)
    await keeper.start()
    await eventually(lambda: looked)
    first = keeper.child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    time.sleep(1.0)  # noqa: ASYNC251 - it stands still, too
    await eventually(lambda: any(looked))
    os.kill(first, signal.SIGCONT)
    await eventually(lambda: looked[-1:] == [False])
    assert keeper.child.pid == first
    await keeper.stop(timeout_s=5)


async def test_a_child_is_started_again_although_what_runs_beside_it_loses_a_cancellation(tmp_path: Path) -> None:
    """A broker that was killed twice within a second stayed away: nats-py's connect may lose a cancellation."""

    running = asyncio.Event()

    async def beside() -> None:
        running.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    keeper = Keeper(process(tmp_path, "import signal; signal.pause()"), restarted=beside)
    await keeper.start()
    keeper.child.kill()
    await asyncio.wait_for(running.wait(), 30)
    keeper.child.kill()
    await eventually(lambda: keeper.exits == 2 and keeper.child.pid is not None)
    async with asyncio.timeout(10):
        await keeper.stop(timeout_s=5)


async def test_output_is_echoed_and_kept_when_asked(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    child = process(tmp_path, "print('x' * 3_000_000); print('last')", echo=True)
    await child.start()
    assert await child.wait() == 0
    assert capfdbinary.readouterr().out == b"x" * 3_000_000 + b"\nlast\n"
    assert (tmp_path / "p.log").stat().st_size == 3_000_006


async def test_a_child_ends_although_nobody_reads_what_is_echoed_and_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process(tmp_path, "print('line\\n' * 100_000)", echo=True)
    child.log_path = Path("/dev/full")
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        await child.start()
        async with asyncio.timeout(30):
            assert await child.wait() == 0
    assert child.log_path.exists()


async def test_the_logs_of_running_processes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "LOGS_S", 0.05)
    monkeypatch.setattr("penstock.infra.process.child.LOG_BYTES", 1000)
    up = Up(up_settings(tmp_path))
    await up.ready()
    log = tmp_path / "data" / "logs" / "worker-0.log"
    with log.open("ab") as file:
        file.write(b"x" * 2000)
        file.flush()
        await eventually(lambda: log.stat().st_size == 0)
        file.write(b"more")
    assert log.read_bytes() == b"more"
    assert log.with_suffix(".log.1").read_bytes().endswith(b"x" * 2000)
    assert await up.stop() == 0


def test_a_log_is_emptied_although_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.infra.process.child.LOG_BYTES", 1000)
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * 1001)
    log.with_suffix(".log.1").symlink_to("/dev/full")
    assert bound_log(log)
    assert log.stat().st_size == 0
    assert not bound_log(log)


async def test_the_last_lines_of_a_child_are_found_after_its_log_was_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say why it failed."""
    monkeypatch.setattr("penstock.infra.process.child.LOG_BYTES", 1000)
    child = process(tmp_path, "print('why')")
    child.log_path.write_bytes(b"an earlier run\n" * 50)
    await child.start()
    await child.wait()
    assert child.last_lines() == ["why"]
    with child.log_path.open("ab", buffering=0) as log:
        log.write(b"x" * 1000)
        assert bound_log(child.log_path)
        log.write(b"why again\n")
    assert child.last_lines() == ["why again"]


@given(st.lists(st.floats(min_value=0, max_value=29), min_size=1, max_size=20))
def test_pauses_double_up_to_ten_seconds_and_start_again_after_a_lasting_run(lives: list[float]) -> None:
    backoff = RestartBackoff()
    pauses = [backoff.after(alive) for alive in lives]
    assert pauses[0] == 0.2
    assert all(b == min(10.0, 2 * a) for a, b in itertools.pairwise(pauses))
    assert backoff.after(30.0) == 0.2


# -- the plan -----------------------------------------------------------------------------------------------------


def planned(up: UpSettings, ports: list[int] | None = None) -> dict[str, PlannedProcess]:
    up = sized(up, fleet_of(up), 2)
    children = plan(
        up, fleet_of(up), ports=ports or [8000], url=lambda role, cell: f"nats://{role}:secret@h:1",
        sys_url=lambda cell: "nats://sys:x@h:1", cores=8,
    )  # fmt: skip
    return {child.name: child for child in children}


def test_each_child_reads_back_the_settings_meant_for_it() -> None:
    up = UpSettings(
        model=("-odd name",), workers=2, gateways="2", router_mode="random", log_level="debug", block_size=16
    )
    children = planned(up, [8000, 8001])
    kinds = {"worker": WorkerSettings, "router": RouterSettings, "gateway": GatewaySettings}
    noise = {"PENSTOCK_HTTP_PORT": "1", "PENSTOCK_MODE": "kv", "PENSTOCK_BLOCK_SIZE": "8", "PENSTOCK_NAME": "x"}
    for child in children.values():
        environ = child.environ(noise)
        assert parse(kinds[child.role], child.argv[1:], prog="p", environ=environ) == child.settings
        assert not any("secret" in word for word in child.argv)
    assert [children[f"gateway-{i}"].settings.http_port for i in (0, 1)] == [8000, 8001]  # type: ignore[attr-defined]
    assert children["worker-0"].settings.threads == 4  # type: ignore[attr-defined]


def test_workers_get_the_parsers_of_the_model() -> None:
    up = UpSettings(prefill=1, decode=1, reasoning_parser="qwen3", tool_call_parser="none")
    for child in planned(up).values():
        if isinstance(child.settings, WorkerSettings):
            assert (child.settings.reasoning_parser, child.settings.tool_call_parser) == ("qwen3", "none")


def test_with_an_otlp_endpoint_every_request_is_traced_and_one_process_sends_the_spans() -> None:
    url = "http://h:4318/v1/traces"
    children = planned(UpSettings(otlp_endpoint=url, gateways="2"), [8000, 8001])
    assert [children[f"gateway-{i}"].settings.tracing for i in (0, 1)] == ["all", "all"]  # type: ignore[attr-defined]
    child = children["trace-0"]
    environ = child.environ({"PENSTOCK_OTLP_ENDPOINT": "http://elsewhere", "OTEL_EXPORTER_OTLP_HEADERS": "key=1"})
    assert parse(TraceSettings, child.argv[1:], prog="p", environ=environ) == child.settings
    assert child.settings.nats_url == "nats://reader:secret@h:1"
    assert environ["OTEL_EXPORTER_OTLP_HEADERS"] == "key=1"
    worker = children["worker-0"]
    assert worker.settings.otlp_endpoint == url  # type: ignore[attr-defined]  # for the engine's own spans
    assert not any("secret" in word for word in child.argv)
    plain = planned(UpSettings())
    assert "trace-0" not in plain
    assert plain["gateway-0"].settings.tracing == "asked"  # type: ignore[attr-defined]


def test_variables_for_what_up_has_no_flag_for_reach_the_children() -> None:
    environ = planned(UpSettings())["gateway-0"].environ({"PENSTOCK_DEFAULT_MAX_TOKENS": "7", "HOME": "/h"})
    assert environ["PENSTOCK_DEFAULT_MAX_TOKENS"] == "7"
    assert environ["HOME"] == "/h"
    assert environ["PENSTOCK_NATS_URL"] == "nats://gateway:secret@h:1"


def test_the_welcome_shows_no_password_and_a_command_that_a_shell_takes(tmp_path: Path) -> None:
    state = DeploymentState("http://h:1", "nats://operator:geheim@h:2", "c", "s", "ps", "it's")
    text = welcome(state, tmp_path, 1.0)
    assert "geheim" not in text
    assert "h:2" in text
    words = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + curl_line("http://h:1", "it's").removeprefix("curl ")],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert json.loads(words[-1])["model"] == "it's"


async def test_what_changes_a_deployment_does_not_fail_unseen(tmp_path: Path) -> None:
    async def fails() -> None:
        raise RuntimeError("boom")

    deployment = Deployment(up_settings(tmp_path))
    with capture_logs() as logs:
        deployment._change(fails(), name="gateways")
        await eventually(lambda: not deployment._changes)
    (entry,) = logs
    assert (entry["event"], entry["change"], str(entry["exc_info"])) == ("change_failed", "gateways", "boom")
