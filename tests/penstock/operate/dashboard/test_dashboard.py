"""The dashboard on a real nats-server: over HTTP, and in a browser where there is one."""

import asyncio
import contextlib
import html
import re
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import uvicorn
from starlette.requests import Request

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import TINY, load_tokenizer
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process.sockets import bind
from penstock.launch.state import TOKEN_FILE, stored_token
from penstock.log_tools.sources.open_log import Log, LogSource, open_log
from penstock.operate.dashboard.app import MAX_WATCHERS, STREAMS, Access, Dashboard
from penstock.operate.dashboard.live import Live, Moment
from penstock.operate.dashboard.pages import live_sections
from penstock.operate.observe import Count, DeploymentSnapshot, GatewaysView, Observer, WorkerView, rates
from penstock.schemas import wire
from penstock.schemas.fleet import Registration
from penstock.schemas.subjects import Subjects
from penstock.schemas.transfer import Handoff, Handoffs
from penstock.schemas.wire import pack_tokens
from tests.infra.bus.support import opened
from tests.penstock.log_tools.requests.support import accept, assign, end
from tests.penstock.log_tools.sources.test_stopped import stored
from tests.penstock.operate.dashboard import browser
from tests.penstock.operate.dashboard.browser import CHROMIUM
from tests.penstock.operate.support import holds

TOKEN = "secret-token"


class Serving(NamedTuple):
    url: str
    bus: Bus
    live: Live
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def serving(bus: Bus, *, stopped: bool = False) -> AsyncGenerator[Serving, None]:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    live = Live(Observer(bus), 0.05)
    app = Dashboard([Log(bus, stopped)], None if stopped else live, Access(TOKEN, port)).application()
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    running = [asyncio.create_task(server.serve([listener])), asyncio.create_task(live.run())]
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20, headers=headers) as client:
            yield Serving(url, bus, live, client)
    finally:
        server.should_exit = True
        await running[0]
        running[1].cancel()
        listener.close()


@contextlib.asynccontextmanager
async def registered(bus: Bus) -> AsyncGenerator[None, None]:
    """A worker that renews its lease."""
    me = Registration("w-1", "m", "aggregated", "mock", 1, 32, 100, 8, 64, name="<b>worker-0")

    async def renew() -> None:
        while True:
            await bus.js.publish(bus.subjects.lease(me.worker), wire.encode(me))
            await asyncio.sleep(1)

    task = asyncio.create_task(renew())
    yield
    task.cancel()


async def test_nothing_is_shown_without_the_token_and_a_link_with_it_becomes_a_cookie(bus: Bus) -> None:
    async with serving(bus) as here, httpx.AsyncClient(base_url=here.url, trust_env=False) as visitor:
        for path in ("/", "/live", "/requests", "/requests/x", "/find", "/?token=wrong"):
            assert (await visitor.get(path)).status_code == 401, path
        answer = await visitor.get(f"/requests?state=failed&token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/requests?state=failed")
        assert "HttpOnly" in answer.headers["set-cookie"]
        page = await visitor.get("/requests?state=failed")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]


async def test_requests_are_listed_filtered_and_shown_in_pages(bus: Bus) -> None:
    requests = [await accept(bus, model="<i>m</i>") for _ in range(103)]
    for request in requests:
        await end(bus, request, 1, code="invalid_request" if request is requests[0] else "")
    async with serving(bus) as here:
        first = (await here.client.get("/requests")).text
        assert first.count("/requests/0") == 100
        assert "&lt;i&gt;m&lt;/i&gt;" in first, "what clients sent is text, not HTML"
        assert "<i>m" not in first
        before = first.partition('name="before" value="')[2].partition('"')[0]
        second = (await here.client.get(f"/requests?before={before}")).text
        assert second.count("/requests/0") == 3
        assert "Older requests" not in second
        failed = (await here.client.get("/requests?code=any")).text
        assert requests[0].id in failed
        assert failed.count("/requests/0") == 1
        bad = await here.client.get("/requests?since=yesterday")
        assert bad.status_code == 400
        assert "is not a time" in bad.text
        for number in ("-5", "x", "9" * 30):
            bad = await here.client.get(f"/requests?before={number}")
            assert (bad.status_code, "is not a sequence" in bad.text) == (400, True)


async def test_a_page_says_where_slow_requests_differ_and_its_heat_map_leads_to_them(bus: Bus) -> None:
    for number in range(400):
        slow = number % 20 == 0
        await end(bus, await accept(bus), 1, 2, worker=f"<w>-{slow:d}", took_ms=900 if slow else 30)
    async with serving(bus) as here:
        page = (await here.client.get("/slow")).text
        row = page[page.index("<tbody>") :].partition("</tr>")[0]
        assert "100 %" in row
        assert "worker" in row
        assert "&lt;w&gt;-1" in row
        counts = [int(each) for each in re.findall(r"<title>(\d+) from", page)]
        assert sum(counts) == 400
        links = [html.unescape(each) for each in re.findall(r'<a href="(/requests[^"]+)"><rect', page)]
        slowest = [each for each in links if "min_duration=500ms" in each]
        shown = [(await here.client.get(each)).text.count("/requests/0") for each in slowest]
        assert sum(shown) == 20
        few = (await here.client.get("/slow?since=2030-01-01")).text
        assert "at least 20 are needed" in few
        for wrong in ("since=yesterday", "why=warp"):
            assert (await here.client.get(f"/slow?{wrong}")).status_code == 400


async def test_a_list_has_a_column_for_what_requests_were_made_with_where_they_differ(bus: Bus) -> None:
    one = await accept(bus, revision="r1")
    async with serving(bus) as here:
        assert "Revision" not in (await here.client.get("/requests")).text
        await accept(bus, revision="r2")
        page = (await here.client.get("/requests")).text
    assert '<th scope="col">Revision</th>' in page
    assert ">r1</td>" in page
    assert ">r2</td>" in page
    assert one.id in page
    assert "Adapter" not in page


async def test_a_text_is_searched_in_prompts_and_answers_a_bounded_time(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(TINY)
    prompts = ["where is the <b>Harbour</b>?", "nothing", "also nothing"]
    asked = [await accept(bus, prompt=pack_tokens(tokenizer.encode(prompt).ids)) for prompt in prompts]
    for request in asked:
        answer = tokenizer.encode("it is at the harbour" if request is asked[2] else "no").ids
        await end(bus, request, *answer)
    async with serving(bus) as here:
        page = (await here.client.get("/requests?text=harbour")).text
        assert [request.id in page for request in asked] == [True, False, True]
        assert "&lt;b&gt;Harbour&lt;/b&gt;" in page
        monkeypatch.setattr("penstock.operate.dashboard.app.SEARCH_S", -1.0)
        page = (await here.client.get("/requests?text=harbour")).text
        assert "Search on" in page
        assert [request.id in page for request in asked] == [False, False, True]
        before = page.partition('name="before" value="')[2].partition('"')[0]
        assert "Search on" in (await here.client.get(f"/requests?text=harbour&before={before}")).text


async def test_counts_that_are_not_of_now_are_not_shown_when_a_page_opens(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(Observer(bus), 0.01)
    running = asyncio.create_task(live.run())
    try:
        await first_seen(live)
        assert live.now.history
        monkeypatch.setattr("penstock.operate.dashboard.live.FRESH_S", 0.0)  # as if some seconds had passed
        assert live.now.history == ()
        before = live._history[-1].at_ns
        assert (await first_seen(live)).history[-1].at_ns > before
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_request_has_a_page_and_an_unknown_one_an_answer(bus: Bus) -> None:
    request = await accept(bus)
    await assign(bus, request)
    await end(bus, request, 1, 2)
    async with serving(bus) as here:
        page = await here.client.get(f"/requests/{request.id}")
        assert page.status_code == 200
        assert "w-1" in page.text
        unknown = await here.client.get("/requests/nonsense")
        assert unknown.status_code == 404
        assert "is not a request id" in unknown.text
        found = await here.client.get("/find", params={"id": request.id})
        assert found.headers["location"] == f"/requests/{request.id}"


async def test_queues_are_shown_by_class_and_tenant(bus: Bus) -> None:
    await holds(bus, ("<b>acme", 7), others=2)
    async with serving(bus) as here, asyncio.timeout(20), here.client.stream("GET", "/live") as answer:
        text = ""
        async for part in answer.aiter_text():
            text += part
            if "event: live" in text and text.endswith("\n\n"):
                break
    none = '<td class=\\"n\\">–</td>' * 2
    assert f'&lt;b&gt;acme</th>{none}<td class=\\"n\\">7' in text
    assert f'others</i></th>{none}<td class=\\"n\\">2' in text


def test_a_worker_that_lost_its_lease_keeps_its_row_and_is_named() -> None:
    gone = WorkerView("worker-<1>", "", "aggregated", "m", "", "lost", 0, 0, 0, 0, 0, 0, None, 0.0, 3)
    here = WorkerView("worker-2", "worker-2-0a", "aggregated", "m", "mock", "stalled", 1, 0, 8, 0, 0, 9, None, 0.0,
                      slowest_step_ms=6_000, quiet_ms=12_000)  # fmt: skip
    slow = WorkerView("worker-3", "worker-3-0b", "aggregated", "m", "mock", "ready", 1, 0, 8, 0, 0, 9, None, 0.0,
                      latency_ms=140.0, slowness=18.2)  # fmt: skip
    shown = live_sections(
        Moment((DeploymentSnapshot(1, "ps", (gone, here, slow), (), rates([Count(1.0, 0, 0)], []), (), ()),))
    )["workers"]
    assert "worker-&lt;1&gt; lost its lease 3 times in ten minutes; it is not there now" in shown
    assert "worker-2 holds its lease, but its engine did nothing for 12 s" in shown
    assert shown.count("/requests?worker=") == 2  # one that is gone has no id
    for cell in (
        '<span class="state lost">lost',
        '<span class="state stalled">stalled',
        "6.00 s",
        '<td class="n bad">3',
        "worker-3 is 18 times slower than its peers",
        '<td class="n bad">140.0 ms ×18<',
    ):
        assert cell in shown


def test_the_number_of_gateways_is_shown_with_the_last_change() -> None:
    view = GatewaysView(3, 0, 2, 6, "gateway-2 added: 90 % of a core <busy>", 1_000_000_000)
    seen = DeploymentSnapshot(6_000_000_000, "ps", (), (), rates([Count(1.0, 0, 0)], []), (), (), gateways=view)
    shown = live_sections(Moment((seen,)))["workers"]
    assert "gateways 3 (2 to 6); gateway-2 added 5 s ago: 90 % of a core &lt;busy&gt;" in shown


async def test_changes_are_streamed_only_while_somebody_watches(bus: Bus) -> None:
    async with registered(bus), serving(bus) as here:
        assert not here.live.now.history
        async with asyncio.timeout(20), here.client.stream("GET", "/live") as answer:
            text = ""
            async for part in answer.aiter_text():
                text += part
                if text.count("event: live") == 2:
                    break
        assert "&lt;b&gt;worker-0" in text
        async with asyncio.timeout(20):
            while here.live.watchers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.timeout(90)
async def first_seen(live: Live) -> Moment:
    async with asyncio.timeout(20), contextlib.aclosing(live.follow()) as moments:
        async for moment in moments:
            if moment.history:
                return moment
    raise AssertionError


async def test_a_page_that_opens_after_a_while_shows_nothing_of_before(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed a worker as lost that had long been back, and the mean rate of the hours in which nobody looked."""
    monkeypatch.setattr("penstock.operate.dashboard.live.KEPT_S", 0.0)
    monkeypatch.setattr("penstock.operate.observe.WINDOW_S", 0.0)
    live = Live(Observer(bus), 0.01)
    running = asyncio.create_task(live.run())
    try:
        before = (await first_seen(live)).history[-1]
        assert live.now.history == ()
        await accept(bus)
        first = await first_seen(live)
        assert [each.at_ns > before.at_ns for each in first.history] == [True]
        assert first.history[0].rates.accepted_per_s == 0.0  # of the time since it was opened
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_dashboard_says_that_its_broker_is_away_and_continues_when_it_is_back(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker(namespace=subjects.namespace)
    await server.start()
    async with opened(server, subjects) as bus, serving(bus) as here:
        text = ""

        async def until(holds: Callable[[str], bool]) -> None:
            nonlocal text
            async with asyncio.timeout(40):
                async for part in parts:
                    text += part
                    if holds(text):
                        return

        async with here.client.stream("GET", "/live") as answer:
            parts = answer.aiter_text()
            await until(lambda seen: "event: live" in seen)
            server.kill()
            await server.wait()
            await until(lambda seen: 'class=\\"alert\\" role=\\"alert\\"' in seen)
            await server.start()
            text = ""
            await until(lambda seen: '"problem":""' in seen)


async def test_watchers_are_limited(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(bus) as here:
        monkeypatch.setattr(here.live, "_watchers", MAX_WATCHERS)
        answer = await here.client.get("/live")
        assert answer.status_code == 503
        assert str(MAX_WATCHERS) in answer.text
        monkeypatch.setattr(here.live, "_watchers", 0)


async def test_every_page_of_a_stopped_deployments_folder_is_served(make_broker: Callable[..., EmbeddedNats]) -> None:
    server = make_broker()
    request = await stored(server)
    source = LogSource(server.data_dir)
    async with (
        open_log(source, name="test", role="operator", streams=STREAMS) as log,
        serving(log.bus, stopped=log.stopped) as here,
    ):
        for path in ("/", "/requests", f"/requests/{request.id}", "/leases"):
            assert (await here.client.get(path)).status_code == 200, path


async def test_a_stopped_deployment_has_its_requests(bus: Bus) -> None:
    request = await accept(bus)
    await end(bus, request, 1)
    async with serving(bus, stopped=True) as here:
        assert "is stopped" in (await here.client.get("/")).text
        assert (await here.client.get("/live")).status_code == 404
        assert request.id in (await here.client.get("/requests")).text


async def test_leases_are_listed_with_their_requests(bus: Bus) -> None:
    now_ns = time.time_ns()
    request = await accept(bus)
    end_ns = now_ns + 60_000_000_000
    offer = Handoff(f"{request.id}:1:kv", "offered", "w-1", "w-2", now_ns, 3, 4096, lease_ns=end_ns, pool="kv")
    ledger = Handoffs("w-1", (offer,))
    await bus.js.publish(bus.subjects.handoff("w-1"), wire.encode(ledger))
    async with serving(bus) as here:
        page = (await here.client.get("/leases")).text
    assert "1 open, 1 handoffs" in page
    assert f"/requests/{request.id}" in page
    assert "4.0 KiB" in page


def test_a_data_folder_keeps_its_token_readable_by_its_owner_only(tmp_path: Path) -> None:
    token = stored_token(tmp_path)
    assert len(token) >= 20
    assert stored_token(tmp_path) == token
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / TOKEN_FILE).write_text("")
    assert stored_token(tmp_path)


def test_an_empty_token_lets_no_request_in() -> None:
    scope = {"type": "http", "query_string": b"token=", "headers": [(b"authorization", b"Bearer ")], "path": "/"}
    assert Access("", 1).refusal(Request(scope)) is not None


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.timeout(120)
async def test_a_browser_shows_what_changes_until_it_is_paused(bus: Bus, tmp_path: Path) -> None:
    async with registered(bus), serving(bus) as here, browser.opened(f"{here.url}/?token={TOKEN}", tmp_path) as page:
        recent = "document.getElementById('recent').innerText"
        await page.until("document.getElementById('workers')?.innerText.includes('<b>worker-0')")
        assert await page.evaluate("location.search") == "", "the token is not in the address any more"
        request = await accept(bus)
        await end(bus, request, 1, 2)
        await page.until(f"{recent}.includes('{request.id}')")
        await page.evaluate("document.getElementById('pause').click()")
        assert await page.evaluate("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        later = await accept(bus)
        await end(bus, later, 1)
        looks = len(here.live.now.history)
        async with asyncio.timeout(20):
            while len(here.live.now.history) < looks + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert later.id not in await page.evaluate(recent)
        await page.evaluate("document.getElementById('pause').click()")
        await page.until(f"{recent}.includes('{later.id}')")
