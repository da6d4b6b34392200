"""Tenants of the NATS API: made and ended while others work, and kept apart by the broker and the gateways."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.errors import NoStreamResponseError

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus
from penstock.schemas.subjects import HEADER_ERROR, HEADER_MSG_ID, HEADER_REQUEST
from tests.conftest import round_trip
from tests.pipeline.shared.test_nats_api import STREAM, TEXT, Submitter, numbered, read_answer
from tests.pipeline.support import Deployment, accepted, connected, until, words

TENANTS = ("acme", "zenith")


def tenants(deployment: Deployment, *args: str) -> int:
    return main(["tenants", *args, "--data-dir", str(deployment.data_dir)])


async def tenanted(deployment: Deployment, *args: str) -> int:
    return await asyncio.to_thread(tenants, deployment, *args)


def url_of(deployment: Deployment, tenant: str) -> str:
    credentials = json.loads((deployment.data_dir / "tenants" / f"{tenant}.json").read_text())
    assert credentials["tenant"] == tenant
    return str(credentials["nats_url"])


@pytest.fixture(scope="module")
def shared(fast: Deployment) -> Iterator[Deployment]:
    """The deployment with two tenants more."""
    for tenant in TENANTS:
        assert tenants(fast, "add", tenant) == 0
    yield fast
    for tenant in TENANTS:
        assert tenants(fast, "remove", tenant) == 0


@pytest.fixture
async def submitters(shared: Deployment) -> AsyncIterator[list[Submitter]]:
    """One client of each tenant."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for tenant in TENANTS:
            nc = await nats.connect(url_of(shared, tenant))
            stack.push_async_callback(nc.close)
            made.append(Submitter(nc))
        yield made


async def test_two_tenants_with_the_same_message_ids_are_both_answered(submitters: list[Submitter], bus: Bus) -> None:
    def body(tenant: int, number: int) -> dict[str, Any]:
        return {**TEXT, **STREAM, "prompt": words(8, 40_000 + 100 * tenant + number), "user": f"same-{tenant}"}

    asked = [
        submitter.ask(body(tenant, number), **{HEADER_MSG_ID: str(number)})
        for number in range(5)
        for tenant, submitter in enumerate(submitters)
    ]
    answers = [numbered(messages) for messages in await asyncio.gather(*asked)]
    assert all(list(answer) == list(range(len(answer))) for answer in answers)
    for tenant, name in enumerate(TENANTS):
        requests = await accepted(bus, f"same-{tenant}")
        assert len(requests) == 5
        assert {request.tenant for request in requests} == {name}


async def test_nobody_reads_or_cancels_what_is_anothers(submitters: list[Submitter], bus: Bus) -> None:
    owner, other = submitters
    messages = await owner.ask({**TEXT, **STREAM}, **{HEADER_MSG_ID: "private"})
    request_id = (messages[0].headers or {})[HEADER_REQUEST]
    for subject in ("ps.read", "ps.cancel"):
        for wanted in ({"id": request_id}, {"key": "private"}):
            reply = await other.nc.request(subject, json.dumps(wanted).encode(), timeout=10)
            assert (reply.headers or {})[HEADER_ERROR] == "request_not_found"
    assert numbered(await owner.read({"id": request_id})) == numbered(messages)


async def test_nobody_receives_anothers_answers_or_inboxes(submitters: list[Submitter]) -> None:
    owner, other = submitters
    subscriptions = [await other.nc.subscribe(subject) for subject in ("_INBOX.>", "ps.answer.>", "ps.reply.>")]
    await round_trip(other.nc)
    await owner.ask({**TEXT, **STREAM}, **{HEADER_MSG_ID: "unheard"})
    await owner.ask(TEXT, reply_to="ps.reply.mine")
    await owner.nc.request("ps.ask.tiny", json.dumps(TEXT).encode(), timeout=10)
    await round_trip(other.nc)
    assert [sub.pending_msgs for sub in subscriptions] == [0, 0, 0]


@pytest.mark.parametrize(
    "target",
    [
        "ps.request.tiny.standard",
        "ps.work.aggregated.x",
        "$KV.ps_workers.x",
        "$JS.API.STREAM.DELETE.ps_DONE",
        "ps.cancel",
    ],
)
async def test_a_reply_subject_sends_the_brokers_acknowledgement_nowhere_else(
    submitters: list[Submitter], bus: Bus, target: str
) -> None:
    subscriptions = await bus.nc.subscribe(target)
    await round_trip(bus.nc)
    names = [stream.config.name for stream in await bus.js.streams_info()]
    for subject in ("ps.submit.tiny", "ps.ask.tiny", "ps.read"):
        await submitters[0].nc.publish(subject, json.dumps({**TEXT, "max_tokens": 1}).encode(), reply=target)
    await submitters[0].ask({**TEXT, "max_tokens": 1})
    await round_trip(submitters[0].nc)
    await round_trip(bus.nc)
    assert not [message for message in drained(subscriptions) if b'"stream"' in message.data or not message.data]
    assert [stream.config.name for stream in await bus.js.streams_info()] == names
    await subscriptions.unsubscribe()


async def test_no_subject_of_the_pipeline_is_reachable(shared: Deployment, bus: Bus) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    nc = await nats.connect(url_of(shared, "acme"), error_cb=note)
    subscriptions = await bus.nc.subscribe(">")
    try:
        subjects = [
            *("ps.request.tiny.standard", "ps.work.x.y", "ps.tokens.x", "ps.done.default.tiny.x", "ps.kv.m.w"),
            *("ps.submit.zenith.tiny.x", "ps.answer.zenith.k", "ps.to.zenith._INBOX.x", "ps.answer.k", "ps.ctl.x"),
            *(
                "$JS.API.STREAM.INFO.ps_DONE",
                "$JS.API.DIRECT.GET.ps_TOKENS",
                "$KV.ps_tenants.acme",
                "_R_.x",
                "$SYS.REQ.x",
            ),
        ]
        for subject in subjects:
            await nc.publish(subject, b"intruder")
        for subject in (">", "ps.>", "$SYS.>", "ps.live.>", "ps.submit.>", "_R_.>", "_INBOX_worker.>"):
            await nc.subscribe(subject)
        await round_trip(nc)
        await round_trip(bus.nc)
        seen = {message.subject for message in drained(subscriptions) if message.data == b"intruder"}
        assert seen <= {"ps.submit.acme.zenith.tiny.x"}, "one's own submission, of a model with an odd name"
        refused = [error for error in errors if "permissions violation" in error]
        assert len(refused) == len(subjects) - 1 + 7
    finally:
        await subscriptions.unsubscribe()
        await nc.close()


def drained(sub: Any) -> list[Any]:
    messages = []
    while not sub._pending_queue.empty():
        messages.append(sub._pending_queue.get_nowait())
    return messages


async def test_limits_of_a_tenant_hold_at_once(shared: Deployment) -> None:
    assert await tenanted(shared, "add", "narrow", "--models", "other", "--max-pending", "1") == 0
    nc = await nats.connect(url_of(shared, "narrow"))
    submitter = Submitter(nc)
    try:
        [refused] = await submitter.ask(TEXT)
        assert json.loads(refused.data)["error"]["code"] == "model_not_found"
        [answered] = await submitter.ask({**TEXT, "model": "other"}, model="other")
        assert "choices" in json.loads(answered.data)
        assert await tenanted(shared, "add", "narrow", "--models", "", "--max-pending", "20000") == 0  # without limits

        async def served() -> bool:
            [message] = await submitter.ask(TEXT)
            return "choices" in json.loads(message.data)

        await until(served, "the new limits are known")
    finally:
        await nc.close()
        assert await tenanted(shared, "remove", "narrow") == 0


async def test_asks_beyond_max_pending_are_refused_and_submissions_wait(slow: Deployment) -> None:
    assert await tenanted(slow, "add", "single", "--max-pending", "1") == 0
    nc = await nats.connect(url_of(slow, "single"))
    submitter = Submitter(nc)
    body = {**TEXT, "max_tokens": 40}
    try:
        asks = [nc.request("ps.ask.tiny", json.dumps(body).encode(), timeout=30) for _ in range(6)]
        codes = [json.loads(reply.data).get("error", {}).get("code") for reply in await asyncio.gather(*asks)]
        assert codes.count("queue_full") >= 4  # each of two gateways may have taken one
        assert codes.count(None) + codes.count("queue_full") == 6
        answers = await asyncio.gather(*(submitter.ask(body) for _ in range(3)))
        assert all("choices" in json.loads(message.data) for [message] in answers)
    finally:
        await nc.close()
        assert await tenanted(slow, "remove", "single") == 0


async def test_adding_rotating_and_removing_a_tenant_disturbs_nobody_else(
    shared: Deployment, submitters: list[Submitter]
) -> None:
    disturbed: list[str] = []
    refused: list[int] = []
    submitter = submitters[0]

    async def lost() -> None:
        disturbed.append("disconnected")

    watch = await nats.connect(url_of(shared, "zenith"), disconnected_cb=lost)
    stop = asyncio.Event()

    async def load() -> int:
        rounds = 0
        while not stop.is_set():
            try:
                messages = await submitter.ask({**TEXT, **STREAM}, **{HEADER_MSG_ID: f"load-{rounds}"})
            except NoStreamResponseError:  # while the broker exchanges its accounts; nothing is stored
                refused.append(rounds)
                continue
            assert list(numbered(messages)) == list(range(len(messages)))
            await submitter.nc.request("ps.ask.tiny", json.dumps(TEXT).encode(), timeout=10)
            rounds += 1
        return rounds

    working = asyncio.create_task(load())
    try:
        for verb in ("add", "rotate"):
            assert await tenanted(shared, verb, "guest") == 0
            nc = await nats.connect(url_of(shared, "guest"))
            messages = await Submitter(nc).ask({**TEXT, **STREAM}, **{HEADER_MSG_ID: f"guest-{verb}"})
            assert list(numbered(messages)) == list(range(len(messages)))
            await nc.close()
        url = url_of(shared, "guest")
        assert await tenanted(shared, "remove", "guest") == 0
        assert b"Authorization Violation" in await greeted(url)
    finally:
        stop.set()
        rounds = await working
        await watch.close()
    assert rounds > 2
    assert len(refused) <= 2, "one in thousands, seen alone"
    assert len(disturbed) <= 1  # its own close


async def greeted(url: str) -> bytes:
    """What the broker answers to a login; nats-py leaves its socket open when it is refused."""
    user, _, rest = url.removeprefix("nats://").partition(":")
    password, _, server = rest.partition("@")
    host, _, port = server.partition(":")
    async with connected(f"http://{host}:{port}") as (reader, writer):
        login = json.dumps({"user": user, "pass": password, "verbose": False})
        writer.write(f"CONNECT {login}\r\nPING\r\n".encode())
        await reader.readuntil(b"\r\n")  # INFO
        return await reader.readuntil(b"\r\n")


async def test_a_submitter_cancels_by_its_own_message_id(slow: Deployment) -> None:
    nc = await nats.connect(slow.state.client_nats_url)
    submitter = Submitter(nc)
    try:
        inbox = nc.new_inbox()
        sub = await nc.subscribe(inbox)
        await submitter.submit({**TEXT, **STREAM, "max_tokens": 2000}, inbox, **{HEADER_MSG_ID: "stop-me"})
        await sub.next_msg(timeout=10)
        reply = await nc.request("ps.cancel", json.dumps({"key": "stop-me"}).encode(), timeout=10)
        assert json.loads(reply.data)["status"] == "cancelling"
        last = (await read_answer(sub))[-1]
        assert (last.headers or {})[HEADER_ERROR] == "cancelled"

        async def ended() -> bool:
            again = await nc.request("ps.cancel", json.dumps({"key": "stop-me"}).encode(), timeout=10)
            return bool(json.loads(again.data)["status"] == "ended")

        await until(ended, "its end is in the log")
    finally:
        await nc.close()


def test_a_change_of_one_limit_leaves_the_others(shared: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    def limits_after(*args: str) -> list[str]:
        assert tenants(shared, "add", "changing", *args) == 0
        assert tenants(shared, "list") == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changing "))
        return line.split()[1:]

    pending, waiting, weight = ("20000", "none", "3")
    assert limits_after("--models", "tiny", "--weight", "3") == [
        *(pending, waiting, weight, "none", "none", "none", "own", "tiny")
    ]
    more = ("--max-pending", "5", "--max-waiting", "9", "--monthly-tokens", "70", "--rpm", "8", "--tpm", "6000")
    assert limits_after(*more) == ["5", "9", "3", "8", "6000", "70", "own", "tiny"]
    assert limits_after("--models", "", "--shared-cache") == ["5", "9", "3", "8", "6000", "70", "shared", "all"]
    none = [text for flag in ("max-waiting", "monthly-tokens", "rpm", "tpm") for text in (f"--{flag}", "none")]
    assert limits_after("--no-shared-cache", *none) == ["5", "none", "3", "none", "none", "none", "own", "all"]
    assert tenants(shared, "remove", "changing") == 0


def test_the_command_names_what_is_wrong(
    shared: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, said in (
        (("add", "Bad_Name"), "use a lower-case word"),
        (("add", "default"), "always exists"),
        (("rotate", "nobody"), "no tenant 'nobody'"),
    ):
        assert tenants(shared, *args) == 1
        assert said in capsys.readouterr().err
    assert main(["tenants", "list", "--data-dir", str(tmp_path)]) == 1
    assert "no broker runs on" in capsys.readouterr().err
    assert tenants(shared, "list") == 0
    assert "acme" in capsys.readouterr().out
