"""Clients of the HTTP API that do not give up: they repeat, re-attach elsewhere, leave early or read slowly."""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from tests.chaos.http import Answer, Broken, opened
from tests.chaos.recipes import RESPONSE, Recipe
from tests.chaos.seen import Seen, last_event

DEADLINE_S = 150.0  # of a request: several stops of 30 s may hit one
PATIENCE_S = DEADLINE_S + 15.0  # of a client
GONE_S = 5.0  # after it was deleted, for every gateway
AGAIN_S = (0.05, 0.1, 0.2, 0.5, 1.0)
REFUSED = {("limited", "rate_limit_exceeded"): "limited", ("denied", "invalid_api_key"): "denied"}
LATER = frozenset({"queue_full", "broker_unavailable", "shutting_down"})  # refusals and breaks that are not the end


class Settled(Exception):
    """It is over for this client, though there is no answer: the outcome."""


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
        bearers: API keys by kind of client; "": of all others. Without any, none is sent.
    """

    def __init__(self, urls: Sequence[str], *, keys: bool, bearers: Mapping[str, str] | None = None) -> None:
        self.urls = urls
        self.keys = keys
        self.bearers = dict(bearers or {})

    def headers(self, kind: str = "") -> dict[str, str]:
        bearer = self.bearers.get(kind, self.bearers.get("", ""))
        return {"authorization": f"Bearer {bearer}"} if bearer else {}

    async def ask(self, recipe: Recipe, tag: str, rng: random.Random) -> list[Seen]:
        """One question, by one client or several that ask the same."""
        body = recipe.body | {"user": tag, "timeout_s": DEADLINE_S}
        if rng.random() < 0.5 and recipe.kind not in ("embed", "picture"):
            body["cache_salt"] = tag  # computed anew
        key = str(uuid4()) if self.keys and (recipe.kind == "repeat" or rng.random() < 0.8) else ""
        copies = rng.randrange(2, 5) if recipe.kind == "repeat" and key else 1
        conversations = [_Conversation(self, recipe, tag, body, key, rng.randrange(99)) for _ in range(copies)]
        leave = rng.randrange(1, 30) if recipe.kind == "cancel" else 0
        waits = [rng.random() * 2 if copy else 0.0 for copy in range(copies)]
        await asyncio.gather(*(c.run(wait, leave) for c, wait in zip(conversations, waits, strict=True)))
        found = [conversation.seen for conversation in conversations]
        if recipe.then is not None and found[0].outcome == "answered":
            continued = recipe.then | {"previous_response_id": f"resp_{found[0].request}"}
            following = Recipe(f"{recipe.name}+", recipe.kind, recipe.path, continued)
            found += await self.ask(following, f"{tag}+", rng)
        return found

    async def delete(self, request: str) -> None:
        """Erase a response that has ended, and be told that it is gone.

        In a cluster, a node that lags behind may show it for a moment yet.

        Raises:
            Failed: it is not.
        """
        turn, sent = 0, 0.0
        while True:
            turn += 1
            method = "GET" if sent else "DELETE"
            url, path = self.urls[turn % len(self.urls)], f"{RESPONSE}/resp_{request}"
            try:
                async with opened(method, url, path, None, self.headers()) as answer:
                    raw = await answer.read()
            except Broken:
                await asyncio.sleep(AGAIN_S[min(turn, len(AGAIN_S) - 1)])
                continue
            code = "" if answer.status == 200 else _error(raw)[0]
            if code == "request_not_found":
                return  # also where the connection broke behind the erasure
            if not code and not sent:
                sent = time.monotonic()
            elif code not in LATER and (code or time.monotonic() - sent > GONE_S):
                raise Failed(code or "not_deleted", f"{method} after its end: status {answer.status}: {raw[:200]!r}")
            else:
                await asyncio.sleep(AGAIN_S[min(turn, len(AGAIN_S) - 1)])

    async def result(self, request: str) -> Mapping[str, Any]:
        """The whole answer of a request that has ended.

        Raises:
            Failed: there is none.
        """
        try:
            async with opened("GET", self.urls[0], f"/v1/requests/{request}", None, self.headers()) as answer:
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
        self._clients, self._recipe, self._body, self._key = clients, recipe, body, key
        self._urls, self._turn = clients.urls, first
        self._leave = 0
        self._posted = 0.0
        self._confirmed = False  # an answer began, or a gateway said that the request goes on

    async def run(self, wait_s: float, leave: int) -> None:
        """Ask and read to the end, or to event ``leave`` of a client that leaves."""
        self._leave = leave
        seen = self.seen
        await asyncio.sleep(wait_s)
        seen.began = time.time()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await (self._stream() if self._recipe.streamed else self._whole())
                if not seen.outcome:
                    await self._afterwards()
            seen.outcome = seen.outcome or "answered"
        except TimeoutError:
            seen.outcome = "hung"
        except Settled as settled:
            seen.outcome = str(settled)
        except Failed as failure:
            seen.outcome, seen.code, seen.message = "failed", failure.code, failure.message
        seen.ended = time.time()

    async def _afterwards(self) -> None:
        """What some clients do with an answer: delete it, or fetch the file that it names."""
        if self._recipe.kind == "delete" and self.seen.tag.startswith("c"):  # what is learned is read once more first
            await self._clients.delete(self.seen.request)
            self.seen.outcome = "deleted"
        elif self._recipe.kind == "picture":
            shown = self.seen.choices[0]
            name = shown.text.rpartition("/")[2]
            while True:
                try:
                    async with self._opened("GET", f"/v1/media/{name}") as answer:
                        raw = await answer.read()
                except Broken as broken:
                    self.seen.notes.append(str(broken))
                else:
                    if answer.status == 200:
                        shown.text = hashlib.sha256(raw).hexdigest()
                        return
                    code, message = _error(raw)
                    if code not in LATER:
                        raise Failed(code, f"fetching its file, status {answer.status}: {message}")
                await self._pause(3)

    def _opened(self, method: str, path: str, body: Any = None, more: Mapping[str, str] | None = None) -> Any:
        """At the next gateway."""
        self._turn += 1
        self.seen.url = url = self._urls[self._turn % len(self._urls)]
        headers = self._clients.headers(self._recipe.kind) | dict(more or {})
        return opened(method, url, path, body, headers, slow=self._recipe.kind == "slow" and method == "POST")

    async def _pause(self, times: int) -> None:
        await asyncio.sleep(AGAIN_S[min(times, len(AGAIN_S) - 1)])

    # -- asking ---------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        seen, tries = self.seen, 0
        while not seen.finished and not seen.outcome:
            if seen.request:
                await self._attach()
                continue
            try:
                async with self._post() as answer:
                    if await self._accepted(answer):
                        await self._read(answer)
            except Broken as broken:
                self._broke(broken)
            tries += 1
            if not seen.request:
                await self._pause(tries)

    async def _whole(self) -> None:
        seen, tries = self.seen, 0
        while not (seen.request and await self._fetched()):
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

    def _post(self) -> Any:
        headers = {"idempotency-key": self._key} if self._key else {}
        self._posted = time.monotonic()
        return self._opened("POST", self._recipe.path, self._body, headers)

    def _broke(self, broken: Broken) -> None:
        """
        Raises:
            Settled: nobody can tell whether it was accepted.
        """
        self.seen.notes.append(str(broken))
        if broken.sent and not self.seen.request and not self._key:
            raise Settled("unknown")

    async def _accepted(self, answer: Answer) -> bool:
        """Whether what follows is its answer; False: it was refused for now, or is answered elsewhere.

        Raises:
            Failed: refused for good.
            Settled: refused as this kind of client expects.
        """
        seen, kind = self.seen, self._recipe.kind
        if answer.status == 200:
            seen.request, self._confirmed = answer.request, True
            return True
        code, message = _error(await answer.read())
        if not answer.request:
            seen.refusal_s = max(seen.refusal_s, time.monotonic() - self._posted)
        if (kind, code) in REFUSED:
            raise Settled(REFUSED[kind, code])
        if code not in LATER:
            seen.request = answer.request
            raise Failed(code, f"status {answer.status}: {message}")
        seen.notes.append(code)
        if answer.request:
            seen.request = answer.request
            # Other refusals have its id in their head, too, and some in their message: it may not be accepted yet.
            goes_on = f"request {answer.request} was accepted" in message or (
                code == "shutting_down" and answer.request in message
            )
            self._confirmed = self._confirmed or goes_on
        else:
            seen.refused += 1
        return False

    def _not_there(self, code: str) -> bool:
        """Whether this says that a request was not accepted after all, whose id came with a 503: to ask again is safe.

        Raises:
            Settled: it has no key, so its gateway gave it up, and cancelled it if it was stored.
        """
        if self._confirmed or code not in (("request_not_found",) if self._key else ("request_not_found", "cancelled")):
            return False
        self.seen.request, self.seen.left = "", True
        if not self._key:
            raise Settled("unknown")
        return True

    # -- reading --------------------------------------------------------------------------------------------------

    async def _read(self, answer: Answer) -> None:
        seen = self.seen
        async for event_id, data in answer.events():
            if data == "[DONE]":
                return
            body = json.loads(data)
            if (found := _error_event(body)) is not None:
                if found[0] in LATER or self._not_there(found[0]):
                    raise Broken(found[0], sent=True)
                raise Failed(*found)
            if body.get("type") == "ping":
                continue
            seen.take(body, event_id, time.time())
            if self._leave and len(seen.arrivals) >= self._leave:
                seen.outcome = "cancelled"
                return
            if last_event(body):
                return
        raise Broken("the stream ended without [DONE]", sent=True)

    async def _attach(self) -> None:
        seen = self.seen
        seen.attached += 1
        await self._pause(min(seen.attached, 2))
        headers = {"last-event-id": seen.last_id} if seen.last_id else {}
        try:
            async with self._opened("GET", f"/v1/requests/{seen.request}/stream", None, headers) as answer:
                if answer.status == 200:
                    await self._read(answer)
                    return
                code, message = _error(await answer.read())
                seen.notes.append(f"re-attach: {code}")
                if code not in LATER and not self._not_there(code):
                    raise Failed(code, f"re-attaching, status {answer.status}: {message}")
        except Broken as broken:
            seen.notes.append(str(broken))

    async def _fetched(self) -> bool:
        """Get the whole answer by its id; False: it was not accepted, and must be asked for again."""
        seen = self.seen
        while True:
            seen.attached += 1
            await self._pause(3)
            try:
                async with self._opened("GET", f"/v1/requests/{seen.request}") as answer:
                    raw = await answer.read()
            except Broken as broken:
                seen.notes.append(str(broken))
                continue
            if answer.status != 200:
                code, message = _error(raw)
                if self._not_there(code):
                    return False
                if code not in LATER:
                    raise Failed(code, f"asking for it, status {answer.status}: {message}")
                continue
            status = json.loads(raw)
            if "result" in status:
                seen.take_whole(status["result"])
                return True
            if status["state"] in ("failed", "cancelled") and not self._not_there(status["error"]["code"]):
                raise Failed(status["error"]["code"], status["error"]["message"])


def _error_event(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Code and message of an event that ends a stream without its answer."""
    if body.get("type") == "response.failed":
        error = body["response"]["error"]
        return error.get("penstock_code") or error["code"], error["message"]
    if "error" in body:
        return body["error"]["code"], body["error"]["message"]
    return (body["code"], body["message"]) if body.get("type") == "error" else None


def _error(raw: bytes) -> tuple[str, str]:
    """Code and message of an OpenAI error."""
    try:
        error = json.loads(raw)["error"]
        return error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return "not_an_error_body", raw[:200].decode(errors="replace")
