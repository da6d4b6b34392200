"""Terminating a request and sending one again from its page, on a real nats-server: with the operator's password."""

import contextlib
from collections.abc import AsyncGenerator

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.infra.bus.jetstream import Message
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.replay.nats import REPLAYS
from penstock.log_tools.sources.open_log import Log
from penstock.operate.dashboard import actions
from penstock.operate.dashboard.actions import Forms, with_login
from penstock.operate.dashboard.app import Access, Dashboard
from penstock.operate.dashboard.live import Live
from penstock.operate.observe import Observer
from penstock.schemas import audit, control, requests, wire
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import GenerateRequest
from tests.penstock.log_tools.requests.support import accept, assign, end

TOKEN = "secret-token"


@pytest.fixture
def password(broker: EmbeddedNats) -> str:
    return broker.url("operator").partition("@")[0].rpartition(":")[2]


@contextlib.asynccontextmanager
async def browsing(bus: Bus, broker: EmbeddedNats) -> AsyncGenerator[httpx.AsyncClient]:
    app = Dashboard(
        [Log(bus, False, url=broker.url("reader"))], Live(Observer(bus), 1.0), Access(TOKEN, 1)
    ).application()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://here", transport=transport, headers=headers) as client:
        yield client


async def entries(bus: Bus) -> list[tuple[str, str]]:
    found = [
        audit.decode(entry.data) async for entry in read(bus, bus.subjects.stream("AUDIT"), bus.subjects.all("audit"))
    ]
    return [(each.action, each.what) for each in found]


async def test_only_the_operator_terminates_a_request(
    bus: Bus, broker: EmbeddedNats, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "REFUSED_S", 0.0)
    monkeypatch.setattr(actions, "AGAIN_S", 0.05)
    request = await accept(bus)
    await assign(bus, request)
    orders: list[control.Cancel] = []

    async def worker(message: Message) -> None:
        orders.append(control.decode_cancel(message.data))
        if len(orders) == 2:  # the first order may be lost
            await end(bus, request, code="cancelled")

    await bus.nc.subscribe(bus.subjects.cancel, cb=worker)
    form = {"mark": Forms(TOKEN).mark, "password": password}
    path = f"/requests/{request.id}/terminate"
    async with browsing(bus, broker) as client:
        page = (await client.get(f"/requests/{request.id}")).text
        assert f'formaction="{path}"' in page
        assert form["mark"] in page
        for wrong, headers, why in (
            ({**form, "password": "wrong"}, {}, "does not take this as the operator"),
            ({**form, "password": ""}, {}, "give the operator"),
            ({**form, "mark": ""}, {}, "not of this dashboard"),
            ({**form, "mark": Forms("another").mark}, {}, "not of this dashboard"),
            (form, {"Origin": "http://elsewhere"}, "by another site"),
            (form, {"Sec-Fetch-Site": "cross-site"}, "by another site"),
            ({**form, "password": "x" * 9000}, {}, "more than"),
        ):
            answer = await client.post(path, data=wrong, headers=headers)
            assert (answer.status_code, why in answer.text) == (403, True), (wrong, answer.text)
        assert (await client.get(path)).status_code == 405, "a link does nothing"
        assert not orders
        assert await entries(bus) == []
        answer = await client.post(path, data=form, headers={"Origin": "http://here", "Sec-Fetch-Site": "same-origin"})
        assert (answer.status_code, answer.headers["location"]) == (303, f"/requests/{request.id}")
        assert {each.request for each in orders} == {request.id}
        assert await entries(bus) == [("terminate", request.id)]
        assert path not in (await client.get(f"/requests/{request.id}")).text, "it has ended"
    async with httpx.AsyncClient(base_url="http://here", transport=client._transport) as visitor:
        assert (await visitor.post(path, data=form)).status_code == 401


async def test_a_request_is_sent_again_as_a_new_one(bus: Bus, broker: EmbeddedNats, password: str) -> None:
    request = await accept(bus)
    await end(bus, request, 1)
    hidden = await accept(bus, no_store=True)
    await end(bus, hidden, 1)
    form = {"mark": Forms(TOKEN).mark, "password": password}
    async with browsing(bus, broker) as client:
        nobody = await client.post(f"/requests/{request.id}/again", data=form)
        assert (nobody.status_code, "no worker of the target serves" in nobody.text) == (403, True)
        me = Registration("w-1", "tiny", "aggregated", "mock", 1, 32, 100, 8, 64, revision="r2")
        await bus.js.publish(bus.subjects.lease(me.worker), wire.encode(me))
        answer = await client.post(f"/requests/{request.id}/again", data=form)
        assert answer.status_code == 303, answer.text
        name = answer.headers["location"].removeprefix("/requests/")
        unstored = await client.post(f"/requests/{hidden.id}/again", data=form)
        assert (unstored.status_code, "no_store" in unstored.text) == (403, True)
    subject = bus.subjects.request("tiny", request.priority.value, name)
    entry = await get_last(bus, bus.subjects.stream("REQUESTS"), subject)
    assert entry is not None
    again: GenerateRequest = requests.decode(entry.data)
    assert (again.id, again.client_request_id, again.prompt) == (name, request.id, request.prompt)
    assert (again.revision, again.gateway.startswith(REPLAYS)) == ("r2", True)
    assert ("send again", request.id) in await entries(bus)


def test_a_login_is_put_into_each_server_of_a_url() -> None:
    url = "nats://reader:a%2Fb@h1:1,tls://h2:2"
    assert with_login(url, "operator", "x/@:y") == "nats://operator:x%2F%40%3Ay@h1:1,tls://operator:x%2F%40%3Ay@h2:2"
