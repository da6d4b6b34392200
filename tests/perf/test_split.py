"""``penstock bench split`` between two small real HTTP servers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.perf.split import Settings, run


@contextlib.asynccontextmanager
async def serving(pause_s: float) -> AsyncIterator[str]:
    """A server whose second token comes ``pause_s`` after the first; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        else:
            writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\n')
            await writer.drain()
            await asyncio.sleep(pause_s)  # the server's own work, not a wait of the test
            writer.write(b'data: {"choices":[{"text":"b"}]}\n\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_time_between_two_tokens_is_that_of_each_deployment(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    async with serving(0.0) as whole, serving(0.05) as split:
        settings = Settings(whole=whole, split=split, rounds=3, prompt_tokens=8, json=str(out))
        assert await asyncio.to_thread(run, settings) == 0
    figures = json.loads(out.read_text())
    assert figures["split"]["second_ms"] >= 50


def test_a_deployment_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(whole="http://127.0.0.1:1", rounds=1)) == 1
    assert "http://127.0.0.1:1 does not answer: start both deployments first" in capsys.readouterr().err
