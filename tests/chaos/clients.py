"""Clients of the HTTP API that do not give up: they repeat, re-attach elsewhere, leave early or read slowly."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from tests.chaos.http import Answer, Broken, opened
from tests.chaos.recipes import Recipe
from tests.chaos.seen import Seen

DEADLINE_S = 90.0  # of a request
PATIENCE_S = DEADLINE_S + 15.0  # of a client
AGAIN_S = (0.05, 0.1, 0.2, 0.5, 1.0)
LATER = frozenset({"queue_full", "broker_unavailable", "shutting_down"})  # refusals and breaks that are not the end


class Lost(Exception):
    """The client cannot know what became of its request."""


class Failed(Exception):
    """The request failed for good."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class HttpClients:
    """Ask over HTTP.

    Args:
        urls: of the gateways.
        keys: the gateways know ``Idempotency-Key``, so a request whose fate is unknown can be sent again.
    """

    def __init__(self, urls: Sequence[str], *, keys: bool) -> None:
        self.urls = urls
        self.keys = keys

    async def ask(self, recipe: Recipe, tag: str, rng: random.Random) -> list[Seen]:
        """One question, by one client or several that ask the same."""
        body = recipe.body | {"user": tag, "timeout_s": DEADLINE_S}
        if rng.random() < 0.5 and recipe.kind != "embed":
            body["cache_salt"] = tag  # computed anew
        key = str(uuid4()) if self.keys and (recipe.kind == "repeat" or rng.random() < 0.8) else ""
        copies = rng.randrange(2, 5) if recipe.kind == "repeat" and key else 1
        conversations = [_Conversation(self, recipe, tag, body, key, rng.randrange(99)) for _ in range(copies)]
        leave = rng.randrange(1, 30) if recipe.kind == "cancel" else 0
        waits = [rng.random() * 2 if copy else 0.0 for copy in range(copies)]
        await asyncio.gather(*(c.run(wait, leave) for c, wait in zip(conversations, waits, strict=True)))
        return [conversation.seen for conversation in conversations]

    async def result(self, request: str) -> Mapping[str, Any]:
        """The whole answer of a request that has ended.

        Raises:
            Failed: there is none.
        """
        try:
            async with opened("GET", self.urls[0], f"/v1/requests/{request}") as answer:
                raw = await answer.read()
        except Broken as broken:
            raise Failed("broken", str(broken)) from None
        if answer.status != 200:
            raise Failed(*_error(raw))
        status = json.loads(raw)
        if "result" not in status:
            raise Failed("no_result", str(status)[:200])
        return status["result"]


class _Conversation:
    """One client with one question."""

    def __init__(
        self, clients: HttpClients, recipe: Recipe, tag: str, body: dict[str, Any], key: str, first: int
    ) -> None:
        self.seen = Seen(tag, recipe.name, recipe.kind, body.get("n", 1))
        self._recipe, self._body, self._key = recipe, body, key
        self._urls, self._turn = clients.urls, first
        self._leave = 0

    async def run(self, wait_s: float, leave: int) -> None:
        """Ask and read to the end, or to event ``leave`` of a client that leaves."""
        self._leave = leave
        seen = self.seen
        await asyncio.sleep(wait_s)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await (self._stream() if self._recipe.streamed else self._whole())
            seen.outcome = seen.outcome or "answered"
        except TimeoutError:
            seen.outcome = "hung"
        except Lost:
            seen.outcome = "unknown"
        except Failed as failure:
            seen.outcome, seen.code, seen.message = "failed", failure.code, failure.message

    def _next_url(self) -> str:
        self._turn += 1
        return self._urls[self._turn % len(self._urls)]

    async def _pause(self, times: int) -> None:
        await asyncio.sleep(AGAIN_S[min(times, len(AGAIN_S) - 1)])

    # -- asking ---------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        seen, tries = self.seen, 0
        while not seen.request and not seen.finished:
            try:
                async with self._post() as answer:
                    if await self._accepted(answer):
                        await self._read(answer)
            except Broken as broken:
                self._broke(broken)
            tries += 1
            if not seen.request:
                await self._pause(tries)
        while not seen.finished and not seen.outcome:
            await self._attach()

    async def _whole(self) -> None:
        seen, tries = self.seen, 0
        while not seen.request:
            try:
                async with self._post() as answer:
                    if await self._accepted(answer):
                        whole = json.loads(await answer.read())
                        if not self._recipe.body.get("background"):
                            seen.take_whole(whole)
                            return
            except Broken as broken:
                self._broke(broken)
                if self._key:
                    seen.request = ""  # the same question under the same key has the same answer
            tries += 1
            await self._pause(tries)
        await self._fetch()

    def _post(self) -> Any:
        headers = {"idempotency-key": self._key} if self._key else {}
        slow = self._recipe.kind == "slow"
        return opened("POST", self._next_url(), self._recipe.path, self._body, headers, slow=slow)

    def _broke(self, broken: Broken) -> None:
        """
        Raises:
            Lost: nobody can tell whether it was accepted.
        """
        self.seen.notes.append(str(broken))
        if broken.sent and not self.seen.request and not self._key:
            raise Lost

    async def _accepted(self, answer: Answer) -> bool:
        """Whether what follows is its answer; False: it was refused for now, or is answered elsewhere.

        Raises:
            Failed: refused for good.
        """
        seen = self.seen
        if answer.status == 200:
            seen.request = answer.request
            return True
        code, message = _error(await answer.read())
        if code not in LATER:
            seen.request = answer.request
            raise Failed(code, f"status {answer.status}: {message}")
        seen.notes.append(code)
        if answer.request:
            seen.request = answer.request
        else:
            seen.refused += 1
        return False

    # -- reading --------------------------------------------------------------------------------------------------

    async def _read(self, answer: Answer) -> None:
        seen = self.seen
        async for event_id, data in answer.events():
            if data == "[DONE]":
                return
            body = json.loads(data)
            if "error" in body:
                error = body["error"]
                if error["code"] in LATER:
                    raise Broken(error["code"], sent=True)
                raise Failed(error["code"], error["message"])
            seen.take(body, event_id, time.time())
            if self._leave and len(seen.arrivals) >= self._leave:
                seen.outcome = "cancelled"
                return
        raise Broken("the stream ended without [DONE]", sent=True)

    async def _attach(self) -> None:
        seen = self.seen
        seen.attached += 1
        await self._pause(min(seen.attached, 2))
        headers = {"last-event-id": seen.last_id} if seen.last_id else {}
        try:
            async with opened("GET", self._next_url(), f"/v1/requests/{seen.request}/stream", None, headers) as answer:
                if answer.status == 200:
                    await self._read(answer)
                    return
                code, message = _error(await answer.read())
                seen.notes.append(f"re-attach: {code}")
                if code not in LATER:
                    raise Failed(code, f"re-attaching, status {answer.status}: {message}")
        except Broken as broken:
            seen.notes.append(str(broken))

    async def _fetch(self) -> None:
        """The whole answer, by its id."""
        seen = self.seen
        while True:
            seen.attached += 1
            await self._pause(3)
            try:
                async with opened("GET", self._next_url(), f"/v1/requests/{seen.request}") as answer:
                    raw = await answer.read()
            except Broken as broken:
                seen.notes.append(str(broken))
                continue
            if answer.status != 200:
                code, message = _error(raw)
                if code not in LATER:
                    raise Failed(code, f"asking for it, status {answer.status}: {message}")
                continue
            status = json.loads(raw)
            if "result" in status:
                seen.take_whole(status["result"])
                return
            if status["state"] in ("failed", "cancelled"):
                raise Failed(status["error"]["code"], status["error"]["message"])


def _error(raw: bytes) -> tuple[str, str]:
    """Code and message of an OpenAI error."""
    try:
        error = json.loads(raw)["error"]
        return error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return "not_an_error_body", raw[:200].decode(errors="replace")
