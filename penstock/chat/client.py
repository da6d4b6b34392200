"""Streams chat completions from an OpenAI-compatible server."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import msgspec

from penstock.chat.answer import AnswerDelta, StreamedAnswer

CONNECT_S = 10.0
SILENCE_S = 600.0  # between two pieces of an answer: a long prompt may wait for a worker
RESUME_S = 60.0  # for which a broken stream is asked for again
RESUME_PAUSE_S = 0.5
ERROR_BYTES = 65_536
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError)


class ServerRefused(ValueError):
    """The server answered with an error."""


class ChatClient:
    """
    Args:
        url: of the server, with or without /v1.
        key: bearer token; "": none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self._base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: expected http://HOST:PORT")
        self._headers = [(b"Content-Type", b"application/json"), (b"Host", parts.netloc.rpartition("@")[2].encode())]
        if key:
            self._headers.append((b"Authorization", f"Bearer {key}".encode()))
        self._pool = httpcore2.AsyncConnectionPool(max_connections=2)

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def models(self) -> list[str]:
        """Names of the models that are served.

        Raises:
            ServerRefused: the server refuses to say.
            ValueError: it cannot be reached, or is none.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                response = await self._pool.request("GET", f"{self._base}/v1/models", headers=self._headers)
        except (*BROKEN, TimeoutError) as error:
            raise ValueError(f"no answer from {self._base}: {error or 'timeout'}") from error
        if response.status != 200:
            raise ServerRefused(_message(response.status, response.content))
        try:
            return [str(each["id"]) for each in msgspec.json.decode(response.content)["data"]]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ValueError(f"{self._base} is no OpenAI-compatible server: /v1/models is not a list") from error

    async def ask(self, body: dict[str, Any], answer: StreamedAnswer) -> AsyncGenerator[AnswerDelta]:
        """Ask for a chat completion; ``answer`` grows with what is yielded.

        A stream that breaks goes on where it was, if the server numbers its events and keeps answers, as Penstock does.

        Raises:
            ServerRefused: the server refuses the request.
            ValueError: the server reports an error, or cannot be reached.
        """
        content = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        request = "POST", f"{self._base}/v1/chat/completions", self._headers, content
        deadline = 0.0
        loop = asyncio.get_running_loop()
        while not answer.complete:
            before = answer.last_event
            try:
                async with aclosing(self._stream(*request, answer)) as parts:
                    async for part in parts:
                        yield part
                if answer.complete or answer.finish:
                    return
                broken: Exception = ValueError("the connection was closed before the answer's end")
            except BROKEN as error:
                broken = error
            if not answer.last_event:
                raise ValueError(f"{self._base}: {broken or type(broken).__name__}") from broken
            if answer.last_event != before or not deadline:
                deadline = loop.time() + RESUME_S
            if loop.time() > deadline:
                raise ValueError(f"the answer broke off, and cannot be continued: {broken}") from broken
            await asyncio.sleep(RESUME_PAUSE_S)
            answer.restart()
            headers = [*self._headers, (b"Last-Event-ID", answer.last_event.encode())]
            request = "GET", f"{self._base}/v1/requests/{answer.request_id}/stream", headers, b""

    async def _stream(
        self, method: str, url: str, headers: list[tuple[bytes, bytes]], content: bytes, answer: StreamedAnswer
    ) -> AsyncGenerator[AnswerDelta]:
        limits = {"timeout": {"connect": CONNECT_S, "read": SILENCE_S, "write": CONNECT_S, "pool": CONNECT_S}}
        async with self._pool.stream(method, url, headers=headers, content=content, extensions=limits) as response:
            if response.status != 200:
                data = b""
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > ERROR_BYTES:
                        break
                raise ServerRefused(_message(response.status, data[:ERROR_BYTES]))
            async for piece in response.aiter_stream():
                for part in answer.feed(piece):
                    yield part


def _message(status: int, content: bytes) -> str:
    """An error as the server words it."""
    hint = " (here: --key KEY, or $OPENAI_API_KEY)" if status == 401 else ""
    try:
        error = msgspec.json.decode(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error) + hint
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"the server answered {status}: {content[:200].decode(errors='replace')}"
