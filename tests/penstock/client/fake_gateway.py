"""A gateway's side of the NATS API over a real broker, as docs/nats.md has it, which loses exactly what a test says."""

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

from nats.aio.client import Client as NatsClient

ANSWER_S = 0.002  # between two messages


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "logprobs": None}
    return json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
    ).encode()


def whole(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]}).encode()


def failure(code: str, message: str = "because") -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "code": code}}).encode()


class FakeGateway:
    """Answers every submission with ``words``: a chunk each, or one message of all.

    Attributes:
        lost: numbers of messages that do not reach ``ps.answer.<key>`` (reading them again works).
        silent: after this number, nothing more is sent there.
        deaf: so many submissions are not seen at all, and so many reads.
        refusals: codes of the next reads, instead of an answer.
        record: what reads get instead of chunks.
        ending: error code that answers end with.
    """

    def __init__(self, nc: NatsClient, namespace: str, words: list[str]) -> None:
        self._nc = nc
        self._namespace = namespace
        self.words = words
        self.lost: set[int] = set()
        self.twice = False
        self.backwards = False
        self.silent: int | None = None
        self.deaf: Counter[str] = Counter()
        self.refusals: list[str] = []
        self.record: bytes | None = None
        self.ending = ""
        self.submissions: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.reads: list[dict[str, Any]] = []
        self.cancelled: list[dict[str, Any]] = []
        self._bodies: dict[str, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        for subject, handle in (("submit.*", self._submit), ("read", self._read), ("cancel", self._cancel)):
            await self._nc.subscribe(f"{self._namespace}.{subject}", cb=handle)
        await self._nc.flush()

    def _is_deaf(self, kind: str) -> bool:
        self.deaf[kind] -= 1
        return self.deaf[kind] >= 0

    async def _submit(self, message: Any) -> None:
        if self._is_deaf("submit"):
            return
        headers, body = dict(message.headers), json.loads(message.data)
        self.submissions.append((headers, body))
        key = headers["Nats-Msg-Id"]
        self._bodies[key] = body
        await self._nc.publish(message.reply, b'{"stream": "S", "seq": 1}')
        subject = f"{self._namespace}.answer.{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        self._spawn(self._send(subject, key, int(headers.get("Penstock-From", 0)), live=True))

    async def _read(self, message: Any) -> None:
        asked = json.loads(message.data)
        self.reads.append(asked)
        if self._is_deaf("read"):
            return
        code = self.refusals.pop(0) if self.refusals else "" if asked["key"] in self._bodies else "request_not_found"
        if code:
            await self._nc.publish(message.reply, failure(code), headers={"Penstock-Error": code})
            return
        self._spawn(self._send(message.reply, asked["key"], asked.get("from", 0), live=False))

    async def _cancel(self, message: Any) -> None:
        self.cancelled.append(json.loads(message.data))
        await self._nc.publish(message.reply, b'{"id": "1", "status": "cancelling"}')

    def messages(self, key: str) -> list[tuple[bytes, dict[str, str]]]:
        if self._bodies[key].get("stream"):
            bodies = [chunk(word) for word in self.words] + ([] if self.ending else [chunk("", "stop")])
        else:
            bodies = [] if self.ending else [whole("".join(self.words))]
        made = [(body, {"Penstock-Seq": str(n), "Penstock-Request-Id": "1"}) for n, body in enumerate(bodies)]
        if self.ending:
            headers = {"Penstock-Seq": str(len(made)), "Penstock-Error": self.ending}
            made.append((failure(self.ending), headers))
        made[-1][1]["Penstock-Final"] = "1"
        return made

    async def _send(self, subject: str, key: str, first: int, *, live: bool) -> None:
        if not live and self.record is not None:
            headers = {"Penstock-Seq": "0", "Penstock-Final": "1", "Penstock-Record": "1"}
            await self._nc.publish(subject, self.record, headers=headers)
            return
        numbered = list(enumerate(self.messages(key)))[first:]
        for number, (body, headers) in reversed(numbered) if self.backwards and live else numbered:
            if live and (number in self.lost or (self.silent is not None and number > self.silent)):
                continue
            for _ in range(2 if self.twice else 1):
                await self._nc.publish(subject, body, headers=headers)
            await asyncio.sleep(ANSWER_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
