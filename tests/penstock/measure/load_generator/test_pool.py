"""Pools of connections against a small real server: closed and open loop, late answers, https."""

import asyncio
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from penstock.measure.load_generator import (
    ClosedLoop,
    ConnectionPool,
    Exchange,
    HttpTarget,
    ask,
    parse_target,
    send_in_time,
)
from tests.penstock.measure.load_generator.support import TOKENS, Server, serving

BODY = b'{"max_tokens":4,"stream":true}'


def request(target: HttpTarget) -> bytes:
    return f"{target.head('/v1/chat/completions')}{len(BODY)}\r\n\r\n".encode() + BODY


async def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    done: list[Exchange] = []
    async with serving() as (server, target):
        left = iter([Exchange(request(target), done.append, key=key) for key in range(9)])
        async with ConnectionPool(target) as pool:
            assert await ClosedLoop(pool, 3, lambda: next(left, None)).ended(10)
        assert server.connections == 3
    assert sorted(each.key for each in done) == list(range(9))
    assert {(each.output_tokens, each.error) for each in done} == {(TOKENS, "")}


async def test_requests_are_sent_when_they_are_due_whatever_is_under_way() -> None:
    ended: asyncio.Queue[Exchange] = asyncio.Queue()
    async with serving() as (_, target), ConnectionPool(target) as pool:
        began = time.perf_counter()
        await send_in_time(pool, [(at / 100, Exchange(request(target), ended.put_nowait)) for at in range(5)], began)
        done = [await asyncio.wait_for(ended.get(), 10) for _ in range(5)]
    assert all(each.sent >= each.due >= began for each in done)
    assert max(each.due for each in done) - began == pytest.approx(0.04)


async def test_a_request_without_an_answer_fails_in_time_and_its_slot_is_used_again() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    target = HttpTarget("127.0.0.1", listening.sockets[0].getsockname()[1])
    done: list[Exchange] = []
    left = iter([Exchange(b"x", done.append) for _ in range(2)])
    async with ConnectionPool(target, timeout_s=0.1) as pool:
        assert await ClosedLoop(pool, 1, lambda: next(left, None)).ended(10)
    listening.close()
    assert [each.error for each in done] == ["no answer within 0.1 s"] * 2


async def test_more_connections_than_allowed_are_a_failure_that_says_so() -> None:
    ended: asyncio.Queue[Exchange] = asyncio.Queue()
    async with serving() as (_, target), ConnectionPool(target, most=1) as pool:
        for _ in range(2):
            pool.send(Exchange(request(target), ended.put_nowait))
        done = [await asyncio.wait_for(ended.get(), 10) for _ in range(2)]
    assert sorted(each.error[:13] for each in done) == ["", "no connection"]


async def test_https_is_verified_unless_asked_not_to(tmp_path: Path) -> None:
    names = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert"), "-subj", "/CN=localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names]
    try:
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server = Server(1000)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    done: list[Exchange] = []
    for insecure in (False, True):
        target = parse_target(url, insecure=insecure)
        async with ConnectionPool(target) as pool:
            left = iter([Exchange(request(target), done.append)])
            assert await ClosedLoop(pool, 1, lambda left=left: next(left, None)).ended(10)  # type: ignore[misc]
        assert (await ask(target, "/v1/models"))[0] == (200 if insecure else 0)
    listening.close()
    await asyncio.gather(*server.handlers)
    assert "certificate verify failed" in done[0].error
    assert (done[1].error, done[1].output_tokens) == ("", TOKENS)
