"""What an operator changes while clients are served: certificates, streams' limits, stored requests; and foreign pages.

Clients stream over HTTPS all the while, and none of them may notice.
"""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server import retention
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL_NAME, Deployment, Oracle, ending, joined, parse_sse, until, words
from tests.tls_support import Pair, issue

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates"),
    pytest.mark.timeout(180),
]

PAGE = "https://app.example"
CLIENTS = 4
SMALL = 64 << 10  # bytes


class Site(NamedTuple):
    deployment: Deployment
    certificates: dict[str, Pair]
    served: Pair  # the files that the gateways read


def put(source: Pair, target: Pair) -> None:
    for one, other in zip(source, target, strict=True):
        copy = other.with_suffix(".new")
        shutil.copy(one, copy)
        copy.replace(other)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, new_deployment: NewDeployment) -> Site:
    folder: Path = tmp_path_factory.mktemp("certificates")
    certificates = {name: issue(folder, name) for name in ("first", "second")}
    served = (folder / "tls.crt", folder / "tls.key")
    put(certificates["first"], served)
    flags = ("--mock-speedup", "4", "--gateways", "2", "--cors-origins", PAGE, "--list-requests")
    deployment = new_deployment(*flags, "--tls-cert", str(served[0]), "--tls-key", str(served[1]))
    return Site(deployment, certificates, served)


@pytest.fixture
async def bus(site: Site) -> AsyncIterator[Bus]:
    made = await connect(site.deployment.state.nats_url, role="operator", name="test")
    yield made
    await made.close()


def client_of(site: Site, url: str, *trusted: str) -> httpx.AsyncClient:
    """A client that trusts only these certificates."""
    context = ssl.create_default_context(cafile=str(site.certificates[trusted[0]][0]))
    for name in trusted[1:]:
        context.load_verify_locations(cafile=str(site.certificates[name][0]))
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, verify=context)


def command(site: Site, *argv: str) -> int:
    return main([*argv, "--data-dir", str(site.deployment.data_dir)])


class Load:
    """``answers``: that were right, so far."""

    def __init__(self, site: Site, oracle: Oracle) -> None:
        self.answers = 0
        self.wrong: list[str] = []
        self._site, self._oracle = site, oracle
        self._over = False

    async def more(self, count: int) -> None:
        """Wait until ``count`` more answers were right."""
        goal = self.answers + count

        async def reached() -> bool:
            return self.answers >= goal or bool(self.wrong)

        await until(reached, f"{count} more answers", 90)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            await self.more(CLIENTS)
            yield self
            await self.more(CLIENTS)
        finally:
            self._over = True
            await asyncio.gather(*tasks)
        assert self.wrong == []

    async def _client(self, number: int) -> None:
        deployment = self._site.deployment
        async with client_of(self._site, deployment.urls[number % len(deployment.urls)], "first", "second") as client:
            turn = 0
            while not self._over:
                turn += 1
                body = {
                    "model": MODEL_NAME,
                    "prompt": words(400, 1_000 * number + turn),
                    "max_tokens": 40,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": turn % 2 == 0,
                }
                try:
                    answer = await client.post("/v1/completions", json=body)
                    text = joined(parse_sse(answer.content)) if body["stream"] else answer.json()["choices"][0]["text"]
                except (httpx.HTTPError, KeyError, ValueError, AssertionError) as error:
                    self.wrong.append(repr(error))
                    return
                if text != self._oracle.answer(body, 40):
                    self.wrong.append(f"{answer.status_code}: {text[:100]}")
                    return
                self.answers += 1


@pytest.fixture
def load(site: Site, oracle: Oracle) -> Load:
    return Load(site, oracle)


async def test_a_new_certificate_is_served_without_a_break(site: Site, load: Load) -> None:
    async with load.running():
        put(site.certificates["second"], site.served)
        for url in site.deployment.urls:

            async def shown(url: str = url) -> bool:
                async with client_of(site, url, "second") as new:
                    with suppress(httpx.ConnectError):
                        return (await new.get("/health/live")).status_code == 200
                return False

            await until(shown, "the new certificate", 60)
            async with client_of(site, url, "first") as old:
                with pytest.raises(httpx.ConnectError):
                    await old.get("/health/live")


async def test_a_page_of_another_site_may_ask_and_read_errors_and_streams(site: Site) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a b c", "max_tokens": 4}
    async with client_of(site, site.deployment.urls[0], "first", "second") as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"):
            preflight = await client.options(path, headers=asks)
            assert preflight.status_code in (200, 204), path
            assert preflight.headers["access-control-allow-origin"] == PAGE
            assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for each, status in ((body, 200), (body | {"stream": True}, 200), (body | {"model": "none"}, 404)):
            answer = await client.post("/v1/completions", json=each, headers={"Origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            foreign = await client.post("/v1/completions", json=each, headers={"Origin": "https://other.example"})
            assert "access-control-allow-origin" not in foreign.headers


async def test_requests_are_forgotten_under_load_and_nobody_notices(site: Site, load: Load, bus: Bus) -> None:
    secret = "xq7zk"
    async with client_of(site, site.deployment.urls[0], "first", "second") as client, load.running():
        ids = []
        for number in range(3):
            body = {"model": MODEL_NAME, "prompt": f"{secret} {number}", "max_tokens": 4, "user": f"{secret}{number}"}
            ids.append((await client.post("/v1/completions", json=body)).headers["x-request-id"])
            await ending(bus, ids[-1])
        assert await asyncio.to_thread(command, site, "forget", *ids[:2], "--yes") == 0
        for url in site.deployment.urls:
            async with client_of(site, url, "first", "second") as gateway:
                found = [(await gateway.get(f"/v1/requests/{each}")).status_code for each in ids]
                assert found == [404, 404, 200]
                listed = (await gateway.get("/v1/requests", params={"limit": 100})).json()["data"]
                assert not {each["id"] for each in listed} & set(ids[:2])
        # A second time, and one that is not there: told so, and nothing else is deleted.
        assert await asyncio.to_thread(command, site, "forget", ids[0], "--yes") != 0
        assert (await client.get(f"/v1/requests/{ids[2]}")).status_code == 200
    stored = b"".join(path.read_bytes() for path in site.deployment.data_dir.rglob("*.blk"))
    assert [f"{secret}{number}".encode() in stored for number in range(3)] == [False, False, True]


async def test_streams_at_their_limits_lose_no_answer(site: Site, load: Load, bus: Bus) -> None:
    """Each discards what is over, and nothing that still runs."""
    sizes = dict.fromkeys(("REQUESTS", "WORK", "TOKENS", "KV"), SMALL) | {"DONE": 3 * SMALL}
    streams = {bus.subjects.stream(name): size for name, size in sizes.items()}
    async with load.running():
        for stream, size in streams.items():  # smaller than `penstock streams set` takes
            await retention.set_limits(bus.nc, stream, None, size)

        async def discarding() -> bool:
            states = [((await bus.js.stream_info(stream)).state, size) for stream, size in streams.items()]
            return all(state.first_seq > 1 and state.bytes <= size for state, size in states)

        await until(discarding, "all streams are at their limits", 90)
        await load.more(10 * CLIENTS)
    async with client_of(site, site.deployment.urls[0], "first", "second") as client:

        async def all_ended() -> bool:
            return {each["state"] for each in (await client.get("/v1/requests")).json()["data"]} == {"done"}

        await until(all_ended, "every request that is still listed has its end")
