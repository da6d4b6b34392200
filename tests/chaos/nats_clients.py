"""Clients of the NATS API: the Python client, also dying and going on elsewhere, and the bare protocol."""

import asyncio
import contextlib
import hashlib
import json
import random
import re
import time
from typing import Any
from uuid import uuid4

import nats
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from penstock.client import Cancelled, Chunk, Client, Disconnected, PenstockError, Position, Timeout
from tests.chaos.clients import DEADLINE_S, PATIENCE_S
from tests.chaos.recipes import Recipe
from tests.chaos.seen import Seen

CLIENTS = 3
CLOSE_S = 5.0
SILENCE_S = 10.0
AGAIN_S = 1.0
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
AGAIN = ("broker_unavailable", "shutting_down", "queue_full")  # codes of what may be asked again


class NatsClients:
    """Connected with nats-py's own reconnect waits, as anybody's first program would be.

    Args:
        url: of a tenant.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._clients: list[Client] = []
        self._nc: Any = None

    async def open(self) -> None:
        async def ignored(problem: Exception) -> None:
            pass

        self._clients = [await connected(self._url, self._namespace) for _ in range(CLIENTS)]
        self._nc = await nats.connect(self._url.split(","), error_cb=ignored, max_reconnect_attempts=-1)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._nc is not None:
            # nats-py waits for the end of a link whose TLS never began, which has none (2.16.0).
            closing = asyncio.ensure_future(self._nc.close())
            await asyncio.wait([closing], timeout=CLOSE_S)
            closing.cancel()

    async def knows_reads(self) -> bool:
        """Whether this deployment has the protocol."""
        try:
            await self._nc.request(f"{self._namespace}.read", b'{"key": "nothing"}', timeout=2)
        except (NoRespondersError, TimeoutError, NatsError):
            return False
        return True

    async def ask(self, recipe: Recipe, tag: str, rng: random.Random) -> list[Seen]:
        body = recipe.body | {"user": tag, "timeout_s": DEADLINE_S}
        key = str(uuid4())
        copies = rng.randrange(2, 4) if recipe.kind == "nats-repeat" else 1
        found = [Seen(tag, recipe.name, recipe.kind, body.get("n", 1)) for _ in range(copies)]
        if recipe.kind in ("nats-raw", "nats-no-store"):  # what is not to be stored can only be asked
            asked = recipe.kind == "nats-no-store" or rng.random() < 0.3
            await self._guarded(found[0], self._raw(found[0], body, key, asked=asked))
            return found
        deaths = rng.randrange(1, 20) if recipe.kind == "nats" and rng.random() < 0.3 else 0
        if recipe.kind == "nats-cancel":
            await self._guarded(found[0], self._leaving(found[0], body, key, rng.randrange(1, 30)))
            return found
        waits = [rng.random() * 2 if copy else 0.0 for copy in range(copies)]
        clients = [rng.choice(self._clients) for _ in range(copies)]
        await asyncio.gather(
            *(
                self._guarded(seen, self._client(client, seen, dict(body), key, wait, deaths))
                for client, seen, wait in zip(clients, found, waits, strict=True)
            )
        )
        return found

    async def _guarded(self, seen: Seen, conversation: Any) -> None:
        seen.began = time.time()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await conversation
            seen.outcome = seen.outcome or "answered"
        except (TimeoutError, Timeout) as problem:
            seen.outcome = "hung"
            seen.notes.append(repr(problem))
        except PenstockError as problem:
            seen.outcome, seen.code, seen.message = "failed", problem.code, problem.message
        seen.ended = time.time()

    # -- the Python client ----------------------------------------------------------------------------------------

    async def _client(
        self, client: Client, seen: Seen, body: dict[str, Any], key: str, wait_s: float, deaths: int
    ) -> None:
        """Ask by the client; at chunk ``deaths`` its position is all that is left of it."""
        await asyncio.sleep(wait_s)
        ask = client.chat if "messages" in body else client.complete
        if not body.pop("stream", False):
            answer = await ask(**body, idempotency_key=key)  # type: ignore[call-overload]
            seen.request = answer.request
            seen.take_whole({"choices": [_plain(choice, "message") for choice in answer.choices]})
            return
        stream = ask(**body, stream=True, idempotency_key=key)  # type: ignore[call-overload]
        saved = ""
        chunks = aiter(stream)
        async for chunk in chunks:
            _take(seen, chunk)
            if deaths and len(seen.arrivals) == deaths and not seen.finished:
                saved = str(chunk.position)
                break
        await chunks.aclose()
        if saved:
            seen.attached += 1
            other = await connected(self._url, self._namespace)
            try:
                async for chunk in other.resume(saved):
                    _take(seen, chunk)
            finally:
                await other.close()

    async def _leaving(self, seen: Seen, body: dict[str, Any], key: str, leave: int) -> None:
        """Cancel at chunk ``leave``; the answer may still end as if nothing had been."""
        client = self._clients[0]
        ask = client.chat if "messages" in body else client.complete
        stream = ask(**body, idempotency_key=key)  # type: ignore[call-overload]
        try:
            async for chunk in stream:
                _take(seen, chunk)
                if len(seen.arrivals) == leave:
                    seen.left = True
                    with contextlib.suppress(Timeout):  # no gateway is there: read on, as its client would
                        await stream.cancel()
        except Cancelled:
            seen.outcome = "cancelled"

    # -- the bare protocol ----------------------------------------------------------------------------------------

    async def _raw(self, seen: Seen, body: dict[str, Any], key: str, *, asked: bool) -> None:
        """As docs/nats.md says, and no more: take what is expected, read again what is not there."""
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        async def note(message: Any) -> None:
            arrived.put_nowait(message)

        nc, space = self._nc, self._namespace
        inbox = nc.new_inbox()
        answers = f"{space}.answer.{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        subscriptions = [await nc.subscribe(subject, cb=note) for subject in (inbox, answers)]
        payload, headers = json.dumps(body).encode(), {"Nats-Msg-Id": key}
        expected, links, reads = 0, nc.stats["reconnects"], 0
        try:
            await self._send(payload, headers, inbox, body["model"], asked=asked)
            while True:
                try:
                    message = await asyncio.wait_for(arrived.get(), 1.0)
                except TimeoutError:
                    message, reads = None, reads + 1
                again = nc.stats["reconnects"] != links or reads >= SILENCE_S
                if message is not None:
                    found = message.headers or {}
                    if "Penstock-Seq" in found:
                        number, reads = int(found["Penstock-Seq"]), 0
                        if "Penstock-Record" in found:
                            seen.begin_again()
                            expected = number
                        if number == expected:
                            expected += 1
                            seen.request = found.get("Penstock-Request-Id", "")
                            if "Penstock-Error" in found:
                                error = json.loads(message.data)["error"]
                                if not asked or error["code"] not in AGAIN:
                                    raise PenstockError(error["code"], error["message"])
                                # Nothing was accepted; who asks, and does not submit, asks again.
                                expected, seen.refused = 0, seen.refused + 1
                                await asyncio.sleep(AGAIN_S)
                                await self._send(payload, headers, inbox, body["model"], asked=True)
                                continue
                            self._note(seen, json.loads(message.data))
                            if "Penstock-Final" in found:
                                return
                        again = again or number > expected
                    elif (code := found.get("Penstock-Error", "")) == "request_not_found":
                        await self._send(payload, headers, inbox, body["model"], asked=asked)
                    elif code in ("content_lost", "request_erased"):  # no read ever finds it
                        why = json.loads(message.data)["error"]["message"]
                        seen.request = seen.request or named_in(why)
                        raise PenstockError(code, why)
                    else:
                        await asyncio.sleep(AGAIN_S)
                        again = True
                if again and nc.is_connected:
                    seen.attached += 1
                    links, reads = nc.stats["reconnects"], 0
                    question = json.dumps({"key": key, "from": expected}).encode()
                    await nc.publish(f"{space}.read", question, reply=inbox)
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(NatsError):
                    await subscription.unsubscribe()

    def _note(self, seen: Seen, body: dict[str, Any]) -> None:
        """A chunk, or a whole chat; a whole text looks like its only chunk."""
        if any("message" in part for part in body["choices"]):
            seen.take_whole(body)
        else:
            seen.take(body, "", time.time())

    async def _send(self, payload: bytes, headers: dict[str, str], inbox: str, model: str, *, asked: bool) -> None:
        """Submit until it is acknowledged; or ask, which nobody acknowledges."""
        if asked:
            await self._nc.publish(f"{self._namespace}.ask.{model}", payload, reply=inbox, headers=headers)
            return
        while True:
            try:
                await self._nc.jetstream().publish(f"{self._namespace}.submit.{model}", payload, headers=headers)
                return
            except (NatsError, TimeoutError):
                await asyncio.sleep(AGAIN_S)


async def connected(url: str, namespace: str) -> Client:
    """A client that tries to connect for as long as those of HTTP; the broker may be away for a while.

    Raises:
        TimeoutError: that long, no server accepted a connection.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            client = Client(url, namespace=namespace, timeout=PATIENCE_S)
            try:
                return await client.__aenter__()
            except Disconnected:
                await asyncio.sleep(AGAIN_S)


def named_in(message: str) -> str:
    """The request that an error names, of which its client has seen nothing else; "": none."""
    found = _ID.search(message)
    return found[0] if found else ""


def _take(seen: Seen, chunk: Chunk) -> None:
    before = Position.parse(seen.last_id).next if seen.last_id else 0
    if chunk.replaces:
        seen.begin_again()
        seen.take_whole({"choices": [_plain(choice, "message") for choice in chunk.choices]})
        return
    if chunk.position.next != before + 1:
        seen.holes += 1
    seen.request = chunk.request
    seen.take({"choices": [_plain(choice, "delta") for choice in chunk.choices]}, "", time.time())
    seen.last_id = str(chunk.position)


def _plain(choice: Any, where: str) -> dict[str, Any]:
    return {
        "index": choice.index,
        where: {"content": choice.content},
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs,
    }
