"""A gateway that may open few files: what it refuses is in its log and its metrics, and ``penstock doctor`` says so."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.operate.doctor.fleet import check_gateways
from tests.pipeline.support import ROOT, samples, until

FILES = 256


@pytest.mark.timeout(100)
async def test_connections_beyond_the_files_of_a_gateway_are_counted_logged_and_found(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = f"--engine mock --mock-speedup 0 --http-port 0 --log-format json --drain-s 1 --data-dir {data}"
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(  # noqa: ASYNC220
            ["bash", "-c", f"ulimit -n {FILES} && exec {sys.executable} -m penstock up {flags}"],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    writers: list[asyncio.StreamWriter] = []
    try:

        async def ready() -> bool:
            assert up.poll() is None, (tmp_path / "up.log").read_text()
            return (data / "state.json").exists() and bool(json.loads((data / "state.json").read_text())["model"])

        await until(ready, "it is ready", 60)
        url = json.loads((data / "state.json").read_text())["http_url"]
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=30
        ) as client:  # its connection was there before
            page = samples((await client.get("/metrics")).text)
            limit = page["penstock_gateway_max_connections"]
            assert 0 < limit < FILES
            assert page["penstock_gateway_files_limit"] == FILES
            host, _, port = url.removeprefix("http://").partition(":")
            for _ in range(FILES + 100):
                _, writer = await asyncio.open_connection(host, int(port))
                writers.append(writer)

            async def refused() -> float:
                return samples((await client.get("/metrics")).text)["penstock_gateway_connections_refused"]

            await until(refused, "connections were refused")
            assert (await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})).status_code == 200
        for writer in writers:
            writer.close()

        async def found() -> str:
            texts = [finding.what for finding in await check_gateways([url])]
            return "\n".join(texts) if any("has refused" in text for text in texts) else ""

        assert f"{FILES} open files" in await until(found, "doctor names it")
        said = [line for line in (tmp_path / "up.log").read_text().splitlines() if "connections_refused" in line]
        assert 1 <= len(said) <= 5
    finally:
        for writer in writers:
            writer.close()
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(20)
        finally:
            up.kill()
