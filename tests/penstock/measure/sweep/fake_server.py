"""An OpenAI-compatible server that can be told to refuse fields, to fail and to be slow."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.measure.sweep.workload import TokenText
from tests.penstock.measure.load_generator.support import whole

OVERHEAD = 7
TEXTS = TokenText(load_tokenizer(TINY))


class FakeServer:
    """
    Attributes:
        refuses: fields that it answers with status 400.
        usage: it counts tokens.
        fails_after: requests after which it answers 500.
        slots: requests that it works on at once; each takes ``seconds``.
    """

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.usage = True
        self.models = ["m"]
        self.fails_after = 1 << 30
        self.seconds = 0.0
        self.slots = asyncio.Semaphore(1 << 30)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""
        self.handlers: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                self.paths.append(path)
                if method == "GET":
                    writer.write(self.get(path))
                    continue
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                async with self.slots:
                    await asyncio.sleep(self.seconds)
                writer.write(self.post(body))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def get(self, path: str) -> bytes:
        if path == "/v1/models":
            return whole(json.dumps({"data": [{"id": each} for each in self.models]}).encode())
        return whole(b"", "404 Not Found")

    def post(self, body: dict[str, Any]) -> bytes:
        if wrong := self.refuses & body.keys():
            return whole(f"unknown field {wrong}".encode(), "400 Bad Request")
        self.bodies.append(body)
        if len(self.bodies) > self.fails_after:
            return whole(b"broken", "500 Internal Server Error")
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        text = prompt if isinstance(prompt, str) else prompt[0]["text"]
        usage = {"prompt_tokens": TEXTS.count(text) + OVERHEAD, "completion_tokens": tokens}
        if not body.get("stream"):
            answer = {"choices": [{"message": {"content": "word"}}]} | ({"usage": usage} if self.usage else {})
            return whole(json.dumps(answer).encode())
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "word "}}], "system_fingerprint": "fp_1"}]
        if self.usage and "stream_options" in body:
            events.append({"choices": [], "usage": usage})
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return whole(data.encode(), more="Content-Type: text/event-stream\r\n")


@contextlib.asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*server.handlers)
