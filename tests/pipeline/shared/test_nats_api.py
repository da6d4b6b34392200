"""The NATS API, used with nothing but a NATS client that has the client's rights."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import pytest
from faststream.nats import NatsBroker
from nats.aio.client import Client
from nats.aio.msg import Msg

from penstock.infra.bus.connection import Bus
from penstock.schemas import control, wire
from penstock.schemas.subjects import (
    HEADER_ERROR,
    HEADER_EVENT_ID,
    HEADER_FINAL,
    HEADER_FROM,
    HEADER_MSG_ID,
    HEADER_REPLY_TO,
    HEADER_REQUEST,
    HEADER_SEQ,
)
from tests.pipeline.support import (
    Deployment,
    Event,
    Oracle,
    accepted,
    ending,
    idle_workers,
    joined,
    parse_sse,
    until,
    words,
)

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Where is the harbour?"}],
    "temperature": 0,
    "max_tokens": 10,
}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "The harbour is", "temperature": 0, "max_tokens": 10}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class Submitter:
    """A client of the NATS API: submits, and keeps what arrives."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.js = nc.jetstream()

    async def submit(self, body: Any, reply_to: str, model: str = "tiny", **headers: str) -> Any:
        """Returns the broker's acknowledgement."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await self.js.publish(f"ps.submit.{model}", data, headers={HEADER_REPLY_TO: reply_to, **named})

    async def ask(self, body: Any, *, model: str = "tiny", reply_to: str = "", **headers: str) -> list[Msg]:
        """Submit, and take the messages up to the final one."""
        reply_to = reply_to or self.nc.new_inbox()
        sub = await self.nc.subscribe(reply_to)
        await self.submit(body, reply_to, model, **headers)
        messages = await read_answer(sub)
        await sub.unsubscribe()
        return messages

    async def read(self, body: Any, *, count: int = 0) -> list[Msg]:
        """Read an answer again: to its final message, or ``count`` messages."""
        inbox = self.nc.new_inbox()
        sub = await self.nc.subscribe(inbox)
        await self.nc.publish("ps.read", json.dumps(body).encode(), reply=inbox)
        messages = [await sub.next_msg(timeout=10) for _ in range(count)] or await read_answer(sub)
        await sub.unsubscribe()
        return messages


async def read_answer(sub: Any) -> list[Msg]:
    messages: list[Msg] = []
    while not messages or HEADER_FINAL not in (messages[-1].headers or {}):
        messages.append(await sub.next_msg(timeout=10))
    return messages


def numbered(messages: list[Msg]) -> dict[int, Any]:
    """Bodies by number."""
    return {int((message.headers or {})[HEADER_SEQ]): json.loads(message.data) for message in messages}


@pytest.fixture
async def submitter(fast: Deployment) -> AsyncIterator[Submitter]:
    nc = await nats.connect(fast.state.client_nats_url)
    yield Submitter(nc)
    await nc.close()


@pytest.mark.parametrize("kind", ["inbox", "reply"])
@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
async def test_a_streamed_answer_is_the_one_that_http_gives(
    submitter: Submitter, http: httpx.AsyncClient, oracle: Oracle, body: dict[str, Any], kind: str
) -> None:
    messages = await submitter.ask(
        {**body, **STREAM}, reply_to="" if kind == "inbox" else f"ps.reply.{submitter.nc.client_id}"
    )
    assert [HEADER_FINAL in (message.headers or {}) for message in messages] == [False] * (len(messages) - 1) + [True]
    ids = [(message.headers or {})[HEADER_EVENT_ID] for message in messages]
    path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
    events = parse_sse((await http.post(path, json={**body, **STREAM})).content)[:-1]
    assert ids == [event.id for event in events]
    assert len(set(ids)) == len(ids)

    def shown(parsed: dict[str, Any]) -> dict[str, Any]:
        """Without what differs between two requests."""
        parsed = {key: value for key, value in parsed.items() if key not in ("id", "created")}
        if parsed.get("usage"):
            del parsed["usage"]["prompt_tokens_details"]
        return parsed

    bodies = [json.loads(message.data) for message in messages]
    assert [shown(one) for one in bodies] == [shown(event.body) for event in events]
    assert joined([Event("", message.data.decode()) for message in messages]) == oracle.answer(body, 10)
    [request_id] = {(message.headers or {})[HEADER_REQUEST] for message in messages}
    assert {one["id"].partition("-")[2] for one in bodies} == {request_id}


async def test_a_whole_answer_is_one_message(submitter: Submitter, oracle: Oracle) -> None:
    [message] = await submitter.ask(CHAT)
    answer = json.loads(message.data)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == oracle.answer(CHAT, 10)
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["id"] == "chatcmpl-" + (message.headers or {})[HEADER_REQUEST]


async def test_a_repeat_at_once_is_answered_at_its_own_subject_as_well(submitter: Submitter, bus: Bus) -> None:
    """The stream swallows it: its PubAck says duplicate, and no consumer ever sees it."""
    body = {**TEXT, "prompt": words(30, 77), "temperature": 1, "user": "once-77", **STREAM}
    inboxes = [submitter.nc.new_inbox() for _ in range(4)]
    subs = [await submitter.nc.subscribe(inbox) for inbox in inboxes]
    acks = await asyncio.gather(*(submitter.submit(body, inbox, **{HEADER_MSG_ID: "once-77"}) for inbox in inboxes))
    assert any(ack.duplicate for ack in acks)
    answers = [numbered(await read_answer(sub)) for sub in subs]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert len(await accepted(bus, "once-77")) == 1


async def test_a_later_repeat_gets_the_same_answer_from_where_it_says(submitter: Submitter, bus: Bus) -> None:
    body = {**TEXT, "prompt": words(30, 78), "temperature": 1, "user": "later-78", **STREAM}
    first = numbered(await submitter.ask(body, **{HEADER_MSG_ID: "later-78"}))
    assert list(first) == list(range(len(first)))
    await asyncio.sleep(0.15)  # beyond the stream's duplicate window
    assert numbered(await submitter.ask(body, **{HEADER_MSG_ID: "later-78"})) == first
    rest = numbered(await submitter.ask(body, **{HEADER_MSG_ID: "later-78", HEADER_FROM: "4"}))
    assert rest == {number: data for number, data in first.items() if number >= 4}
    assert len(await accepted(bus, "later-78")) == 1


async def test_a_message_id_used_with_another_body_is_refused(submitter: Submitter) -> None:
    await submitter.ask(TEXT, **{HEADER_MSG_ID: "clash"})
    await asyncio.sleep(0.15)
    [message] = await submitter.ask({**TEXT, "max_tokens": 3}, **{HEADER_MSG_ID: "clash"})
    assert "another body" in json.loads(message.data)["error"]["message"]


async def test_answers_come_to_a_subject_that_follows_from_the_message_id(submitter: Submitter) -> None:
    key = hashlib.sha256(b"derived").hexdigest()[:32]
    sub = await submitter.nc.subscribe(f"ps.answer.{key}")
    await submitter.js.publish(
        "ps.submit.tiny", json.dumps({**TEXT, **STREAM}).encode(), headers={HEADER_MSG_ID: "derived"}
    )
    messages = await read_answer(sub)
    assert list(numbered(messages)) == list(range(len(messages)))


async def test_a_submission_that_names_nothing_is_answered_by_request_id(submitter: Submitter) -> None:
    sub = await submitter.nc.subscribe("ps.answer.>")
    await submitter.js.publish("ps.submit.tiny", json.dumps({**TEXT, "max_tokens": 2}).encode())
    request_id, message = "", Msg(submitter.nc)
    while message.subject != f"ps.answer.{request_id}":  # earlier submissions, which named something, may still answer
        [message] = await read_answer(sub)
        request_id = (message.headers or {})[HEADER_REQUEST]
    assert json.loads(
        (await submitter.nc.request("ps.read", json.dumps({"id": request_id}).encode())).data
    ) == json.loads(message.data)


async def test_an_answer_is_read_again_from_any_number_by_key_or_id(submitter: Submitter) -> None:
    messages = await submitter.ask({**CHAT, **STREAM}, **{HEADER_MSG_ID: "reread"})
    request_id = (messages[0].headers or {})[HEADER_REQUEST]
    whole = numbered(messages)
    assert numbered(await submitter.read({"id": request_id})) == whole
    assert numbered(await submitter.read({"key": "reread", "from": 3})) == {n: d for n, d in whole.items() if n >= 3}
    part = await submitter.read({"key": "reread", "from": 3, "until": 4}, count=2)
    assert numbered(part) == {n: whole[n] for n in (3, 4)}
    for beyond in (len(whole), 10**9):
        reply = await submitter.nc.request(
            "ps.read", json.dumps({"key": "reread", "from": beyond}).encode(), timeout=10
        )
        assert ((reply.headers or {})[HEADER_ERROR], HEADER_SEQ in (reply.headers or {})) == ("answer_ended", False)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_is_read_from_its_record_once_its_tokens_are_gone(
    submitter: Submitter, bus: Bus, n: int
) -> None:
    body = {**TEXT, **STREAM, "n": n, "prompt": words(9, 80 + n), "temperature": 1}
    messages = await submitter.ask(body, **{HEADER_MSG_ID: f"recorded-{n}"})
    await ending(bus, (messages[0].headers or {})[HEADER_REQUEST])
    await bus.js.purge_stream("ps_TOKENS")
    again = await submitter.read({"key": f"recorded-{n}"})
    assert numbered(again) == numbered(messages)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"key": "never used"}, "request_not_found"),
        ({"id": "01a20258-ee96-78dc-a335-ea987fc19ccd"}, "request_not_found"),
        ({"id": "nonsense"}, "request_not_found"),
        ({}, "invalid_request"),
        ({"id": "x", "key": "y"}, "invalid_request"),
        ({"key": "x", "from": -1}, "invalid_request"),
        ([1], "invalid_request"),
    ],
    ids=str,
)
async def test_a_read_that_fails_says_why_and_is_no_part_of_an_answer(
    submitter: Submitter, body: Any, code: str
) -> None:
    for subject in ("ps.read", "ps.cancel"):
        reply = await submitter.nc.request(subject, json.dumps(body).encode(), timeout=10)
        assert (reply.headers or {})[HEADER_ERROR] == code
        assert HEADER_SEQ not in (reply.headers or {})
        assert json.loads(reply.data)["error"]["code"] == code


async def test_plain_request_and_reply_gets_the_answer(submitter: Submitter, oracle: Oracle) -> None:
    reply = await submitter.nc.request("ps.ask.tiny", json.dumps(CHAT).encode(), timeout=10)
    assert json.loads(reply.data)["choices"][0]["message"]["content"] == oracle.answer(CHAT, 10)
    assert (reply.headers or {})[HEADER_FINAL] == "1"
    refused = await submitter.nc.request("ps.ask.tiny", json.dumps({**CHAT, "temperature": 9}).encode(), timeout=10)
    assert json.loads(refused.data)["error"]["code"] == "invalid_request"
    unknown = await submitter.nc.request("ps.ask.nobody", json.dumps({**CHAT, "model": "nobody"}).encode(), timeout=10)
    assert json.loads(unknown.data)["error"]["code"] == "model_not_found"


async def test_a_client_in_the_pipelines_own_account_gets_answers(fast: Deployment, oracle: Oracle) -> None:
    """With another inbox than the pipeline's processes, whose answers a gateway may send anyway."""
    nc = await nats.connect(fast.state.nats_url)
    try:
        asked = await nc.request("ps.ask.tiny", json.dumps(TEXT).encode(), timeout=30)
        assert json.loads(asked.data)["choices"][0]["text"] == oracle.text(oracle.tokens(TEXT, 10))
        query = json.dumps({"id": (asked.headers or {})[HEADER_REQUEST]}).encode()
        assert (await nc.request("ps.read", query, timeout=30)).data == asked.data
    finally:
        await nc.close()


async def test_the_record_names_the_message_id(submitter: Submitter, bus: Bus) -> None:
    """So that an invoice made from the log can be joined with the client's own list."""
    await submitter.ask({**TEXT, "user": "named"}, **{HEADER_MSG_ID: "invoice-7"})
    [request] = await accepted(bus, "named")
    assert request.client_request_id == "invoice-7"
    assert request.sampling.seed < 2**53  # JSON numbers of other languages have no more bits


async def test_options_that_are_ignored_are_named_in_the_answer(submitter: Submitter) -> None:
    asked = {**TEXT, "tempurature": 0.5, "max_token": 3}
    reply = await submitter.nc.request("ps.ask.tiny", json.dumps(asked).encode(), timeout=30)
    assert (reply.headers or {})["Penstock-Ignored-Options"] == "tempurature, max_token"
    messages = await submitter.ask({**asked, **STREAM})
    assert {(message.headers or {})["Penstock-Ignored-Options"] for message in messages} == {"tempurature, max_token"}
    plain = await submitter.nc.request("ps.ask.tiny", json.dumps(TEXT).encode(), timeout=30)
    assert "Penstock-Ignored-Options" not in (plain.headers or {})


async def test_an_ask_can_stream_and_be_repeated(submitter: Submitter, bus: Bus) -> None:
    body = json.dumps({**TEXT, **STREAM, "user": "asker"}).encode()
    answers = []
    for _ in range(2):
        inbox = submitter.nc.new_inbox()
        sub = await submitter.nc.subscribe(inbox)
        await submitter.nc.publish("ps.ask.tiny", body, reply=inbox, headers={HEADER_MSG_ID: "asked"})
        answers.append(numbered(await read_answer(sub)))
        await sub.unsubscribe()
    assert answers[0] == answers[1]
    assert list(answers[0]) == list(range(len(answers[0])))
    assert numbered(await submitter.read({"key": "asked"})) == answers[0]
    assert len(await accepted(bus, "asker")) == 1


async def test_faststream_requests_are_answered(fast: Deployment, oracle: Oracle) -> None:
    async with NatsBroker(fast.state.client_nats_url) as broker:
        reply = await broker.request(CHAT, "ps.ask.tiny", timeout=10)
        answer = await reply.decode()
    assert answer["choices"][0]["message"]["content"] == oracle.answer(CHAT, 10)


async def test_an_answer_that_holds_the_marks_of_an_event_stays_whole(submitter: Submitter) -> None:
    body = {**TEXT, **STREAM, "echo": False, "prompt": "data: one"}
    messages = await submitter.ask(body)
    assert all(json.loads(message.data) for message in messages)


@pytest.mark.parametrize(
    "subject",
    [
        "ps.request.tiny.standard",
        "ps.work.aggregated.worker-0",
        "ps.done.tiny",
        "ps.cancel",
        "$JS.API.STREAM.DELETE.ps_DONE",
        "$KV.ps_workers.x",
        "ps.replyx",
        "_INBOX_gateway.x",
        "ps.reply.*",
        "ps.reply.>",
        "ps.reply.",
        "ps.reply.a..b",
        "_INBOX.",
        "ps.reply." + "a" * 5000,  # the server cuts whoever sends such a line
    ],
    ids=lambda subject: subject[:30],
)
async def test_nothing_is_published_where_the_client_could_not_read(
    submitter: Submitter, fast: Deployment, bus: Bus, subject: str
) -> None:
    pids = {process.name: process.pid for process in fast.state.processes}
    subscription = await bus.nc.subscribe(">")
    await submitter.submit({**TEXT, "user": "intruder"}, subject)
    await submitter.ask({**TEXT, "max_tokens": 1})  # both gateways may have had the first one by now
    await submitter.ask({**TEXT, "max_tokens": 1})
    await bus.nc.flush()
    seen = []
    while subscription.pending_msgs:
        message = await subscription.next_msg(timeout=1)
        seen.append(message)
    await subscription.unsubscribe()
    said = {m.subject.rpartition(".")[0] for m in seen if HEADER_FINAL in (m.headers or {})}
    assert {subject.partition("._INBOX")[0] for subject in said} == {"ps.answer.default", "ps.to.default"}
    refusals = [m for m in seen if (m.headers or {}).get(HEADER_ERROR)]
    assert [m.subject.rpartition(".")[0] for m in refusals] == ["ps.answer.default"]
    assert json.loads(refusals[0].data)["error"]["code"] == "invalid_request"
    assert not [m.subject for m in seen if b"intruder" in m.data and not m.subject.startswith("ps.submit.")]
    assert {process.name: process.pid for process in fast.state.processes} == pids


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "invalid_request"),
        (b"\xff\xfe", "invalid_request"),
        (b"{", "invalid_request"),
        (b"[1]", "invalid_request"),
        (b'{"messages":[]}', "invalid_request"),
        (b'{"model":"tiny","messages":' + b"[" * 50_000, "invalid_request"),
        ({**CHAT, "temperature": 9}, "invalid_request"),
        ({**CHAT, "model": "gpt-5"}, "model_not_found"),
        ({**TEXT, "max_tokens": 1 << 30}, "context_length_exceeded"),
        ({**TEXT, "worker": "nobody"}, "invalid_request"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_submission_that_cannot_be_served_gets_one_error(submitter: Submitter, body: Any, status: str) -> None:
    [message] = await submitter.ask(body)
    error = json.loads(message.data)["error"]
    assert error["code"] == status
    assert error["message"]


async def test_a_model_that_nobody_serves_is_refused(submitter: Submitter) -> None:
    [message] = await submitter.ask({**CHAT, "model": "unknown"}, model="unknown")
    assert json.loads(message.data)["error"]["code"] == "model_not_found"


async def test_a_failure_behind_the_gateway_ends_a_stream_with_an_error(submitter: Submitter) -> None:
    [message] = await submitter.ask({**TEXT, **STREAM, "worker": "nobody"})
    assert json.loads(message.data)["error"]["code"] == "invalid_request"


async def test_an_answer_that_no_message_can_hold_is_an_error_that_says_so(submitter: Submitter) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 6000}
    [message] = await submitter.ask(body)
    error = json.loads(message.data)["error"]
    assert error["code"] == "body_too_large"
    assert "stream" in error["message"]
    assert len(await submitter.ask({**CHAT, "max_tokens": 1})) == 1


async def test_the_client_may_do_nothing_but_submit_cancel_and_listen(fast: Deployment) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    nc = await nats.connect(fast.state.client_nats_url, error_cb=note)
    refused = ("ps.request.tiny.standard", "ps.work.x.y", "ps.tokens.x", "ps.done.tiny", "$JS.API.STREAM.PURGE.ps_DONE")
    for subject in refused:
        await nc.publish(subject, b"x")
    await nc.flush()
    await nc.flush()
    assert len(errors) == len(refused)
    assert all("permissions violation" in error for error in errors)
    await nc.close()


async def test_a_submitter_can_cancel(slow: Deployment, slow_bus: Bus) -> None:
    nc = await nats.connect(slow.state.client_nats_url)
    submitter = Submitter(nc)
    inbox = nc.new_inbox()
    sub = await nc.subscribe(inbox)
    await submitter.submit({**TEXT, **STREAM, "max_tokens": 2000}, inbox)
    first = await sub.next_msg(timeout=10)
    request_id = (first.headers or {})[HEADER_REQUEST]
    await nc.publish("ps.cancel", cancel_message(request_id))
    last = (await read_answer(sub))[-1]
    assert json.loads(last.data)["error"]["code"] == "cancelled"
    _, end = await ending(slow_bus, request_id)
    assert end.code == "cancelled"
    await until(lambda: idle_workers(slow_bus), "the worker's blocks are free")
    await nc.close()


def cancel_message(request_id: str) -> bytes:
    return wire.encode(control.Cancel(request_id, "changed my mind"))


async def test_many_submissions_at_once_are_each_answered(submitter: Submitter, oracle: Oracle) -> None:
    bodies = [{**TEXT, "prompt": words(10, 3000 + i), **(STREAM if i % 2 else {})} for i in range(60)]
    answers = await asyncio.gather(*map(submitter.ask, bodies))
    for body, messages in zip(bodies, answers, strict=True):
        if "stream" in body:
            text = joined([Event("", message.data.decode()) for message in messages])
        else:
            text = json.loads(messages[0].data)["choices"][0]["text"]
        assert text == oracle.answer(body, 10)
