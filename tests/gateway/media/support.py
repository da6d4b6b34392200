"""A web server that misbehaves on purpose, and bodies with images."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Site:
    """Answers each path with raw bytes, or by a function that writes them."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.asked: list[str] = []  # whole request heads
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.asked]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def serve(self, path: str, body: bytes, *headers: str, status: str = "200 OK", length: bool = True) -> str:
        """Answer a path like any web server; returns its URL."""
        lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
        self.answers[path] = "\r\n".join([*lines, "", ""]).encode() + body
        return self.url(path)

    def redirect(self, path: str, to: str) -> str:
        return self.serve(path, b"", f"Location: {to}", status="302 Found")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            answer = self.answers[head.split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)
            await writer.drain()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator["Site"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat_body(*content: str | dict[str, Any], **options: Any) -> bytes:
    """One user message; strings are text parts."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], **options}).encode()
