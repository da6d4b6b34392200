"""The broker's passwords are changed by the commands that the page prints while clients stream: nothing is refused."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client

from penstock.cli.commands import main
from penstock.infra.nats_server.tenants import SECOND_IN_USE
from tests.penstock.cli.test_printed_commands import ROOT, commands_of, lines_of
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL_NAME, Deployment

PAGE = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


def printed() -> list[list[str]]:
    """The commands of the section about passwords."""
    section = PAGE.partition("\n## Passwords\n")[2].partition("\n## ")[0]
    return [words for line in lines_of(section) for words in commands_of(line)]


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--workers", "2", "--routers", "2", "--gateways", "2", "--dashboard-port", "0")


def secrets(deployment: Deployment) -> dict[str, str]:
    found: dict[str, str] = json.loads((deployment.data_dir / "secrets.json").read_text())
    return found


async def ask(url: str, answers: list[str], stop: asyncio.Event) -> None:
    """One streamed answer after the other."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        while not stop.is_set():
            async with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
                text = (await answer.aread()).decode()
            ended = answer.status_code == 200 and text.rstrip().endswith("data: [DONE]") and '"error"' not in text
            answers.append("whole" if ended else f"{answer.status_code} {text[-300:]}")


async def ask_over_nats(deployment: Deployment, answers: list[str], stop: asyncio.Event) -> None:
    """On one connection throughout, as a user that is not changed."""
    login = deployment.state.client_nats
    problems: list[str] = []

    async def note(*_: object) -> None:
        problems.append("the connection ended")

    nc = await nats.connect(login.server, user=login.user, password=login.password, disconnected_cb=note)
    while not stop.is_set():
        reply = await nc.request(f"ps.ask.{MODEL_NAME}", json.dumps(CHAT).encode(), timeout=60)
        answers.append("whole" if b'"usage"' in reply.data else repr(reply.data[:300]))
    assert not problems
    await nc.close()


async def refused(url: str) -> bool:
    nc = Client()
    try:
        await nc.connect(url, allow_reconnect=False, connect_timeout=5)
    except nats.errors.Error as error:
        return "authorization violation" in str(error).lower()
    finally:
        await nc.close()  # one that was refused is open, too
    return False


@pytest.mark.slow  # nats_server/test_passwords rotates them
async def test_passwords_are_rotated_as_the_page_says_while_clients_stream(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".penstock").symlink_to(deployment.data_dir)
    monkeypatch.chdir(tmp_path)
    before, old_url = secrets(deployment), deployment.state.nats_url
    commands = printed()
    assert [words[:2] for words in commands] == [
        ["passwords", "rotate"], ["restart", "--rolling"], ["passwords", "list"], ["passwords", "retire"]
    ]  # fmt: skip
    url = deployment.state.http_url
    answers: list[str] = []
    stop = asyncio.Event()
    clients = [asyncio.create_task(ask(url, answers, stop)) for _ in range(3)]
    clients.append(asyncio.create_task(ask_over_nats(deployment, answers, stop)))
    while len(answers) < 8:  # noqa: ASYNC110 - bounded by the clients' timeouts
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(main, ["passwords", "rotate"]) == 0
    assert await asyncio.to_thread(main, ["passwords", "retire"]) == 1, "processes still use the old ones"
    told = capfd.readouterr().err
    assert "still connected with a password that would end" in told
    assert re.search(r"\(\w+\) at 127\.0\.0\.1:\d+ of server \S+", told), "processes of a role may have one name"
    assert not await refused(old_url), "both passwords are valid"
    for words in commands[1:]:
        assert await asyncio.to_thread(main, words) == 0, capfd.readouterr()
    count = len(answers)
    while len(answers) < count + 8:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stop.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*clients)
    assert set(answers) == {"whole"}
    listed = capfd.readouterr().out
    assert "gateway   gateway-2" in listed
    now = secrets(deployment)
    assert "gateway" in now[SECOND_IN_USE].split()
    assert "client" not in now[SECOND_IN_USE].split()
    for role in ("gateway", "router", "worker", "operator", "sys"):
        assert await refused(f"{old_url.partition('//')[0]}//{role}:{before[role]}@{old_url.rpartition('@')[2]}")
    assert "operator-2:" in deployment.state.nats_url
    # Everything goes on with the new ones.
    assert await asyncio.to_thread(main, ["top", "--once", "--json"]) == 0
    assert await asyncio.to_thread(main, ["tenants", "add", "acme"]) == 0


@pytest.mark.slow
async def test_passwords_are_rotated_twice(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".penstock").symlink_to(deployment.data_dir)
    monkeypatch.chdir(tmp_path)
    in_use = []
    for _ in range(2):
        for words in printed():
            assert await asyncio.to_thread(main, words) == 0, capfd.readouterr()
        in_use.append("gateway" in secrets(deployment)[SECOND_IN_USE].split())
    assert sorted(in_use) == [False, True]
    async with httpx.AsyncClient(base_url=deployment.state.http_url, trust_env=False, timeout=60) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
