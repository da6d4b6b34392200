"""The broker of a running ``penstock up`` loses its store: what `docs/runbooks.md` says brings everything back."""

import asyncio
import io
import os
import signal

import httpx
import pytest

from penstock.cli.commands import main
from tests.infra.nats_server.support import lose_store
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL_NAME, Deployment, until

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "0")


async def test_a_deployment_serves_again_when_its_keys_are_imported(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` restarted its broker without streams: 503 until somebody applied them by hand."""
    place = ("--data-dir", str(deployment.data_dir))

    async def ran(*argv: str, status: int = 0) -> str:
        found = await asyncio.to_thread(main, [*argv, *place])
        said = capsys.readouterr()
        assert found == status, said
        return said.out + said.err

    await ran("tenants", "add", "acme", "--max-pending", "7")
    assert await asyncio.to_thread(main, ["keys", "create", "--tenant", "acme", *place]) == 0
    key = capsys.readouterr().out.strip()
    exported = await ran("keys", "export")
    url, headers = deployment.urls[0], {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:

        async def answers(status: int) -> bool:
            try:
                asked = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
            except httpx.TransportError:  # the gateway is being started again
                return False
            return asked.status_code == status

        await until(lambda: answers(200), "a chat with the key")
        lost = lose_store(deployment.data_dir)
        await until(lambda: answers(401), "a gateway that has known keys, and finds none in new streams")
        assert int((deployment.data_dir / "nats.pid").read_text()) != lost
        # A fresh gateway does not answer without keys either.
        gateway = next(each.pid for each in deployment.state.processes if each.role == "gateway")
        assert gateway is not None
        os.kill(gateway, signal.SIGKILL)
        await until(lambda: answers(401), "a gateway that starts with the streams empty")
        # Until the tenants are back, nothing makes other ones.
        for verb in (("list",), ("add", "newt")):
            assert "if it lost its disk, `penstock tenants restore`" in await ran("tenants", *verb, status=1)
        assert "restored acme" in await ran("tenants", "restore")
        monkeypatch.setattr("sys.stdin", io.StringIO(exported))
        assert "1 keys added" in await ran("keys", "import")
        await until(lambda: answers(200), "a chat with the key that is back")
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 401
    assert "streams_made_again" in (deployment.home / "up.log").read_text()
