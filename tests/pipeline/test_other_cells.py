"""A running deployment gets more cells, and fewer again, under load: nothing is refused, and nothing is lost."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.launch.plan import LACKING_S
from penstock.launch.state import read_cells
from penstock.operate import drain, restart
from penstock.operate.doctor import doctor_command
from penstock.schemas.requests import cell_in
from tests.pipeline.support import Deployment, Oracle, joined, ok, parse_sse, token_prompt, until

COUNT = 12
PATH = "/v1/completions"


class Load:
    """Clients of the shared port, one request after the other, on connections that they keep."""

    def __init__(self, deployment: Deployment, oracle: Oracle) -> None:
        self._url = deployment.state.http_url
        self._oracle = oracle
        self._seeds = itertools.count(1)
        self.sent: dict[str, dict[str, Any]] = {}  # bodies by id
        self.order: list[str] = []

    async def ask(self, http: httpx.AsyncClient) -> None:
        seed = next(self._seeds)
        body = {"model": "tiny", "prompt": token_prompt(400, seed), "temperature": 0, "max_tokens": COUNT}
        body |= {"ignore_eos": True, "stream": True}
        answer = await ok(http.post(PATH, json=body))
        events = parse_sse(answer.content)
        assert events[-1].data == "[DONE]", answer.text
        assert joined(events) == self._oracle.answer(body, COUNT)
        found = str(events[0].body["id"]).removeprefix("cmpl-")
        self.sent[found] = body
        self.order.append(found)

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        ending = asyncio.Event()

        async def client() -> None:
            async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=60) as http:
                while not ending.is_set():
                    await self.ask(http)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
            yield
            ending.set()

    async def until_cells(self, cells: set[int], within_s: float = 60.0) -> None:
        """Until the last answers came from all of these cells and from no other."""
        async with asyncio.timeout(within_s):
            begun = len(self.order)
            while {cell_in(each) for each in self.order[begun:][-40:]} != cells or len(self.order) < begun + 40:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def check_found(self, urls: tuple[str, ...]) -> None:
        """Each gateway finds some requests of each cell, whole."""
        some = {cell_in(each): each for each in self.sent}
        for url in urls:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                for found in some.values():
                    stream = await ok(http.get(f"/v1/requests/{found}/stream"))
                    assert joined(parse_sse(stream.content)) == self._oracle.answer(self.sent[found], COUNT)


async def set_cells(deployment: Deployment, number: int) -> None:
    argv = ("--rolling", "--cells", str(number), "--data-dir", str(deployment.data_dir))
    assert await asyncio.to_thread(restart.run, argv) == 0


def workers_in(deployment: Deployment) -> Counter[int]:
    return Counter(each.cell for each in deployment.state.processes if each.role == "worker")


async def resize(home: Path, oracle: Oracle, workers: int, gateways: int, cells: int, clients: int) -> None:
    """From one cell to several and back."""
    flags = ("--workers", str(workers), "--gateways", str(gateways), "--mock-speedup", "5")
    deployment = Deployment(home, *flags)
    try:
        load = Load(deployment, oracle)
        before = {each.name: each.pid for each in deployment.state.processes}
        async with load.running(clients):
            await set_cells(deployment, cells)
            await load.until_cells(set(range(cells)))
            assert workers_in(deployment) == dict.fromkeys(range(cells), workers // cells)
            await set_cells(deployment, 1)
            assert workers_in(deployment) == {0: workers}
            await load.until_cells({0})
        state = deployment.state
        assert (state.active_cells, len(state.cells)) == (1, cells)
        assert not any(each.outdated for each in state.processes)
        assert {each.name: each.pid for each in state.processes}["worker-0"] == before["worker-0"], "it never moved"
        await load.check_found(state.http_urls)
        assert await asyncio.to_thread(doctor_command.run, ["--data-dir", str(deployment.data_dir)]) == 0
    finally:
        assert await asyncio.to_thread(deployment.stop) == 0
    counts = read_cells(deployment.data_dir)
    assert (counts.known, counts.active) == (cells, 1)


@pytest.mark.slow  # launch/test_growth and test_up have each step
@pytest.mark.timeout(180)
async def test_a_second_cell_comes_and_goes_under_load(tmp_path: Path, oracle: Oracle) -> None:
    await resize(tmp_path, oracle, workers=2, gateways=1, cells=2, clients=6)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_one_cell_becomes_four_and_one_again_under_load(tmp_path: Path, oracle: Oracle) -> None:
    await resize(tmp_path, oracle, workers=8, gateways=2, cells=4, clients=24)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_cell_whose_workers_were_drained_gets_one_of_the_other_under_load(
    tmp_path: Path, oracle: Oracle
) -> None:
    deployment = Deployment(tmp_path, "--workers", "4", "--gateways", "2", "--cells", "2", "--mock-speedup", "5")
    try:
        load = Load(deployment, oracle)
        async with load.running(8):
            argv = ["worker-1", "worker-3", "--force", "--data-dir", str(deployment.data_dir)]
            assert await asyncio.to_thread(drain.run, argv) == 0
            await load.until_cells({0})

            async def has_worker() -> bool:
                running = [each for each in deployment.state.processes if each.role == "worker" and each.pid]
                return {each.name: each.cell for each in running} == {"worker-0": 0, "worker-2": 1}

            await until(has_worker, "the second cell has a worker", LACKING_S + 30)
            await load.until_cells({0, 1})
            argv = ["worker-1", "worker-3", "--data-dir", str(deployment.data_dir)]
            assert await asyncio.to_thread(restart.run, argv) == 0
            assert workers_in(deployment) == {0: 2, 1: 2}
    finally:
        assert await asyncio.to_thread(deployment.stop) == 0
