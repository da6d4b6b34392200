"""Files and batches with OpenAI's client."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from penstock.gateway.batches.batch import entered
from penstock.gateway.batches.store import BatchStore, key_of
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.schemas.batches import BATCH, FILE, Batch, BatchStatus, StoredFile
from penstock.schemas.requests import decode, new_request_id
from penstock.schemas.tokens import decode as decode_tokens
from tests.pipeline.support import Deployment, Oracle, until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat(text: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True}
    return body | {"max_tokens": tokens} | more


def lines(bodies: list[dict[str, Any]], url: str = CHAT) -> bytes:
    each = [{"custom_id": f"line-{at}", "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, each)).encode()


async def begun(client: openai.AsyncOpenAI, data: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    source = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=source.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, name: str, within_s: float = 60) -> Any:
    async def over() -> Any:
        batch = await client.batches.retrieve(name)
        return batch if batch.status in ENDED else None

    return await until(over, f"{name} is over", within_s)


async def results(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    """The lines of an output file or error file."""
    if file is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file)).text.splitlines()]


@pytest.fixture
async def sclient(slow: Deployment) -> Any:
    async with openai.AsyncOpenAI(base_url=slow.urls[0] + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_each_line_has_the_answer_that_its_request_would_have(
    aclient: openai.AsyncOpenAI, fast: Deployment, oracle: Oracle, bus: Bus
) -> None:
    bodies = [chat(f"Number {number}") for number in range(60)]
    batch = await begun(aclient, lines(bodies), metadata={"night": "1"})
    assert (batch.status, batch.metadata) == ("validating", {"night": "1"})
    batch = await ended(aclient, batch.id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (60, 60, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = await results(aclient, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"line-{number}" for number in range(60)]
    for body, each in zip(bodies, output, strict=True):
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["message"]["content"] == oracle.answer(body, 4)
        assert each["response"]["body"]["id"] == "chatcmpl-" + each["response"]["request_id"]
    left = [entry async for entry in read(bus, bus.subjects.stream("BATCHES"), f"*.*.*.{batch.id}")]
    assert left == [], "its log is deleted once its files are there"


async def test_a_request_of_a_batch_waits_behind_all_others(aclient: openai.AsyncOpenAI, bus: Bus) -> None:
    batch = await ended(aclient, (await begun(aclient, lines([chat("Hello", priority="interactive")]))).id)
    (result,) = await results(aclient, batch.output_file_id)
    entry = await get_last(
        bus, bus.subjects.stream("REQUESTS"), bus.subjects.shard_of(result["response"]["request_id"])
    )
    assert entry is not None
    assert ".batch." in entry.subject


@pytest.mark.parametrize(
    ("endpoint", "body", "object_"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "Once", "max_tokens": 3}, "text_completion"),
        ("/v1/responses", {"model": "tiny", "input": "Once", "max_output_tokens": 3}, "response"),
    ],
)
async def test_other_endpoints_answer_in_their_own_form(
    aclient: openai.AsyncOpenAI, endpoint: str, body: dict[str, Any], object_: str
) -> None:
    batch = await ended(aclient, (await begun(aclient, lines([body], endpoint), endpoint)).id)
    (result,) = await results(aclient, batch.output_file_id)
    assert result["response"]["body"]["object"] == object_


async def test_a_line_that_cannot_be_served_is_an_error_and_the_others_are_answered(
    aclient: openai.AsyncOpenAI,
) -> None:
    bodies = [chat("a"), chat("b", model="nobody"), chat("c", max_tokens=-1), chat("d", stream=True), chat("e")]
    batch = await ended(aclient, (await begun(aclient, lines(bodies))).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
    errors = {each["custom_id"]: each["response"] for each in await results(aclient, batch.error_file_id)}
    found = {name: (each["status_code"], each["body"]["error"]["param"]) for name, each in errors.items()}
    assert found == {"line-1": (404, "model"), "line-2": (400, "max_tokens"), "line-3": (400, "stream")}


async def test_an_input_with_a_wrong_line_fails_and_nothing_of_it_runs(aclient: openai.AsyncOpenAI) -> None:
    batch = await ended(aclient, (await begun(aclient, lines([chat("a")]) + b'\n{"custom_id": 1}')).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    (error,) = batch.errors.data
    assert (error.code, error.line) == ("invalid_json_line", 2)


async def test_after_a_cancel_every_line_has_a_result_or_says_that_it_was_cancelled(
    sclient: openai.AsyncOpenAI,
) -> None:
    # Four run at once, for a second each.
    batch = await begun(sclient, lines([chat(f"Number {number}", 40) for number in range(80)]))

    async def some() -> bool:
        return bool((await sclient.batches.retrieve(batch.id)).request_counts.completed)

    await until(some, "some have ended", 40)
    assert (await sclient.batches.cancel(batch.id)).status == "cancelling"
    over = await ended(sclient, batch.id, 20)
    assert over.status == "cancelled"
    output, errors = await results(sclient, over.output_file_id), await results(sclient, over.error_file_id)
    assert (over.request_counts.completed, over.request_counts.failed) == (len(output), len(errors))
    assert len(output) + len(errors) == over.request_counts.total == 80
    assert len({each["custom_id"] for each in output + errors}) == 80
    assert 0 < len(output) < 40
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert (await sclient.batches.cancel(batch.id)).status == "cancelled", "once more is no error"


async def test_what_has_no_result_when_a_batch_expires_says_so(sclient: openai.AsyncOpenAI, slow_bus: Bus) -> None:
    data = lines([chat(f"Number {number}", 40) for number in range(80)])
    source = await sclient.files.create(file=("in.jsonl", data), purpose="batch")
    store, now_ns = BatchStore(slow_bus), slow_bus.clock.now_ns()
    # As if it had been made a while ago.
    batch = Batch(BATCH + new_request_id(), "default", CHAT, source.id, "1h", now_ns, now_ns + 3_000_000_000)
    assert await store.change(batch, 0) is not None
    over = await ended(sclient, batch.id, 30)
    assert over.status == "expired"
    output, errors = await results(sclient, over.output_file_id), await results(sclient, over.error_file_id)
    assert len(output) + len(errors) == over.request_counts.total == 80
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}


async def test_a_batch_that_was_cancelled_while_nobody_drove_it_is_cancelled_by_its_next_driver(
    aclient: openai.AsyncOpenAI, bus: Bus
) -> None:
    source = await aclient.files.create(file=("in.jsonl", lines([chat("a"), chat("b")])), purpose="batch")
    store, now_ns = BatchStore(bus), bus.clock.now_ns()
    batch = Batch(
        *(BATCH + new_request_id(), "default", CHAT, source.id, "1h", now_ns, now_ns + 3_600_000_000_000),
        status=BatchStatus.cancelling,
        driver="gateway-that-died",
        times={BatchStatus.cancelling: now_ns},
    )
    assert await store.change(batch, 0) is not None
    over = await ended(aclient, batch.id, 30)
    assert (over.status, over.request_counts.total, over.request_counts.failed) == ("cancelled", 2, 2)


async def test_a_driver_that_lost_its_batch_leaves_it_to_the_other(aclient: openai.AsyncOpenAI, bus: Bus) -> None:
    """Two gateways that both believe to drive a batch run no line twice: only one can write to its log."""
    store = BatchStore(bus)
    batch = await begun(aclient, lines([chat(f"Number {number}", 29) for number in range(400)]))

    async def driven() -> Any:
        found = await store.find(batch.id, "default", Batch)
        assert isinstance(found.value, Batch)
        return found if found.value.driver and found.value.status is BatchStatus.in_progress else None

    for _ in range(50):
        found = await until(driven, "some gateway drives it")
        robbed = msgspec.structs.replace(found.value, driver="")
        if await store.change(robbed, found.revision) is not None:
            break
    over = await ended(aclient, batch.id)
    assert (over.status, over.request_counts.completed) == ("completed", 400)
    output = await results(aclient, over.output_file_id)
    ran = {each["response"]["request_id"] for each in output}
    stored = read(bus, bus.subjects.stream("REQUESTS"), f"{bus.subjects.namespace}.request.*.batch.*")
    accepted = {each.id async for each in (decode(entry.data) async for entry in stored) if each.stop.max_tokens == 29}
    assert accepted == ran
    assert len({each["custom_id"] for each in output}) == len(ran) == 400


async def test_files_are_listed_read_and_deleted(aclient: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    data = lines([chat("ä")])
    made = [await aclient.files.create(file=(f"{number}.jsonl", data), purpose="batch") for number in range(3)]
    assert made[0].id.startswith("file-")
    assert (made[0].bytes, made[0].filename, made[0].purpose) == (len(data), "0.jsonl", "batch")
    assert (await aclient.files.retrieve(made[0].id)) == made[0]
    assert (await aclient.files.content(made[0].id)).content == data

    async def listed() -> bool:
        names = [each.id async for each in aclient.files.list(limit=2)]
        return [each.id for each in made[::-1]] == [name for name in names if name in {each.id for each in made}]

    await until(listed, "all are listed, the newest first, over pages")
    assert (await aclient.files.delete(made[0].id)).deleted
    for path in (f"/v1/files/{made[0].id}", f"/v1/files/{made[0].id}/content"):
        assert (await http.get(path)).status_code == 404
    with pytest.raises(openai.NotFoundError):
        await aclient.batches.create(input_file_id=made[0].id, endpoint=CHAT, completion_window="24h")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ],
)
async def test_a_wrong_batch_is_refused_by_the_name_of_its_field(
    aclient: openai.AsyncOpenAI, http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    source = await aclient.files.create(file=("in.jsonl", lines([chat("a")])), purpose="batch")
    body = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h"} | change
    answer = await http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_file_of_another_purpose_or_without_content_is_refused(http: httpx.AsyncClient) -> None:
    for files, purpose, param in (
        ({"file": ("a", b"x")}, "assistants", "purpose"),
        ({"file": ("a", b"")}, "batch", "file"),
        ({"other": ("a", b"x")}, "batch", "file"),
    ):
        answer = await http.post("/v1/files", files=files, data={"purpose": purpose})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_address_of_a_picture_from_before_leads_to_where_pictures_are(http: httpx.AsyncClient) -> None:
    name = "01932c07-a4b8-7000-8000-0123456789ab-1-0.png"
    answer = await http.get(f"/v1/files/{name}")
    assert (answer.status_code, answer.headers["location"]) == (308, f"/v1/media/{name}")


async def test_batches_are_listed_over_pages_the_newest_first(aclient: openai.AsyncOpenAI) -> None:
    made = [await begun(aclient, lines([chat("a")])) for _ in range(3)]
    await asyncio.gather(*(ended(aclient, each.id) for each in made))

    async def listed() -> bool:
        names = [each.id async for each in aclient.batches.list(limit=2)]
        return names[:3] == [each.id for each in made[::-1]]

    await until(listed, "all are listed")


def test_the_key_of_an_entry_begins_with_its_tenant() -> None:
    assert key_of(Batch("batch_1", "acme", CHAT, "file-1", "1h", 0, 0)) == "acme.batch_1"


@pytest.fixture
async def messages(fast: Deployment) -> Any:
    import anthropic  # late: this takes 1.5 s, in each process that collects tests

    async with anthropic.AsyncAnthropic(base_url=fast.urls[0], api_key="none", max_retries=0) as made:
        yield made.messages.batches


def message(text: str, **more: Any) -> Any:
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}]} | more


async def ended_messages(batches: Any, name: str, within_s: float = 30) -> Any:
    async def over() -> Any:
        batch = await batches.retrieve(name)
        return batch if batch.processing_status == "ended" else None

    return await until(over, f"{name} has ended", within_s)


async def test_a_batch_of_messages_with_anthropics_client(messages: Any, aclient: openai.AsyncOpenAI) -> None:
    import anthropic

    asked = [{"custom_id": f"n-{n}", "params": message(f"Number {n}")} for n in range(20)]
    wrong = {"custom_id": "wrong", "params": message("x", model="nobody")}
    streamed = {"custom_id": "streamed", "params": message("x", stream=True)}
    made = await messages.create(requests=[*asked, wrong, streamed])
    assert (made.type, made.processing_status, made.request_counts.processing) == ("message_batch", "in_progress", 22)
    assert made.id.startswith("msgbatch_")
    assert (made.results_url, made.ended_at) == (None, None)
    over = await ended_messages(messages, made.id)
    counts = over.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 20, 2, 0, 0)
    found = {each.custom_id: each.result async for each in await messages.results(made.id)}
    assert set(found) == {*(each["custom_id"] for each in asked), "wrong", "streamed"}
    first = found["n-0"].message
    assert (first.type, first.role, first.usage.output_tokens) == ("message", "assistant", 4)
    assert first.content[0].text
    assert (found["wrong"].type, found["wrong"].error.error.type) == ("errored", "not_found_error")
    assert found["streamed"].error.error.type == "invalid_request_error"

    second = await messages.create(requests=asked[:1])
    listed = [each.id async for each in messages.list(limit=1)]
    assert listed[:2] == [second.id, made.id]
    assert made.id.replace("msgbatch_", "batch_") not in [each.id async for each in aclient.batches.list()]
    await ended_messages(messages, second.id)
    assert (await messages.cancel(second.id)).processing_status == "ended", "it is too late"
    assert (await messages.delete(second.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await messages.retrieve(second.id)
    with pytest.raises(anthropic.BadRequestError) as refused:
        await messages.create(requests=[asked[0], asked[0]])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    chats = await begun(aclient, lines([chat("a")]))
    with pytest.raises(anthropic.NotFoundError):
        await messages.retrieve(chats.id.replace("batch_", "msgbatch_"))


async def test_after_a_cancel_running_lines_stop_within_a_second(slow: Deployment, slow_bus: Bus) -> None:
    """By the broker's clock: from when the cancellation was stored to the last token that was."""
    import anthropic

    subjects = slow_bus.subjects

    async def tokens_since(at_ns: int) -> list[tuple[int, set[str]]]:
        found = read(slow_bus, subjects.stream("TOKENS"), subjects.all("tokens"), since_ns=at_ns)
        return [(each.time_ns, {item.request for item in decode_tokens(each.data).items}) async for each in found]

    began_ns = slow_bus.clock.now_ns()
    async with anthropic.AsyncAnthropic(base_url=slow.urls[0], api_key="none", max_retries=0) as client:
        batches = client.messages.batches
        params = message("Tell me everything", max_tokens=2000, ignore_eos=True)
        made = await batches.create(requests=[{"custom_id": str(n), "params": params} for n in range(40)])

        async def running() -> bool:
            requests = [request for _, some in await tokens_since(began_ns) for request in some]
            return len(set(requests)) >= 4

        await until(running, "four run at once")
        assert (await batches.cancel(made.id)).processing_status == "canceling"
        over = await ended_messages(batches, made.id)
        assert (over.request_counts.canceled, over.request_counts.succeeded) == (40, 0)
        assert {each.result.type async for each in await batches.results(made.id)} == {"canceled"}
    cancelled_ns = int(over.cancel_initiated_at.timestamp() * 1e9)
    stopped_s = ((await tokens_since(began_ns))[-1][0] - cancelled_ns) / 1e9
    print(f"the last token was stored {stopped_s:.3f} s after the cancellation")
    assert stopped_s < 1


async def test_a_tenant_with_many_batches_does_not_hold_up_anothers(slow: Deployment, slow_bus: Bus) -> None:
    """Four lines run at once, for a second each, and one tenant has 120 of them before the other comes."""
    store, now_ns = BatchStore(slow_bus), slow_bus.clock.now_ns()

    async def made(tenant: str, count: int) -> Batch:
        data = lines([chat(f"{tenant} {number}", 40) for number in range(count)])
        file = StoredFile(FILE + new_request_id(), tenant, "in.jsonl", "batch", len(data), now_ns, now_ns + 10**13)
        await store.put_file(file, data)
        batch = Batch(BATCH + new_request_id(), tenant, CHAT, file.id, "24h", now_ns, now_ns + 10**13)
        assert await store.change(batch, 0) is not None
        return batch

    async def now(batch: Batch) -> Batch:
        found = (await store.find(batch.id, batch.tenant, Batch)).value
        assert isinstance(found, Batch)
        return found

    many = [await made("acme", 40) for _ in range(3)]

    async def busy() -> bool:
        return any([(await now(each)).completed for each in many])

    await until(busy, "the first tenant's batches run")
    few = await made("zenith", 4)

    async def over() -> bool:
        return (await now(few)).status is BatchStatus.completed

    await until(over, "the other tenant's batch has ended", 40)
    meanwhile = [await now(each) for each in many]
    for batch in meanwhile:
        found = await store.find(batch.id, batch.tenant, Batch)
        assert isinstance(found.value, Batch)
        cancelled = entered(found.value, BatchStatus.cancelling, slow_bus.clock.now_ns())
        await store.change(cancelled, found.revision)
    assert sum(each.completed for each in meanwhile) < 60, "half of what the first one had would have come before it"
