"""A full disk stops the broker's streams for good; it is started anew as soon as there is room."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.broker import disk
from infra.broker.disk import DiskWatch

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """Stands for a nats-server: its log, and how often it was ended."""

    def __init__(self, folder: Path) -> None:
        self.data_dir, self.log_path, self.ended = folder, folder / "nats.log", 0
        self.pid = 7
        self.log_path.write_text("[INF] write /x: no space left on device, of an earlier run\n")

    def terminate(self) -> None:
        self.ended += 1

    def says(self, text: str) -> None:
        with self.log_path.open("a") as file:
            file.write(text)


async def until(holds: Callable[[], Awaitable[Any]], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110 - the far end is another process
            await asyncio.sleep(0.05)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that are free, of 1,000."""
    free = {"bytes": 10}
    usage = type("Usage", (), {"total": 1000, "free": property(lambda self: free["bytes"])})()
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    return free


def test_the_server_is_ended_once_when_a_disk_that_was_full_has_room(tmp_path: Path, free: dict[str, int]) -> None:
    server = Server(tmp_path)
    watch = DiskWatch(server)
    server.says("[ERR] write /x: no space left ")
    watch.look()
    server.says("on device\n[ERR] again\n")
    watch.look()
    assert server.ended == 0  # a new start would find the disk as full
    free["bytes"] = 50
    watch.look()
    watch.look()
    assert server.ended == 1


def test_a_server_that_met_no_full_disk_is_left_alone(tmp_path: Path, free: dict[str, int]) -> None:
    server = Server(tmp_path)
    watch = DiskWatch(server)
    server.says("[ERR] something else\n")
    free["bytes"] = 500
    watch.look()
    assert server.ended == 0


def test_what_a_server_that_was_asked_to_end_still_says_of_a_full_disk_does_not_end_the_next_one(
    tmp_path: Path, free: dict[str, int]
) -> None:
    server = Server(tmp_path)
    watch = DiskWatch(server, clock=iter(range(0, 1000, 100)).__next__)
    server.says("[7] [ERR] write /x: no space left on device\n")
    free["bytes"] = 500
    watch.look()
    server.says("[7] [ERR] write /x: no space left on device\n[7] [INF] Exiting\n[8] [INF] Starting\n")
    server.pid = 8
    watch.look()
    assert server.ended == 1
    server.says("[8] [ERR] write /x: no space left on device\n")
    watch.look()
    assert server.ended == 2


def test_one_message_counts_once_wherever_a_look_cuts_the_log(tmp_path: Path, free: dict[str, int]) -> None:
    server = Server(tmp_path)
    watch = DiskWatch(server, clock=iter(range(0, 1000, 100)).__next__)
    free["bytes"] = 500
    server.says("[ERR] write /x: no space left on device")
    watch.look()
    watch.look()
    server.says("\n[INF] started\n")
    watch.look()
    assert server.ended == 1


def test_a_disk_that_has_room_and_is_full_does_not_end_the_server_at_each_look(
    tmp_path: Path, free: dict[str, int]
) -> None:
    now = 0.0
    server = Server(tmp_path)
    watch = DiskWatch(server, clock=lambda: now)
    free["bytes"] = 500  # but no inodes
    for _ in range(20):
        server.says("[ERR] write /x: no space left on device\n")
        watch.look()
    assert server.ended == 1
    now = disk.REST_S
    watch.look()
    assert server.ended == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a file system of its own: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.timeout(100)
async def test_a_deployment_whose_disk_was_full_serves_again_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    data = small_disk / "data"
    flags = ["--engine", "mock", "--mock-speedup", "0", "--http-port", "0", "--log-format", "json", "--drain-s", "1"]
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "infra.cli", "up", *flags, "--data-dir", str(data)],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:

        async def ready() -> bool:
            assert up.poll() is None, (tmp_path / "up.log").read_text()
            return (data / "state.json").exists() and bool(json.loads((data / "state.json").read_text())["model"])

        await until(ready)
        state = json.loads((data / "state.json").read_text())
        async with httpx.AsyncClient(base_url=state["http_url"], timeout=30) as client:

            async def status() -> int:
                body = {"model": state["model"], "prompt": "a b c", "max_tokens": 4}
                return (await client.post("/v1/completions", json=body)).status_code

            assert await status() == 200
            filler = small_disk / "filler"
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize)
            refused = await client.post(
                "/v1/completions", json={"model": state["model"], "prompt": "a " * 800, "max_tokens": 4, "timeout_s": 3}
            )
            assert refused.status_code in (503, 504), refused.text
            filler.unlink()

            async def serves() -> bool:
                return await status() == 200

            await until(serves, 60)
        said = (tmp_path / "up.log").read_text()
        assert "disk_full" in said
        assert "broker_restarts" in said
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(20)
        finally:
            up.kill()
