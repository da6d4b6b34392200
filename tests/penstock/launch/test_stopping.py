"""Stopping in order, and what the terminal shows meanwhile."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from penstock.infra.process.child import Process
from penstock.infra.process.supervisor import Keeper
from penstock.launch import deployment
from penstock.launch.deployment import stop_in_order
from penstock.launch.state import read_state

ROOT = Path(__file__).parents[3]
# Ends once the file named by its argument is there, whatever signals it gets.
STUBBORN = (
    "import pathlib, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
)


async def started(
    tmp_path: Path, *roles: str, code: str = "import signal; print('up', flush=True); signal.pause()"
) -> list[Keeper]:
    """Processes of these roles; gateways end only once ``tmp_path / 'go'`` is there, the others run ``code``."""
    keepers = []
    for role in roles:
        command = [sys.executable, "-c", STUBBORN if role == "gateway" else code, str(tmp_path / "go")]
        child = Process(f"{role}-0", role, command, os.environ, tmp_path / f"{role}.log")
        keepers.append(Keeper(child))
        await keepers[-1].start()
        async with asyncio.timeout(30):
            while child.last_lines() != ["up"]:  # noqa: ASYNC110 - the far end is another process
                await asyncio.sleep(0.01)
    return keepers


async def test_it_says_what_it_waits_for_and_for_how_long_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "REPORT_S", 0.02)
    keepers = await started(tmp_path, "gateway", "worker")
    lines: list[str] = []
    reported = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if "waiting for gateway-0" in line:
            reported.set()

    stop = asyncio.create_task(stop_in_order(keepers, 30.0, asyncio.Event(), say))
    async with asyncio.timeout(30):
        await reported.wait()
    assert keepers[1].child.pid is not None  # workers are needed until the gateways have ended
    (tmp_path / "go").touch()
    assert not await stop
    assert lines[0] == "stopping: waiting up to 30 s for open requests; Ctrl-C again to stop at once"
    assert lines[1].startswith("  waiting for gateway-0: 3")
    assert lines[-1].startswith("stopped after ")
    assert [keeper.child.pid for keeper in keepers] == [None, None]


# Drains for as long as it likes, unless it is told that the drain is over.
DRAINING = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(print('hurried', flush=True)))\n"
    "print('up', flush=True)\n"
    "while True: signal.pause()"
)


async def test_all_processes_share_one_deadline(tmp_path: Path) -> None:
    """What the gateways have used of it is gone for the workers: they end their drain, in order."""
    keepers = await started(tmp_path, "gateway", "worker", code=DRAINING)
    lines: list[str] = []
    insisted = asyncio.Event()
    stop = asyncio.create_task(stop_in_order(keepers, 1.0, insisted, lines.append))
    (tmp_path / "go").touch()
    async with asyncio.timeout(30):
        assert not await stop
    said = (tmp_path / "worker.log").read_text().split()
    assert said == ["up", "asked", "hurried"]
    assert keepers[1].last_status == 0, "it was not killed"


async def test_a_second_signal_stops_at_once_and_says_so(tmp_path: Path) -> None:
    keepers = await started(tmp_path, "gateway", "worker")
    lines: list[str] = []
    insisted = asyncio.Event()
    stop = asyncio.create_task(stop_in_order(keepers, 600.0, insisted, lines.append))
    await asyncio.sleep(0)
    insisted.set()
    async with asyncio.timeout(30):
        assert await stop
    assert lines[-1] == "stopped at once; open requests were cut off"
    assert [keeper.child.pid for keeper in keepers] == [None, None]


def test_open_requests_of_both_doors_are_waited_for_together(tmp_path: Path) -> None:
    """A stream keeps a gateway, and what nobody reads keeps a worker: for the time that was promised, once."""
    data, drain_s = tmp_path / "data", 10
    flags = ("--engine=mock", "--mock-speedup=0.02", "--http-port=0", f"--drain-s={drain_s}", f"--data-dir={data}")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "penstock", "up", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as process:
        try:
            deadline = time.monotonic() + 100
            while not (data / "state.json").exists() or not read_state(data / "state.json").model:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with httpx.Client(base_url=read_state(data / "state.json").http_url, timeout=60) as client:
                body = {"model": "tiny", "input": "a b c", "max_output_tokens": 2_000, "background": True}
                assert client.post("/v1/responses", json=body).status_code == 200
                long = {"model": "tiny", "prompt": "d e f", "max_tokens": 2_000, "stream": True}
                with client.stream("POST", "/v1/completions", json=long) as stream:
                    next(stream.iter_lines())
                    process.send_signal(signal.SIGINT)
                    _, shown = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0
    took = re.fullmatch(r"stopped after ([\d.]+) s", shown.splitlines()[-1])
    assert took is not None, shown
    assert drain_s <= float(took[1]) < 2 * drain_s, shown
    assert "process_killed" not in "".join(path.read_text() for path in (data / "logs").glob("*.log"))


def test_ctrl_c_of_the_real_command(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "penstock", "up", "--engine=mock", "--http-port=0", f"--data-dir={data}"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as process:
        try:
            deadline = time.monotonic() + 100
            while not (data / "state.json").exists() or not read_state(data / "state.json").model:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, shown = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    last = shown.splitlines()[-2:]
    assert last[0] == "stopping: waiting up to 30 s for open requests; Ctrl-C again to stop at once"
    assert last[1].startswith("stopped after ")
