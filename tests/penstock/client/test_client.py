"""The client against a gateway that loses, repeats and refuses, over a real broker: the answer comes whole anyway."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import (
    Cancelled,
    Client,
    Conflict,
    Disconnected,
    InvalidRequest,
    NotFound,
    PenstockError,
    Position,
    Timeout,
    connection,
    reader,
)
from penstock.client.answers import error
from penstock.client.connection import token
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import subjects as wire
from penstock.schemas.keys import new_key
from tests.conftest import Connect
from tests.penstock.client.fake_gateway import FakeGateway, whole

ROOT = Path(__file__).resolve().parents[3]
WORDS = [f"word{n} " for n in range(30)]
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait as long as one would for a real server."""
    monkeypatch.setattr(reader, "SILENCE_S", 0.3)
    monkeypatch.setattr(reader, "AGAIN_S", 0.05)
    monkeypatch.setattr(reader, "ACK_S", 0.3)
    monkeypatch.setattr(reader, "UNKNOWN_S", 0.5)


@pytest.fixture
async def gateway(broker: EmbeddedNats, connect: Connect, subjects: wire.Subjects) -> AsyncIterator[FakeGateway]:
    made = FakeGateway(await connect(broker), subjects.namespace, WORDS)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def client(broker: EmbeddedNats, subjects: wire.Subjects, gateway: FakeGateway) -> AsyncIterator[Client]:
    async with Client(
        broker.url("operator"), namespace=subjects.namespace, timeout=15, inbox_prefix="_INBOX_operator"
    ) as made:
        yield made


async def text_of(stream: Any) -> str:
    return "".join([chunk.text async for chunk in stream])


# -- what is asked and answered -----------------------------------------------------------------------------------


async def test_a_whole_answer_is_awaited_and_has_types(client: Client, gateway: FakeGateway) -> None:
    answer = await client.chat(**ASKED, temperature=0, max_tokens=7, seed=None)
    assert answer.text == answer.choices[0].message.content == "".join(WORDS)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.request == "1"
    ((headers, body),) = gateway.submissions
    assert body == {**ASKED, "temperature": 0, "max_tokens": 7}
    assert answer.position.key == headers["Nats-Msg-Id"]
    assert headers["Content-Type"] == "application/json; schema=ChatCompletionRequest"


async def test_a_stream_gives_chunks_with_the_position_behind_each(client: Client) -> None:
    stream = client.chat(**ASKED, stream=True)
    found = [(chunk.text, chunk.position.next) async for chunk in stream]
    assert found == [*((word, n + 1) for n, word in enumerate(WORDS)), ("", len(WORDS) + 1)]
    assert stream.position.next == len(WORDS) + 1


async def test_a_completion_is_asked_with_a_prompt(client: Client, gateway: FakeGateway) -> None:
    await client.complete(model="m", prompt="once", idempotency_key="mine", headers={"traceparent": "00-x"})
    ((headers, body),) = gateway.submissions
    assert body == {"model": "m", "prompt": "once"}
    assert (headers["Nats-Msg-Id"], headers["traceparent"]) == ("mine", "00-x")


async def test_an_api_key_is_named_by_its_public_part_alone(
    client: Client, broker: EmbeddedNats, subjects: wire.Subjects, gateway: FakeGateway
) -> None:
    id, whole_key = new_key()
    where: dict[str, Any] = {"namespace": subjects.namespace, "timeout": 15, "inbox_prefix": "_INBOX_operator"}
    async with Client(broker.url("operator"), key=whole_key, **where) as keyed:
        await keyed.chat(**ASKED)
        await text_of(keyed.chat(**ASKED, stream=True, key="pst-" + "b" * 12))
        await keyed.complete(model="m", prompt="once", key="")
    await client.chat(**ASKED)
    sent = [headers.get(wire.HEADER_KEY) for headers, _ in gateway.submissions]
    assert sent == [f"pst-{id}", "pst-bbbbbbbbbbbb", None, None]
    assert whole_key.rpartition("-")[2] not in str(gateway.submissions)


@pytest.mark.parametrize("key", ["sk-proj-0a1b2c3d4e5f", "pst-short", "pst-0a1b2c3d4e5f-", "pst-0a1b2c3d4e5f-x\nb"])
def test_what_is_no_api_key_is_refused_before_it_is_sent_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match="not an API key") as refused:
        Client(key=key)
    assert key not in str(refused.value)


async def test_many_answers_at_once_are_kept_apart(client: Client) -> None:
    texts = await asyncio.gather(*(text_of(client.chat(**ASKED, stream=True)) for _ in range(20)))
    assert set(texts) == {"".join(WORDS)}


# -- what is lost, repeated, out of order -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [{0}, {5, 6, 7}, {len(WORDS)}, set(range(31)), set(range(0, 31, 2))])
async def test_lost_messages_are_read_again(client: Client, gateway: FakeGateway, lost: set[int]) -> None:
    gateway.lost = lost
    assert await text_of(client.chat(**ASKED, stream=True)) == "".join(WORDS)
    assert gateway.reads[0]["from"] == min(lost)
    assert len(gateway.submissions) == 1


async def test_messages_that_come_twice_or_backwards_are_given_out_once_in_order(
    client: Client, gateway: FakeGateway
) -> None:
    gateway.twice = gateway.backwards = True
    assert await text_of(client.chat(**ASKED, stream=True)) == "".join(WORDS)


async def test_a_lost_whole_answer_is_read_again(client: Client, gateway: FakeGateway) -> None:
    gateway.lost = {0}
    assert (await client.chat(**ASKED)).text == "".join(WORDS)


async def test_a_submission_that_is_not_acknowledged_is_repeated_under_its_key(
    client: Client, gateway: FakeGateway
) -> None:
    gateway.deaf["submit"] = 2
    assert await text_of(client.chat(**ASKED, stream=True)) == "".join(WORDS)
    assert len(gateway.submissions) == 1


@pytest.mark.parametrize(
    "refusals", [["shutting_down", "broker_unavailable", "queue_full", "internal"], ["request_not_found"]]
)
async def test_a_read_that_is_refused_for_now_is_asked_again(
    client: Client, gateway: FakeGateway, refusals: list[str]
) -> None:
    gateway.silent, gateway.refusals = 3, list(refusals)
    assert await text_of(client.chat(**ASKED, stream=True)) == "".join(WORDS)
    assert len(gateway.reads) > len(refusals)


async def test_a_read_that_nobody_receives_is_repeated(client: Client, gateway: FakeGateway) -> None:
    gateway.silent, gateway.deaf["read"] = 3, 2
    assert await text_of(client.chat(**ASKED, stream=True)) == "".join(WORDS)
    assert {read["from"] for read in gateway.reads} == {4}


async def test_a_reader_that_falls_behind_reads_again_what_did_not_fit(
    client: Client, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BUFFER", 4)
    found = []
    async for chunk in client.chat(**ASKED, stream=True):
        found.append(chunk.text)
        if len(found) == 2:
            await asyncio.sleep(0.3)
    assert "".join(found) == "".join(WORDS)
    assert gateway.reads


# -- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [0, 1, 17, 30])
async def test_another_client_continues_from_a_saved_position(
    broker: EmbeddedNats, subjects: wire.Subjects, client: Client, gateway: FakeGateway, read: int
) -> None:
    stream = client.chat(**ASKED, stream=True)
    text, saved = "", str(stream.position)
    async for chunk in stream:
        if chunk.position.next > read:
            break
        text, saved = text + chunk.text, str(chunk.position)
    if not read:  # nothing was submitted yet, or it is on its way
        await text_of(client.chat(**ASKED, stream=True, position=saved))
    options = {"namespace": subjects.namespace, "inbox_prefix": "_INBOX_operator", "timeout": 10}
    async with Client(broker.url("operator"), **options) as other:
        assert text + await text_of(other.resume(saved)) == "".join(WORDS)


async def test_a_position_of_a_whole_answer_gives_the_answer(client: Client) -> None:
    answer = await client.chat(**ASKED)
    again = await client.resume(str(answer.position))
    assert (again.text, again.position) == (answer.text, answer.position)


async def test_a_question_with_a_position_is_asked_if_it_never_was(client: Client, gateway: FakeGateway) -> None:
    saved = Position("never", 3, "chat", True)
    assert await text_of(client.chat(**ASKED, stream=True, position=saved)) == "".join(WORDS[3:])
    assert gateway.submissions[0][0]["Penstock-From"] == "3"


async def test_only_the_record_is_left_so_it_takes_the_place_of_the_chunks(
    client: Client, gateway: FakeGateway
) -> None:
    gateway.silent, gateway.record = 3, whole("all of it")
    chunks = [chunk async for chunk in client.chat(**ASKED, stream=True)]
    assert [chunk.replaces for chunk in chunks] == [False] * 4 + [True]
    assert chunks[-1].text == "all of it"


async def test_a_stream_that_was_read_to_its_end_is_gone_on_with_to_no_more(
    client: Client, gateway: FakeGateway
) -> None:
    stream = client.chat(**ASKED, stream=True)
    await text_of(stream)
    gateway.refusals.append("answer_ended")
    assert await text_of(client.resume(str(stream.position), timeout=5)) == ""


def test_a_position_is_text_and_back() -> None:
    for position in (Position("k"), Position('"ü\n', 7, "text", True)):
        assert Position.parse(str(position)) == position
    for wrong in ("", "{}", "17", '{"key": ""}', '{"key": "k", "next": -1}', '{"key": 1}'):
        with pytest.raises(ValueError, match="not a position"):
            Position.parse(wrong)


# -- what fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", InvalidRequest),
        ("idempotency_conflict", Conflict),
        ("cancelled", Cancelled),
        ("model_not_found", NotFound),
        ("worker_lost", PenstockError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_with_an_error_raises_it(
    client: Client, gateway: FakeGateway, code: str, kind: type[PenstockError], stream: bool
) -> None:
    gateway.ending = code
    with pytest.raises(kind, match="because") as caught:
        await (text_of(client.chat(**ASKED, stream=True)) if stream else client.chat(**ASKED))
    assert caught.value.code == code
    assert type(error(code, "")) is kind


async def test_waiting_ends_when_it_was_said_to_and_can_be_gone_on_with(client: Client, gateway: FakeGateway) -> None:
    gateway.silent, gateway.deaf["read"] = 3, 10_000
    stream = client.chat(**ASKED, stream=True, timeout=0.6)
    with pytest.raises(Timeout):
        await text_of(stream)
    assert stream.position.next == 4
    gateway.deaf.clear()
    assert await text_of(client.resume(stream.position)) == "".join(WORDS[4:])


async def test_what_nobody_knows_is_not_found_but_only_after_a_while(client: Client, gateway: FakeGateway) -> None:
    with pytest.raises(NotFound):
        await client.resume(Position("unknown"))
    assert len(gateway.reads) > 3


async def test_no_gateway_at_all_ends_in_a_timeout(broker: EmbeddedNats) -> None:
    async with Client(
        broker.url("operator"), namespace="nobody", timeout=0.5, inbox_prefix="_INBOX_operator"
    ) as lonely:
        with pytest.raises(Timeout):
            await lonely.chat(**ASKED)


async def test_a_missing_broker_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.connection.CONNECT_S", 0.3)
    with pytest.raises(Disconnected, match="no NATS server"):
        async with Client("nats://127.0.0.1:1"):
            pass


async def test_a_client_that_was_closed_ends_its_readers(client: Client, gateway: FakeGateway) -> None:
    gateway.silent = 3
    gateway.deaf["read"] = 10_000
    stream = client.chat(**ASKED, stream=True)

    async def read() -> None:
        async for chunk in stream:
            if chunk.position.next == 4:
                await client.close()

    with pytest.raises(Disconnected):
        await asyncio.wait_for(read(), 5)


async def test_cancel_names_the_request_by_its_key(client: Client, gateway: FakeGateway) -> None:
    stream = client.chat(**ASKED, stream=True)
    assert await stream.cancel() == "cancelling"
    assert await client.cancel("an-id") == "cancelling"
    assert gateway.cancelled == [{"key": stream.position.key}, {"id": "an-id"}]


# -- what it needs ------------------------------------------------------------------------------------------------


def test_names_of_the_wire_are_those_of_the_server() -> None:
    from penstock.client import reader as reorder

    assert reorder.HEADER_FINAL == wire.HEADER_FINAL
    assert reorder.HEADER_KEY == wire.HEADER_KEY
    assert reorder.HEADER_REQUEST == wire.HEADER_REQUEST
    for name in ("demo", "a.b c", "ü", "org/model-1.5_x", ""):
        assert token(name) == wire.token(name)


def test_the_client_imports_nothing_of_the_server() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import penstock.client; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    theirs = {"nats", "msgspec", "nkeys", "aiohttp", "typing_extensions"}
    assert loaded - set(sys.stdlib_module_names) <= {"penstock"} | theirs


async def test_a_server_that_ends_before_tls_began_is_left_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: set[str] = set()

    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.add(writer.get_extra_info("sockname"))
        writer.write(b'INFO {"tls_required": true, "max_payload": 1000}\r\n')
        await reader.read(10)
        writer.transport.abort()

    servers = [await asyncio.start_server(ends, "127.0.0.1", 0) for _ in range(2)]
    monkeypatch.setattr(connection, "CONNECT_S", 0.8)
    monkeypatch.setattr(connection, "CLOSED_S", 0.05)
    urls = ",".join(f"tls://user:word@127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
    with pytest.raises(PenstockError, match="accepted the connection within"):
        await connection.connect(urls, "ps")
    assert len(tried) == 2
    for server in servers:
        server.close()


async def test_closing_survives_that_another_wait_for_the_end_of_the_link_was_cancelled(broker: EmbeddedNats) -> None:
    """As nats-py does when it is closed while it reconnects. A client's end raised CancelledError."""
    made = await connection.connect(broker.url("operator"), "ps", inbox_prefix="_INBOX_operator")
    waiting = asyncio.create_task(made.nc._transport.wait_closed())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await made.close()
    assert made.closed
