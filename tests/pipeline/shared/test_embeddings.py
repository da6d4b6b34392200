"""Embeddings, rankings and scores through gateway, log, router and embed workers, over HTTP and NATS."""

import asyncio
import base64
import json
import os
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest
import torch

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.subjects import HEADER_NO_STORE, HEADER_REPLY_TO
from penstock.workers.engines.embed.embedding_protocol import shortened
from penstock.workers.engines.embed.mock import mock_vector
from tests.chaos.log import until_counted
from tests.pipeline.support import MODEL, Deployment, Process, accepted, ending, ok, registrations, until
from tests.workers.engines.embed.test_native import cross_encoder, scored

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def workers(fast: Deployment) -> Iterator[list[Process]]:
    """Two that take 1 ms for a token, beside the workers of a language model."""
    common = ("--role", "embed", "--engine", "mock", "--model", str(MODEL), "--mock-speedup", "0.01", "--drain-s", "1")
    started = [fast.also("worker", *common, "--served-model-name", "vectors,vec") for _ in range(2)]
    for process in started:
        process.wait_for("worker_registered")
    yield started
    for process in started:
        process.ask_to_stop()
    assert [process.stop() for process in started].count(0) >= 1, "one was killed by a test"


@pytest.fixture
async def served(workers: list[Process], http: httpx.AsyncClient) -> httpx.AsyncClient:
    """The gateway, once it knows of the workers."""

    async def known() -> bool:
        return "vec" in {card["id"] for card in (await http.get("/v1/models")).json()["data"]}

    await until(known, "the gateway lists the model")
    return http


def expected(tokens: list[int], dimensions: int = 64) -> list[float]:
    return array("f", shortened(mock_vector(tokens), dimensions)).tolist()


async def test_the_stock_client_gets_vectors_in_the_order_of_its_inputs(
    served: httpx.AsyncClient, aclient: openai.AsyncOpenAI
) -> None:
    inputs = [[1], [2] * 30, [3, 4], [5] * 7]
    answer = await aclient.embeddings.create(model="vec", input=inputs)  # it asks for base64 by itself
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    assert [each.embedding for each in answer.data] == [expected(each) for each in inputs]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (40, 40)
    plain = await aclient.embeddings.create(model="vec", input="hello there", encoding_format="float", dimensions=8)
    assert len(plain.data[0].embedding) == 8
    assert sum(value * value for value in plain.data[0].embedding) == pytest.approx(1)


async def test_ollamas_clients_get_the_same_vectors(served: httpx.AsyncClient) -> None:
    texts = ["hello there", "goodbye"]
    known = (await served.post(PATH, json={"model": "vec", "input": texts})).json()
    vectors = [each["embedding"] for each in known["data"]]
    answer = await served.post("/api/embed", json={"model": "vec:latest", "input": texts, "keep_alive": "5m"})
    tokens = known["usage"]["prompt_tokens"]
    assert answer.json() == {"model": "vec", "embeddings": vectors, "prompt_eval_count": tokens}
    assert "x-penstock-ignored-options" not in answer.headers
    one = await served.post("/api/embeddings", json={"model": "vec", "prompt": texts[1]})
    assert one.json() == {"embedding": vectors[1]}
    record = (await served.get("/v1/requests/" + answer.headers["x-request-id"])).json()
    assert (record["state"], record["result"]) == ("done", answer.json())
    wrong = await served.post("/api/embed", json={"model": "tiny", "input": "x"})
    assert (wrong.status_code, set(wrong.json())) == (400, {"error"})


async def test_the_lines_of_a_batch_may_ask_for_vectors_and_are_counted_once(
    served: httpx.AsyncClient, aclient: openai.AsyncOpenAI, bus: Bus
) -> None:
    async def used() -> int:
        page = (await served.get("/v1/usage", params={"group_by": "model", "bucket_width": "1mo"})).json()
        results = [each for bucket in page["data"] for each in bucket["results"] if each["model"] == "vec"]
        assert sum(each["output_tokens"] for each in results) == 0
        return sum(each["input_tokens"] for each in results)

    last = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.all("done"), newest=True)
    await until_counted(bus, last.seq if last is not None else 0)
    before = await used()
    inputs = [[number + 1] * (number % 7 + 1) for number in range(30)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": PATH, "body": {"model": "vec", "input": each}}
        for number, each in enumerate(inputs)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    source = await aclient.files.create(file=("in.jsonl", data), purpose="batch")
    batch = await aclient.batches.create(input_file_id=source.id, endpoint=PATH, completion_window="24h")

    async def over() -> Any:
        now = await aclient.batches.retrieve(batch.id)
        return now if now.status == "completed" else None

    ended = await until(over, "the batch has ended")
    output = [json.loads(line) for line in (await aclient.files.content(ended.output_file_id)).text.splitlines()]
    assert [each["custom_id"] for each in output] == [str(number) for number in range(30)]
    bodies = [each["response"]["body"] for each in output]
    assert [body["data"][0]["embedding"] for body in bodies] == [expected(each) for each in inputs]
    told = sum(map(len, inputs))
    assert sum(body["usage"]["prompt_tokens"] for body in bodies) == told

    async def counted() -> bool:
        return await used() >= before + told

    await until(counted, "they are counted")
    assert await used() == before + told


async def test_the_answer_is_in_the_log_and_can_be_read_again(served: httpx.AsyncClient, bus: Bus) -> None:
    body = {"model": "vectors", "input": ["one text", "another"], "encoding_format": "base64"}
    answer = await ok(served.post(PATH, json=body))
    request_id = answer.headers["x-request-id"]
    timeline, end = await ending(bus, request_id)
    assert (timeline.stages[0].role, end.usage.completion) == ("embed", 0)
    assert end.usage.prompt == answer.json()["usage"]["prompt_tokens"] > 0
    status = (await served.get(f"/v1/requests/{request_id}")).json()
    assert (status["state"], status["result"]) == ("done", answer.json())
    stream = await served.get(f"/v1/requests/{request_id}/stream")
    assert (stream.status_code, stream.json()["error"]["code"]) == (400, "unsupported")
    told = str(inspect(timeline, with_tokens=False))
    assert "2 vectors of 64" in told


async def test_with_an_idempotency_key_every_gateway_gives_the_answer_of_one_request(
    served: httpx.AsyncClient, fast: Deployment
) -> None:
    body = {"model": "vec", "input": "once"}
    ids = set()
    for url in fast.urls:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            answer = await ok(client.post(PATH, json=body, headers={"Idempotency-Key": "vectors-1"}))
            ids.add(answer.json()["id"])
    assert len(ids) == 1


async def test_models_are_listed_and_asked_at_their_own_endpoint(served: httpx.AsyncClient) -> None:
    card = (await served.get("/v1/models/vectors")).json()
    assert (card["output_modalities"], card["dimensions"]) == (["embedding"], 64)
    generates = await served.post(PATH, json={"model": "tiny", "input": "a"})
    assert (generates.status_code, generates.json()["error"]["param"]) == (400, "model")
    chat = {"model": "vectors", "messages": [{"role": "user", "content": "hello"}]}
    refused = await served.post("/v1/chat/completions", json=chat)
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "generates no text; use POST /v1/embeddings" in refused.json()["error"]["message"]
    text = await served.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3})
    assert text.json()["usage"]["completion_tokens"] == 3
    too_long = await served.post(PATH, json={"model": "vec", "input": ["a", "word " * 140_000]})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_submission_over_nats_is_answered_with_the_same_vectors(
    served: httpx.AsyncClient, fast: Deployment, bus: Bus
) -> None:
    body: dict[str, Any] = {"model": "vec", "input": [[1, 2, 3]], "encoding_format": "base64"}
    nc = await nats.connect(fast.state.client_nats_url)
    try:
        asked = await nc.request("ps.ask.vec", json.dumps(body).encode(), timeout=10, headers={HEADER_NO_STORE: "1"})
        inbox = nc.new_inbox()
        answers = await nc.subscribe(inbox)
        headers = {HEADER_REPLY_TO: inbox}
        await nc.jetstream().publish("ps.submit.vec", json.dumps(body).encode(), headers=headers)
        submitted = await answers.next_msg(timeout=10)
    finally:
        await nc.close()
    for message in (asked, submitted):
        vector = json.loads(message.data)["data"][0]["embedding"]
        assert array("f", base64.b64decode(vector)).tolist() == expected([1, 2, 3])


async def test_a_killed_workers_request_is_done_by_another_one(served: httpx.AsyncClient, bus: Bus) -> None:
    inputs = [[number] * 50 for number in range(40)]  # 2 s
    body = {"model": "vec", "input": inputs, "user": "vector survivor", "timeout_s": 60}
    asking = asyncio.create_task(served.post(PATH, json=body, timeout=60))
    found: dict[str, str] = {}

    async def placed() -> bool:
        for request in await accepted(bus, "vector survivor"):
            timeline = await read_timeline(bus, request.id)
            if timeline.stages:
                found["id"], found["worker"] = request.id, timeline.stages[-1].worker
        return bool(found)

    await until(placed, "a worker has the request")
    os.kill((await registrations(bus))[found["worker"]].pid, signal.SIGKILL)
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert [each["embedding"] for each in answer.json()["data"]] == [expected(each) for each in inputs]
    _, end = await ending(bus, found["id"], within_s=30)
    assert (end.attempt, end.worker != found["worker"]) == (2, True)


async def test_a_short_text_is_computed_before_large_requests_that_a_worker_has_begun(
    served: httpx.AsyncClient, bus: Bus
) -> None:
    large = {"model": "vec", "input": [[number] * 100 for number in range(80)], "timeout_s": 60}  # 8 s
    users = [f"large {number}" for number in range(4)]  # two for each worker
    asking = [asyncio.create_task(served.post(PATH, json=large | {"user": user}, timeout=60)) for user in users]

    async def begun() -> list[str]:
        ids = [request.id for user in users for request in await accepted(bus, user)]
        timelines = [await read_timeline(bus, each) for each in ids]
        return ids if len(ids) == len(users) and all(each.stages for each in timelines) else []

    ids = await until(begun, "workers have the large requests")
    await ok(served.post(PATH, json={"model": "vec", "input": "short"}))
    states = [(await served.get(f"/v1/requests/{each}")).json()["state"] for each in ids]
    assert not {"done", "failed", "cancelled"} & set(states)
    for each in ids:
        assert (await served.delete(f"/v1/requests/{each}")).status_code == 202
    for ended in await asyncio.gather(*asking):
        assert ended.json()["error"]["code"] == "cancelled", ended.text


async def test_a_gateway_that_starts_while_no_worker_of_a_model_is_there_asks_for_patience(
    fast: Deployment, http: httpx.AsyncClient, bus: Bus
) -> None:
    common = ("--role", "embed", "--engine", "mock", "--model", str(MODEL), "--mock-speedup", "0", "--drain-s", "1")
    worker = fast.also("worker", *common, "--served-model-name", "passing")
    await asyncio.to_thread(worker.wait_for, "worker_registered")
    body = {"model": "passing", "input": "hello"}

    async def answered() -> bool:
        return (await http.post(PATH, json=body)).status_code == 200

    await until(answered, "the gateway knows the model")
    worker.ask_to_stop()
    await asyncio.to_thread(worker.wait)
    gateway = fast.also("gateway", "--model", str(MODEL), "--http-port", "0")
    await asyncio.to_thread(gateway.wait_for, "gateway_listening")
    port = next(each["port"] for line in gateway.log.read_text().splitlines() if "port" in (each := json.loads(line)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
        refused = await client.post(PATH, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable"), refused.text
        assert "no worker of model 'passing' is there" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        unknown = await client.post(PATH, json=body | {"model": "never-seen"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    gateway.ask_to_stop()
    gateway.wait()


DOCUMENTS = [
    "The router reads the log.",
    "A worker",
    "streams one token after another to the gateway, again and again.",
]
QUERY = "Who reads the log?"


@pytest.fixture(scope="module")
def ranker(fast: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a random cross-encoder, which the native engine serves."""
    path = cross_encoder(tmp_path_factory.mktemp("ranker") / "bert")
    worker = fast.also(
        "worker", "--role", "embed", "--model", str(path), "--served-model-name", "ranker", "--device", "cpu"
    )
    worker.wait_for("worker_registered")
    yield path
    worker.ask_to_stop()
    assert worker.stop() == 0


@pytest.fixture
async def ranked(ranker: Path, http: httpx.AsyncClient) -> list[float]:
    """The scores of plain transformers, once the gateway knows of the worker."""

    async def known() -> bool:
        return "ranker" in {card["id"] for card in (await http.get("/v1/models")).json()["data"]}

    await until(known, "the gateway lists the model")
    found: list[float] = torch.sigmoid(scored(ranker, [(QUERY, text) for text in DOCUMENTS])).tolist()
    return found


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_a_ranking_has_the_scores_of_transformers_and_can_be_read_again(
    path: str, ranked: list[float], http: httpx.AsyncClient, bus: Bus
) -> None:
    body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answer = await ok(http.post(path, json=body))
    best = sorted(range(3), key=lambda index: -ranked[index])[:2]
    results = answer.json()["results"]
    assert [each["index"] for each in results] == best
    assert [each["relevance_score"] for each in results] == pytest.approx([ranked[index] for index in best], abs=1e-5)
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[index] for index in best]
    request_id = answer.headers["x-request-id"]
    timeline, end = await ending(bus, request_id)
    assert end.usage.prompt == answer.json()["usage"]["total_tokens"] > 0
    assert "3 scores" in str(inspect(timeline, with_tokens=False))
    status = (await http.get(f"/v1/requests/{request_id}")).json()
    assert (status["state"], status["result"]) == ("done", answer.json())


async def test_scores_are_those_of_transformers_over_http_and_nats_stored_or_not(
    ranked: list[float], http: httpx.AsyncClient, fast: Deployment
) -> None:
    body: dict[str, Any] = {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}
    answers = [(await http.post("/score", json=body | {"no_store": stored})).json() for stored in (True, False)]
    answers.append((await http.post("/v1/score", json={"queries": [QUERY] * 3, "documents": DOCUMENTS})).json())
    nc = await nats.connect(fast.state.client_nats_url)
    try:
        for headers in ({HEADER_NO_STORE: "1"}, {}):
            asked = await nc.request("ps.ask.ranker", json.dumps(body).encode(), timeout=10, headers=headers)
            answers.append(json.loads(asked.data))
    finally:
        await nc.close()
    for answer in answers:
        assert [each["score"] for each in answer["data"]] == pytest.approx(ranked, abs=1e-5), answer


async def test_a_cross_encoder_is_listed_by_what_it_makes_and_asked_at_its_own_endpoints(
    ranked: list[float], http: httpx.AsyncClient
) -> None:
    card = (await http.get("/v1/models/ranker")).json()
    assert (card["output_modalities"], card["max_model_len"]) == (["score"], 40)
    refused = await http.post(PATH, json={"model": "ranker", "input": "a"})
    assert refused.status_code == 400
    assert "it serves /v1/rerank or /v1/score" in refused.json()["error"]["message"]
    chat = {"model": "ranker", "messages": [{"role": "user", "content": "hello"}]}
    said = (await http.post("/v1/chat/completions", json=chat)).json()["error"]["message"]
    assert "generates no text; use POST /v1/rerank or /v1/score" in said
    long = {"model": "ranker", "query": QUERY, "documents": ["a", "word " * 99], "truncate": False}
    too_long = await http.post("/v1/rerank", json=long)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await http.post("/v1/rerank", json=long | {"truncate": True})).status_code == 200
