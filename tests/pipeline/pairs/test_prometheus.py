"""A real Prometheus scrapes a deployment under load: every panel and every alert of ours has data there."""

import asyncio
import contextlib
import itertools
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from penstock.deploy.monitoring import ALERTS, run
from tests.generated.dashboards import DASHBOARDS
from tests.pipeline.support import Deployment, free_port, ok, until

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
# Only other exporters, a GPU or a fault make these; see the panels' ``needs``.
NO_FAULT = (
    "penstock_gateway_workers_refused",
    'code!~"ok|cancelled|invalid_request',
    "kubelet_volume_stats",
    "node_filesystem",
    "_lease_losses",
)


@asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus on the files of ``penstock monitoring``, with two scrapes a second."""
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = (
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec("prometheus", *arguments, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/api/v1/"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:

            async def is_ready() -> bool:
                try:
                    return (await http.get("status/config")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(is_ready, "prometheus answers", 30)
            yield http
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def value(http: httpx.AsyncClient, expr: str) -> list[Any]:
    """The result of an instant query, with Grafana's variables filled in."""
    plain = expr.replace("$namespace", ".*").replace("$model", ".*").replace("$__rate_interval", "30s")
    answer = await http.get("query", params={"query": plain})
    assert answer.status_code == 200, (plain, answer.text)
    return [each for each in answer.json()["data"]["result"] if each["value"][1] != "NaN"]


def expected() -> Iterator[str]:
    """All queries that must have data on a healthy deployment without GPUs. Of an alert, what it compares."""
    for panel in itertools.chain.from_iterable(board.panels for board in DASHBOARDS):
        if not panel.needs:
            yield from (query.expr for query in panel.queries)
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        expr = " ".join(rule["expr"].split()).partition(" unless ")[0]
        compared = re.sub(r" (?:>|<|==) [0-9.]+(?: \* [0-9.]+)?(?= and |$)", "", expr)
        if not any(name in compared for name in NO_FAULT):
            yield compared


async def load(url: str) -> None:
    """Streams, whole answers and a failure, with new prompts long enough for a handoff."""
    words = secrets.token_hex(4)

    async def ask(number: int) -> None:
        text = f"{words} {number} " + "word " * 200
        body = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": text}]}
        await ok(http.post("/v1/chat/completions", json=body | {"stream": number % 2 == 0}))

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        assert (await http.post("/v1/chat/completions", json={})).status_code == 400
        await asyncio.gather(*map(ask, range(8)))


async def test_every_panel_and_alert_has_data_on_a_loaded_deployment(pairs: Deployment, tmp_path: Path) -> None:
    assert run(["--state", str(pairs.data_dir / "state.json"), "--out", str(tmp_path)]) == 0
    async with prometheus(tmp_path) as http:
        await until(lambda: value(http, "min(count_over_time(up[1m])) >= 2"), "two scrapes of each process")
        missing = list(expected())

        async def all_have_data() -> bool:
            await load(pairs.urls[0])
            missing[:] = [expr for expr in missing if not await value(http, expr)]
            return not missing

        with contextlib.suppress(AssertionError):  # what is missing says more
            await until(all_have_data, "every query has data", 60)
        assert missing == []
        rules = (await http.get("rules")).json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert await value(http, "up == 0") == []
