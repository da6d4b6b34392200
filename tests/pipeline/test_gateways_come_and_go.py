"""Gateways that are added and leave under load: no request fails, and no connection is refused or reset."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.operate import restart, top
from penstock.operate.doctor import doctor_command
from tests.pipeline.support import Deployment, Oracle, joined, ok, parse_sse, samples, token_prompt, until

COUNT = 12
LONG = 2_500  # tokens, which take the mock engine 7 s, more than twice --drain-s
PATH = "/v1/completions"
FULL, STEADY, IDLE = "1.0 4.0", "0.7 4.0", "0.05 4.0"


class Site:
    def __init__(self, deployment: Deployment, oracle: Oracle, told: Path) -> None:
        self.deployment, self.oracle, self._told = deployment, oracle, told
        self._seeds = itertools.count(1)
        self.answers = 0

    def tell(self, used: str) -> None:
        """What gateways use from now on."""
        new = self._told.with_suffix(".new")
        new.write_text(used)
        new.replace(self._told)

    def gateways(self) -> dict[str, int | None]:
        """Process ids of those that accept."""
        state = self.deployment.state
        return {each.name: each.pid for each in state.processes if each.name in state.gateway_urls}

    async def until_there_are(self, number: int) -> None:
        """Until so many gateways accept and none is leaving."""

        async def reached() -> bool:
            state = self.deployment.state
            return len(state.gateway_urls) == number and not any(each.leaving for each in state.processes)

        await until(reached, f"{number} gateways", 60)
        self.tell(STEADY)

    async def shows(self, url: str, name: str, more_than: float) -> None:
        """Until a gateway's metric is larger than that."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:

            async def reached() -> bool:
                with contextlib.suppress(httpx.ConnectError):  # it is starting
                    page = (await http.get(f"{url}/metrics")).text
                    return samples(page)[f"penstock_gateway_{name}"] > more_than
                return False

            await until(reached, f"{url} shows more than {more_than} {name}", 60)

    async def until_each_serves(self) -> None:
        for url in self.deployment.urls:
            await self.shows(url, "connections", 1)  # this one

    async def ask(self, http: httpx.AsyncClient, count: int = COUNT) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": token_prompt(100, next(self._seeds)), "temperature": 0}
        body |= {"max_tokens": count, "ignore_eos": True, "stream": True}
        answer = await ok(http.post(PATH, json=body))
        assert joined(parse_sse(answer.content)) == self.oracle.answer(body, count)
        self.answers += 1

    def client(self, url: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url or self.deployment.state.http_url, trust_env=False, timeout=60)

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients of the shared address that keep their connections, and one that makes a new one for each request."""
        ending = asyncio.Event()

        async def keeping() -> None:
            async with self.client() as http:
                while not ending.is_set():
                    await self.ask(http)

        async def connecting() -> None:
            while not ending.is_set():
                async with self.client() as http:
                    await self.ask(http)

        async with asyncio.TaskGroup() as group:
            for client in (*[keeping] * 7, connecting):
                group.create_task(client())
            yield
            ending.set()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("elastic")
    told = home / "use"
    told.write_text(STEADY)
    flags = ("--gateways", "1-3", "--workers", "2", "--mock-speedup", "2")
    made = Deployment(home, *flags, module="tests.pipeline.scaled_up", CPU_USE=str(told))
    yield made
    assert made.stop() == 0
    assert made.killed() == []


@pytest.fixture
async def site(deployment: Deployment, oracle: Oracle) -> Site:
    made = Site(deployment, oracle, deployment.home / "use")
    made.tell(IDLE)
    await made.until_there_are(1)
    return made


@pytest.mark.slow  # launch/test_gateways has when; launch/test_up, one port
@pytest.mark.timeout(180)
async def test_gateways_come_and_go_under_load_and_nobody_notices(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = ["--data-dir", str(site.deployment.data_dir)]
    async with site.load():
        site.tell(FULL)
        await site.until_there_are(3)
        await site.until_each_serves()
        first, *_, last = site.deployment.urls
        await site.shows(first, "connections_moved", 0)  # of clients that keep theirs
        async with site.client(last) as http:
            stays = asyncio.create_task(site.ask(http, LONG))
            site.tell(IDLE)

            async def leaves() -> bool:
                return len(site.gateways()) == 1

            await until(leaves, "one gateway accepts")
            site.tell(STEADY)
            assert not stays.done(), "a stream goes on at a gateway that leaves"
            assert await asyncio.to_thread(doctor_command.run, data_dir) == 0
            assert await asyncio.to_thread(top.run, ["--once", "--interval", "200ms", *data_dir]) == 0
            assert "gateways 1 (1 to 3), " in (said := capsys.readouterr().out)
            assert " leaving; gateway-1 leaves" in said
            await stays
        await site.until_there_are(1)
    assert [each.name for each in site.deployment.state.processes if each.role == "gateway"] == ["gateway-0"]


@pytest.mark.slow  # launch/test_up has it for other children
@pytest.mark.timeout(180)
async def test_a_gateway_that_is_killed_while_it_is_added_comes_again(site: Site) -> None:
    async with site.load():
        site.tell(FULL)

        async def starting() -> int | None:
            return site.gateways().get("gateway-1")

        first = await until(starting, "a second gateway is started")
        os.kill(first, signal.SIGKILL)  # it accepts nothing yet
        site.tell(STEADY)
        await site.until_there_are(2)
        await site.until_each_serves()
        assert site.gateways()["gateway-1"] not in (None, first)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_everything_is_restarted_while_a_gateway_is_added_and_another_leaves(site: Site) -> None:
    async with site.load():
        site.tell(FULL)

        async def starting() -> int | None:
            return site.gateways().get("gateway-1")

        await until(starting, "a second gateway is started")
        before = {each.name: each.pid for each in site.deployment.state.processes}
        restarting = asyncio.create_task(
            asyncio.to_thread(restart.run, ["--rolling", "--data-dir", str(site.deployment.data_dir)])
        )

        async def at_it() -> bool:
            now = {each.name: each.pid for each in site.deployment.state.processes}
            return now["gateway-0"] not in (None, before["gateway-0"])

        await until(at_it, "a gateway is restarted", 90)
        site.tell(IDLE)
        assert await restarting == 0
        await site.until_there_are(1)
        await site.until_each_serves()
        after = {each.name: each.pid for each in site.deployment.state.processes if each.role != "nats"}
        assert not any(pid == before[name] for name, pid in after.items())


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_stop_waits_no_longer_for_a_gateway_that_leaves(site: Site) -> None:
    """The last test: it ends the deployment."""
    site.tell(FULL)
    await site.until_there_are(2)
    await site.shows(site.deployment.urls[1], "connections", 0)
    async with site.client(site.deployment.urls[1]) as http:
        asked = asyncio.create_task(site.ask(http, 20 * LONG))
        await site.shows(site.deployment.urls[1], "open_requests", 0)
        site.tell(IDLE)

        async def leaves() -> bool:
            return len(site.gateways()) == 1

        await until(leaves, "one gateway accepts")
        site.deployment.ask_to_stop()
        assert await asyncio.to_thread(site.deployment.wait) == 0  # within 30 s, of the 15 minutes that it would have
        with pytest.raises((httpx.HTTPError, KeyError, AssertionError)):  # it is told to ask for the rest elsewhere
            await asked
