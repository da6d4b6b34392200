"""A running deployment is backed up and made again elsewhere: what docs/runbooks.md says of backups."""

import asyncio
import contextlib
import json
from functools import partial
from pathlib import Path

import httpx
import pytest

from penstock.cli.commands import main
from penstock.schemas.requests import cell_in
from tests.pipeline.fleet.test_no_store import body, on_disk, traces
from tests.pipeline.support import Deployment, Oracle, joined, parse_sse, until
from tests.pipeline.test_cells import more_counted
from tests.pipeline.test_no_store_restart import begun

COUNT = 24
LONG = 2000  # tokens, about 12 ms each: it runs for as long as the backup takes
FLAGS = ("--cells", "2", "--gateways", "2", "--workers", "2", "--mock-speedup", "0.5")


async def ran(*argv: str, status: int = 0) -> None:
    assert await asyncio.to_thread(main, list(argv)) == status


def client(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, headers={"authorization": f"Bearer {key}"})


async def answers(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.post("/v1/completions", json=body(1) | {"max_tokens": 1})).status_code == 200
    return False


@pytest.mark.slow  # operate/test_backup has the broker alone
@pytest.mark.timeout(180)  # two deployments with two cells each, one after the other: about 20 s
async def test_a_running_deployment_is_backed_up_and_serves_again_from_the_backup(
    tmp_path: Path, oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "backup"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = Deployment(tmp_path / "first", *FLAGS)
    place = ("--data-dir", str(first.data_dir))
    secret = body(7, no_store=True, max_tokens=LONG)
    try:
        await ran("keys", "create", *place)
        key = capsys.readouterr().out.strip()
        ended = {}
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client(url, key)) for url in first.urls]
            for number, http in enumerate(clients):
                await until(partial(answers, http), "the gateway knows the key and its workers")
                answer = await http.post("/v1/completions", json=body(10 + number))
                ended[answer.json()["id"].removeprefix("cmpl-")] = 10 + number
            assert not any((await more_counted(first)).values())
            running = [await begun(clients[0], asked) for asked in (body(6, max_tokens=LONG), secret)]
            await ran("backup", str(folder), *place)
            assert "in 2 cells" in capsys.readouterr().out
            later = (await clients[0].post("/v1/completions", json=body(20))).json()["id"].removeprefix("cmpl-")
            for _, task in running:
                assert not task.done(), "they were open when it was made"
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        assert {cell_in(each) for each in ended} == {0, 1}
    finally:
        assert await asyncio.to_thread(first.stop) == 0

    await ran("usage", "--by", "", "--json", *place)  # of a stopped deployment
    assert json.loads(capsys.readouterr().out)["requests"] >= len(ended)
    data = tmp_path / "second" / "data"
    await ran("restore", str(folder), "--data-dir", str(data))
    assert "ended 2 requests that were open then" in capsys.readouterr().out
    await ran("restore", str(folder), "--data-dir", str(data), status=1)
    assert "name a new folder" in capsys.readouterr().err

    second = Deployment(tmp_path / "second", *FLAGS)
    try:
        async with client(second.urls[0], key) as http:
            for request_id, number in ended.items():
                stream = await http.get(f"/v1/requests/{request_id}/stream")
                assert joined(parse_sse(stream.content)) == oracle.answer(body(number), COUNT)
            assert (await http.get(f"/v1/requests/{later}")).status_code == 404
            found = (await http.get(f"/v1/requests/{running[0][0]}")).json()
            assert (found["state"], found["error"]["code"]) == ("failed", "worker_lost"), found
            unstored = await http.get(f"/v1/requests/{running[1][0]}")
            assert (unstored.status_code, unstored.json()["error"]["code"]) == (502, "content_lost"), unstored.text
            stream = await http.get(f"/v1/requests/{running[0][0]}/stream")
            assert "restored from a backup of 20" in stream.text
            await until(partial(answers, http), "the key is valid and a worker serves")
            assert (await http.post("/v1/completions", json=body(1), headers={"authorization": ""})).status_code == 401
        assert await on_disk(second, traces(oracle, secret)) == []
        assert not any((await more_counted(second)).values())
        await ran("doctor", "--data-dir", str(data))
        capsys.readouterr()
        await ran("dead", "list", "--data-dir", str(data))
        listed = capsys.readouterr().out
        assert running[0][0] in listed
        assert running[1][0] not in listed, "nobody could run it again"
    finally:
        assert await asyncio.to_thread(second.stop) == 0
