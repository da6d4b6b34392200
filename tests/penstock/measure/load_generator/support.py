"""Answers of an OpenAI-compatible server as bytes, and a small real HTTP server that gives them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from penstock.measure.load_generator import HttpTarget

TOKENS = 4


def sse(events: int = TOKENS, tokens: int = TOKENS) -> bytes:
    """A streamed answer: the role, ``events`` pieces of text, the end, the usage."""
    choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}]
    choices += [{"delta": {"content": f"word{i} "}} for i in range(events)]
    choices += [{"delta": {}, "finish_reason": "stop"}]
    bodies: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    bodies += [{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}]
    lines = [b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n" for body in bodies]
    chunks = [b"%x\r\n%s\r\n" % (len(line), line) for line in [*lines, b"data: [DONE]\n\n"]]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


def whole(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


class Server:
    """Answers a number of requests per connection, then closes."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.handlers: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            for _ in range(self.keep):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(whole(b'{"data":[{"id":"m"}]}'))
                    break
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}).encode()
                writer.write(sse() if body.get("stream") else whole(usage))
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(keep: int = 1_000_000) -> AsyncIterator[tuple[Server, HttpTarget]]:
    server = Server(keep)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, HttpTarget("127.0.0.1", listening.sockets[0].getsockname()[1], "")
    finally:
        listening.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*server.handlers)
