"""What a client is told of a request with ``no_store`` that has ended, and whose tokens are late, void or gone."""

import msgspec
import pytest

from penstock.gateway.base.chat_objects import Status
from penstock.gateway.http import request_list as status
from penstock.gateway.http.request_list import status_of
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.infra.bus.connection import Bus
from penstock.schemas import done, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.gateway.nats.support import Running

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4, "no_store": true}'
TOKENS = [101, 102, 103, 104]


class Ended:
    """A request that attempt 1 has ended after ``TOKENS``, of which its record has none."""

    def __init__(self, running: Running, request: GenerateRequest) -> None:
        self.running = running
        self.request = request

    async def stream(self, *items: TokenItem) -> None:
        bus = self.running.gateway.bus
        for number, item in enumerate(items):
            batch = wire.encode(TokenBatch("w", 1, number, (item,)))
            await bus.js.publish(bus.subjects.tokens(self.request.token_address), batch)

    def item(self, first: int, until: int, *, attempt: int = 1) -> TokenItem:
        finish = Finish("length") if until == len(TOKENS) else None
        return TokenItem(self.request.id, attempt, 0, first, pack_tokens(TOKENS[first:until]), finish)

    async def status(self) -> Status:
        return await status_of(self.running.gateway, await self.stored(), "http://gateway")

    async def stored(self) -> StoredRequest:
        return await self.running.gateway.look_up(self.request.id)


@pytest.fixture
async def ended(running: Running) -> Ended:
    gateway = running.gateway
    inflight = await gateway.submit((await gateway.prepare("completion", BODY)).request)
    request, bus = inflight.request, gateway.bus
    event = done.Done(
        request.id, request.model, 1, "w", (done.Outcome(pack_tokens(TOKENS), "length"),), done.Usage(3, 4),
        submitted=wire.encode(request),
    )  # fmt: skip
    record = wire.encode(done.without_content(event))
    await bus.js.publish(bus.subjects.done(request.tenant, request.model, request.id), record)
    return Ended(running, request)


async def test_tokens_behind_the_fence_of_the_attempt_that_ended_it_are_its_answer(ended: Ended) -> None:
    """Its worker was given up, and got its lease back."""
    fence = TokenItem(ended.request.id, 2, WHOLE_REQUEST, 0)
    await ended.stream(ended.item(0, 1), fence, ended.item(1, 4))
    found = await ended.status()
    assert (found.state, found.attempt, found.worker, found.output_tokens) == ("done", 1, "w", 4)
    answer = msgspec.json.decode(found.result)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


async def test_it_runs_while_its_last_tokens_may_come_late(ended: Ended) -> None:
    await ended.stream(ended.item(0, 3))
    found = await ended.status()
    assert (found.state, found.output_tokens) == ("running", 3)
    await ended.stream(ended.item(3, 4))
    assert (await ended.status()).state == "done"


async def test_then_its_content_was_lost_which_is_not_what_a_deletion_is_called(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ended.stream(ended.item(0, 3))
    monkeypatch.setattr(status, "LATE_S", 0.0)
    found = await ended.status()
    assert found.error is not None
    assert (found.state, found.error.code) == ("failed", Code.content_lost)


async def test_after_its_grace_period_it_was_erased(bus: Bus, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = await ended.stored()
    gateway = ended.running.gateway
    monkeypatch.setattr(gateway, "settings", msgspec.structs.replace(gateway.settings, no_store_grace_s=0.0))
    with pytest.raises(ServingError) as caught:
        await status_of(gateway, stored, "http://gateway")
    assert caught.value.code is Code.request_erased
