"""A broker loses its store: what docs/runbooks.md says brings everything back, while the other processes run on."""

import asyncio
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from tests.infra.nats_server.support import lose_store
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL, MODEL_NAME, Deployment, Process, free_port, until

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


class Walk:
    """Someone who asks a gateway with a key, and types commands; ``place`` says where the broker is."""

    def __init__(self, url: str, *place: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._place = place
        self._capsys = capsys
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)
        self._key = ""

    async def ran(self, *argv: str, status: int = 0) -> str:
        """What a command says, without its first lines if it is about keys."""
        found = await asyncio.to_thread(main, [*argv, *self._place[: 2 if argv[0] in ("keys", "streams") else None]])
        said = self._capsys.readouterr()
        assert found == status, said
        return said.out + said.err if argv[0] != "keys" else said.out

    async def make_key(self) -> str:
        """The keys as `keys export` has them: one, of a tenant."""
        await self.ran("tenants", "add", "acme", "--max-pending", "7")
        self._key = (await self.ran("keys", "create", "--tenant", "acme")).strip()
        await self.until(200)
        return await self.ran("keys", "export")

    async def status(self, **headers: str) -> int:
        try:
            return (await self._http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code
        except httpx.TransportError:  # the gateway is being started again
            return 0

    async def until(self, status: int) -> None:
        async def answers() -> bool:
            return await self.status(authorization=f"Bearer {self._key}") == status

        await until(answers, f"a chat with the key gets {status}")

    async def bring_back(self, exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # Until the tenants are back, nothing makes other ones.
        for verb in (("list",), ("add", "newt")):
            assert "if it lost its disk, `penstock tenants restore`" in await self.ran("tenants", *verb, status=1)
        assert "restored acme" in await self.ran("tenants", "restore")
        monkeypatch.setattr("sys.stdin", io.StringIO(exported))
        assert "1 keys added" in await self.ran("keys", "import")
        await self.until(200)
        assert await self.status() == 401
        await self._http.aclose()


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "0")


async def test_a_deployment_serves_again_when_its_keys_are_imported(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` restarted its broker without streams: 503 until somebody applied them by hand."""
    walk = Walk(deployment.urls[0], "--data-dir", str(deployment.data_dir), capsys=capsys)
    exported = await walk.make_key()
    lost = lose_store(deployment.data_dir)
    await walk.until(401)  # the gateway has known keys, and finds none in new streams
    assert int((deployment.data_dir / "nats.pid").read_text()) != lost
    gateway = next(each.pid for each in deployment.state.processes if each.role == "gateway")
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    await walk.until(401)  # a fresh gateway does not answer without keys either
    await walk.bring_back(exported, monkeypatch)
    assert "streams_made_again" in (deployment.home / "up.log").read_text()


@pytest.fixture
def separate(make_broker: Callable[[], EmbeddedNats], tmp_path: Path) -> Iterator[Callable[[EmbeddedNats], str]]:
    """Starts a router, a worker and a gateway on a broker of one's own; the gateway's URL."""
    with ExitStack() as started:

        def start(server: EmbeddedNats) -> str:
            port = free_port()
            mock = ("--engine", "mock", "--mock-speedup", "0", "--model", str(MODEL))
            gateway = ("--http-port", str(port), "--state-dir", str(tmp_path / "gateway"))
            for role, flags in (("router", ()), ("worker", mock), ("gateway", gateway)):
                process = Process(tmp_path / f"{role}.log", role, *flags, nats_url=server.url(role))
                started.callback(process.kill)
            return f"http://127.0.0.1:{port}"

        yield start


@pytest.mark.slow  # `penstock up` does above
async def test_separate_processes_serve_again_when_the_streams_are_applied_and_the_keys_imported(
    make_broker: Callable[[], EmbeddedNats],
    separate: Callable[[EmbeddedNats], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = make_broker()
    await server.start()
    await apply_at(server.url(), server.subjects)  # processes that start without streams end
    operator = ("--nats-url", server.url("operator"), "--data-dir", str(tmp_path / "operator"))
    walk = Walk(separate(server), *operator, capsys=capsys)
    exported = await walk.make_key()
    server.kill()
    shutil.rmtree(server.data_dir / "nats")
    await server.start()
    assert "created ps_REQUESTS" in await walk.ran("streams", "apply")
    await walk.until(401)
    await walk.bring_back(exported, monkeypatch)
