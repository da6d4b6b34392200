"""Sends recorded requests to an OpenAI-compatible server, as token ids."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import httpcore2

from penstock.log.replay.http_answers import HttpAnswer, body_of
from penstock.log.replay.nats_sender import Planned
from penstock.schemas.requests import GenerateRequest

_FAILURES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError, ValueError)
ERROR_BYTES = 65_536


class HttpReplay(NamedTuple):
    """Answers by recorded id. ``seconds``: from the first request to the last end."""

    answers: dict[str, HttpAnswer]
    seconds: float


class HttpSender:
    """
    Args:
        url: of the server, with or without /v1.
        key: bearer token; "": none.
        concurrency: requests, and connections, at a time.
        timeout_s: of one request.
    """

    def __init__(self, url: str, key: str, *, concurrency: int, timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not urlsplit(base).hostname:
            raise ValueError(f"--target {url}: no host in it")
        self._url = f"{base}/v1/completions"
        host = urlsplit(base).netloc.rpartition("@")[2]
        self._headers = [(b"Content-Type", b"application/json"), (b"Host", host.encode())]
        if key:
            self._headers.append((b"Authorization", f"Bearer {key}".encode()))
        self._room = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._timeout_s = timeout_s

    async def send(self, planned: Sequence[Planned]) -> HttpReplay:
        """Send all requests and wait for their answers."""
        answers: dict[str, HttpAnswer] = {}
        began = time.perf_counter()
        async with (
            httpcore2.AsyncConnectionPool(
                max_connections=self._concurrency, max_keepalive_connections=self._concurrency
            ) as pool,
            asyncio.TaskGroup() as group,
        ):
            for each in planned:
                if each.at_s:
                    await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
                await self._room.acquire()
                now_ns = time.time_ns()
                request = each.make(each.recorded, now_ns)
                answer = answers[each.recorded] = HttpAnswer(request, now_ns)
                group.create_task(self._ask(pool, request, answer))
        return HttpReplay(answers, time.perf_counter() - began)

    async def _ask(self, pool: httpcore2.AsyncConnectionPool, request: GenerateRequest, answer: HttpAnswer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = body_of(request, request.model)
                headers = [*self._headers, (b"X-Request-Id", request.client_request_id.encode())]
                async with pool.stream("POST", self._url, headers=headers, content=body) as response:
                    if response.status != 200:
                        said = (await response.aread())[:ERROR_BYTES].decode(errors="replace")
                        answer.fail(f"http_{response.status}", said, time.time_ns())
                        return
                    async for part in response.aiter_stream():
                        answer.feed(part, time.time_ns())
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {self._timeout_s:g} s", time.time_ns())
        except _FAILURES as error:
            answer.fail("connection", f"{type(error).__name__}: {error}", time.time_ns())
        finally:
            answer.end(time.time_ns())
            self._room.release()
