"""Everything is drained and restarted in turn, under load."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.operate import drain, restart
from penstock.schemas.fleet import WorkerState
from tests.pipeline.support import Deployment, Process, ok, parse_sse, registrations, token_prompt, until

pytestmark = pytest.mark.timeout(180)

PATH = "/v1/completions"


def body(number: int, **more: Any) -> dict[str, Any]:
    """Its answer takes 0.7 s."""
    prompt = token_prompt(50, 1_000 + number)
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True, **more}


async def kill_restart(fleet: Deployment, folder: Path) -> None:
    """Kill the command while the first process that it restarts drains; that one starts again nevertheless."""
    first = next(process for process in fleet.state.processes if process.role == "worker")
    argv = ("restart", "--rolling", "--data-dir", str(fleet.data_dir))
    restarting = Process(folder / "restart.log", *argv)

    def now() -> int | None:
        return next(process.pid for process in fleet.state.processes if process.name == first.name)

    async def stops() -> bool:
        return now() != first.pid

    await until(stops, "the first process stops")
    with contextlib.suppress(ProcessLookupError):
        os.kill(restarting.pid, signal.SIGKILL)
    assert await asyncio.to_thread(restarting.wait) == -signal.SIGKILL, restarting.log.read_text()

    async def starts() -> bool:
        return now() not in (None, first.pid)

    await until(starts, "the first process starts again", 30)


async def test_draining_and_restarting_everything_fails_no_request(
    fleet: Deployment, fleet_bus: Bus, tmp_path: Path
) -> None:
    """Under load, on kept connections to the port that the gateways share: every answer comes whole.

    A worker that is killed while it drains is no exception, nor is a command that is killed.
    """
    stop = asyncio.Event()
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        async with httpx.AsyncClient(trust_env=False, timeout=60, base_url=fleet.state.http_url) as http:
            while not stop.is_set():
                asked = body(number, stream=number % 2 == 0)
                answer = await ok(http.post(PATH, json=asked))
                if asked["stream"]:
                    assert parse_sse(answer.content)[-1].data == "[DONE]"
                    assert b'"error"' not in answer.content
                answered += 1

    async def command(run: Callable[[Sequence[str]], int], *argv: str) -> int:
        return await asyncio.to_thread(run, [*argv, "--data-dir", str(fleet.data_dir)])

    def pids() -> dict[str, int | None]:
        return {process.name: process.pid for process in fleet.state.processes}

    clients = [asyncio.create_task(client(number)) for number in range(6)]
    before = pids()
    assert await command(drain.run, "worker-0") == 0

    async def ended() -> bool:
        return pids()["worker-0"] is None

    await until(ended, "worker-0 has ended, and stays down")
    assert await command(drain.run, "worker-1") == 1, "it is the last one"
    assert await command(restart.run, "worker-0") == 0
    await kill_restart(fleet, tmp_path)
    assert await command(restart.run, "--rolling") == 0
    after = pids()
    assert before["nats"] == after["nats"]
    assert all(after[name] not in (None, pid) for name, pid in before.items() if name != "nats")
    killed = after["worker-0"]
    assert killed is not None
    restarting = asyncio.create_task(command(restart.run, "worker-0"))

    async def drains() -> bool:
        workers = (await registrations(fleet_bus)).values()
        return not any(each.pid == killed and each.state is WorkerState.ready for each in workers)

    await until(drains, "worker-0 drains")
    with contextlib.suppress(ProcessLookupError):  # it had nothing to finish
        os.kill(killed, signal.SIGKILL)
    assert await restarting == 0
    count = answered

    async def goes_on() -> bool:
        return answered > count + 8 or any(task.done() for task in clients)

    await until(goes_on, "requests are answered", 30)
    stop.set()
    await asyncio.gather(*clients)
