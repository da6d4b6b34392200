"""What is known of a request after it was accepted, from any replica, and reading its answer again."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.schemas.requests import new_request_id
from tests.pipeline.support import (
    Deployment,
    Event,
    Oracle,
    ending,
    idle_workers,
    joined,
    metrics,
    parse_sse,
    samples,
    until,
    words,
)

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
    "temperature": 0,
    "max_tokens": 20,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
PATH = "/v1/chat/completions"


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)


# -- all of them --------------------------------------------------------------------------------------------------


async def test_requests_are_listed_in_pages_by_any_gateway(fast: Deployment, http: httpx.AsyncClient, bus: Bus) -> None:
    """Since the test began: an earlier ``since`` has the thousands of requests of other tests read, too."""
    user, sent = f"lister-{new_request_id()}", []
    asked = {"user": user, "limit": 2, "since": time.time() - 1}
    for _ in range(3):
        answer = await http.post(PATH, json={**CHAT, "user": user})
        sent.append(answer.headers["x-request-id"])
        await ending(bus, sent[-1])
    for url in fast.state.http_urls:
        async with client_of(url) as client:
            first = (await client.get("/v1/requests", params=asked)).json()
            assert [each["id"] for each in first["data"]] == sent[:0:-1]
            assert first["has_more"]
            last = (await client.get("/v1/requests", params=asked | {"after": first["next_after"]})).json()
            assert [each["id"] for each in last["data"]] == sent[:1]
            (found,) = last["data"]
            assert (found["state"], found["output_tokens"], found["model"]) == ("done", 20, "tiny")
            refused = await client.get("/v1/requests", params={"limit": "many"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


# -- state and result ---------------------------------------------------------------------------------------------


async def test_a_finished_request_is_shown_by_every_replica(fast: Deployment, http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=CHAT)
    request_id = answer.headers["x-request-id"]
    for url in fast.urls:
        async with client_of(url) as client:
            for name in (request_id, f"chatcmpl-{request_id}"):
                status = (await client.get(f"/v1/requests/{name}")).json()
                assert status["id"] == request_id
                assert status["state"] == "done"
                assert status["result"] == answer.json()
                assert status["output_tokens"] == 20
                assert status["worker"].startswith("worker-")
                assert status["attempt"] == 1
                assert "error" not in status
                cancelled = await client.delete(f"/v1/requests/{name}")
                assert (cancelled.status_code, cancelled.json()["state"]) == (200, "done")


async def test_a_running_request_is_shown_and_can_be_cancelled_by_another_replica(
    slow: Deployment, slow_http: httpx.AsyncClient, slow_bus: Bus
) -> None:
    async with (
        client_of(slow.urls[1]) as other,
        slow_http.stream("POST", PATH, json={**CHAT, "max_tokens": 2000, "stream": True}) as answer,
    ):
        parts = answer.aiter_raw()
        raw = await anext(parts)
        request_id = answer.headers["x-request-id"]
        status = (await other.get(f"/v1/requests/{request_id}")).json()
        assert status["state"] == "running"
        assert status["output_tokens"] >= 1
        assert "result" not in status
        cancelled = await other.delete(f"/v1/requests/{request_id}")
        assert cancelled.status_code == 202
        async for part in parts:
            raw += part
        *_, error, done = parse_sse(raw)
        assert error.body["error"]["code"] == "cancelled"
        assert done.data == "[DONE]"
        _, end = await ending(slow_bus, request_id)
        assert end.code == "cancelled"
        status = (await other.get(f"/v1/requests/{request_id}")).json()
        assert status["state"] == "cancelled"
        assert status["error"]["code"] == "cancelled"
        again = await other.delete(f"/v1/requests/{request_id}")
        assert (again.status_code, again.json()) == (200, {"id": request_id, "cancelled": False, "state": "cancelled"})
    await until(lambda: idle_workers(slow_bus), "the worker's blocks are free")


async def test_a_failed_request_keeps_its_error(http: httpx.AsyncClient, fast: Deployment) -> None:
    answer = await http.post(PATH, json={**CHAT, "worker": "nobody", "stream": True})
    assert answer.status_code == 400, "nothing was streamed yet, so it has a status of its own"
    request_id = answer.headers["x-request-id"]
    async with client_of(fast.urls[1]) as other:
        status = (await other.get(f"/v1/requests/{request_id}")).json()
    assert status["state"] == "failed"
    assert status["error"]["message"] == answer.json()["error"]["message"]


async def test_a_request_that_nobody_made_is_not_found(http: httpx.AsyncClient) -> None:
    late = "ffffffff-ffff-7fff-bfff-ffffffffffff"  # of the year 10889
    for name in (new_request_id(), new_request_id(now_ns=10**18), late, "nonsense", "chatcmpl-", "%2e%2e", "x" * 3000):
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/stream")):
            answer = await http.request(method, f"/v1/requests/{name}{path}")
            assert answer.status_code == 404, (name, method, path)
            assert answer.json()["error"]["message"]


# -- reading again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("replica", [0, 1])
async def test_the_rest_of_a_stream_is_the_same_from_any_event_on_and_any_replica(
    fast: Deployment, http: httpx.AsyncClient, replica: int, n: int
) -> None:
    body = {**CHAT, **USAGE, "n": n, "temperature": 1, "seed": 9, "max_tokens": 6, "logprobs": n == 3}
    answer = await http.post(PATH, json=body)
    events = parse_sse(answer.content)
    async with client_of(fast.urls[replica]) as client:
        path = f"/v1/requests/{answer.headers['x-request-id']}/stream"
        again = await client.get(path)
        assert again.headers["x-request-id"] == answer.headers["x-request-id"]
        assert again.content == answer.content
        for position, event in enumerate(events[:-1]):
            rest = await client.get(path, headers={"Last-Event-ID": event.id})
            assert parse_sse(rest.content) == events[position + 1 :], event.id


async def test_a_text_answer_with_stop_strings_is_the_same_when_read_again(
    fast: Deployment, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    body = {"model": "tiny", "prompt": "Once more", "temperature": 0, "max_tokens": 30, **USAGE}
    stop = oracle.answer(body, 30)[60:64]
    answer = await http.post("/v1/completions", json={**body, "stop": stop})
    assert joined(parse_sse(answer.content)) == oracle.answer(body, 30).partition(stop)[0]
    async with client_of(fast.urls[1]) as other:
        again = await other.get(f"/v1/requests/{answer.headers['x-request-id']}/stream")
    assert again.content == answer.content


async def test_two_replicas_follow_a_running_request_together(
    slow: Deployment, slow_http: httpx.AsyncClient, oracle: Oracle
) -> None:
    body = {**CHAT, **USAGE, "max_tokens": 25}
    async with slow_http.stream("POST", PATH, json=body) as answer:
        request_id = answer.headers["x-request-id"]
        parts = answer.aiter_raw()
        raw = await anext(parts)
        while raw.count(b"\n\n") < 5:
            raw += await anext(parts)
        seen = parse_sse(raw[: raw.rindex(b"\n\n") + 2])

        async def follow(url: str, last: str) -> list[Event]:
            headers = {"Last-Event-ID": last} if last else {}
            async with client_of(url) as client:
                return parse_sse((await client.get(f"/v1/requests/{request_id}/stream", headers=headers)).content)

        followers = [follow(url, last) for url in slow.urls for last in ("", seen[1].id, seen[4].id)]
        rest, followed = await asyncio.gather(read_all(parts), asyncio.gather(*followers))
        events = parse_sse(raw + rest)
    assert len([event for event in events if event.data != "[DONE]"]) == 27
    for got, after in zip(followed, (0, 2, 5) * 2, strict=True):
        assert got == events[after:]


async def read_all(parts: Any) -> bytes:
    return b"".join([part async for part in parts])


async def test_a_follower_that_leaves_cancels_nothing(
    slow: Deployment, slow_http: httpx.AsyncClient, slow_bus: Bus
) -> None:
    async with slow_http.stream("POST", PATH, json={**CHAT, **USAGE, "max_tokens": 30}) as answer:
        parts = answer.aiter_raw()
        raw = await anext(parts)
        request_id = answer.headers["x-request-id"]
        for url in slow.urls:
            async with client_of(url) as client, client.stream("GET", f"/v1/requests/{request_id}/stream") as follower:
                await anext(follower.aiter_raw())
        raw += await read_all(parts)
    assert parse_sse(raw)[-2].body["usage"]["completion_tokens"] == 30
    _, end = await ending(slow_bus, request_id)
    assert end.code == ""
    for url in slow.urls:

        async def nothing_open(url: str = url) -> bool:
            return (await metrics(url))["penstock_gateway_open_requests"] == 0

        await until(nothing_open, "no request is open in any gateway")


@pytest.mark.parametrize("last", ["x", "1.2", "-1", "999999999999999999", "1ff", "\u00b2"])
async def test_an_event_id_that_is_not_of_this_answer_is_refused(http: httpx.AsyncClient, last: str) -> None:
    answer = await http.post(PATH, json={**CHAT, "max_tokens": 2})
    headers = {"Last-Event-ID": last.encode("latin-1")}
    refused = await http.get(f"/v1/requests/{answer.headers['x-request-id']}/stream", headers=headers)  # type: ignore[arg-type]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Last-Event-ID"


# -- health, metrics, documents -----------------------------------------------------------------------------------


async def test_health_models_and_documents(fast: Deployment) -> None:
    for url in fast.urls:
        async with client_of(url) as client:
            assert (await client.get("/health/live")).json() == {"status": "live"}
            for probed in ("/health", "/health/live", "/health/ready", "/v1/models", "/metrics"):
                head = await client.head(probed)  # as load balancers probe
                assert (head.status_code, head.content) == (200, b"")
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": []})
            models = (await client.get("/v1/models")).json()
            assert [card["id"] for card in models["data"]] == ["tiny", "other"]
            assert models["data"][0]["max_model_len"] == 131_072
            home = await client.get("/")
            assert (home.status_code, "new chat" in home.text.lower()) == (200, True)
            assert "default-src 'none'" in home.headers["content-security-policy"]
            docs = await client.get("/docs")
            assert docs.headers["content-type"].startswith("text/html")
            assert "openapi.json" in docs.text


def test_the_anthropic_client_lists_and_pages_models(fast: Deployment) -> None:
    import anthropic  # late: this takes 1.5 s, in each process that collects tests

    with anthropic.Anthropic(base_url=fast.urls[0], api_key="none", max_retries=0) as client:
        page = client.models.list(limit=1)
        assert ([model.id for model in page.data], page.has_more) == (["tiny"], True)
        assert [model.id for model in page] == ["tiny", "other"], "it asks for the second page by itself"
        assert [model.id for model in client.models.list(limit=1, before_id="other")] == ["tiny"]
        model = client.models.retrieve("other")
        assert (model.type, model.display_name, model.max_input_tokens) == ("model", "other", 131_072)
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("nobody")
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_the_tokenizer_is_described_without_files_of_the_host(http: httpx.AsyncClient) -> None:
    info = (await http.get("/tokenizer_info")).json()
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"]
    assert "eos_token" in info
    assert not [name for name in info if name.endswith(("_file", "_or_path"))]
    assert (await http.get("/tokenizer_info?model=other")).json() == info
    refused = await http.get("/tokenizer_info?model=nobody")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_document_describes_every_path_that_is_served(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/requests/{id}/stream", "/health/ready"):
        assert path in document["paths"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["200"]
            assert method != "delete" or "/requests/" not in path or operation["responses"]["202"]
            answer = await http.request(method.upper(), path.replace("{id}", "nobody").replace("{name}", "nobody"))
            assert answer.status_code != 405, (method, path)
            assert "GET /docs lists all endpoints" not in answer.text, f"{method} {path} is not served"


async def test_the_counters_count_what_happened(fast: Deployment, http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    before = samples(text)
    body = {"model": "tiny", "prompt": words(200, 88), "max_tokens": 7, "temperature": 0}
    for stream in (False, True, False):
        await http.post("/v1/completions", json={**body, "stream": stream})
    await http.post("/v1/completions", json={**body, "model": "nobody"})
    prompt = (await http.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens"]
    after = before

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    async def counted() -> bool:  # an answer is counted when it has been sent, perhaps after it has been read
        nonlocal after
        after = samples((await http.get("/metrics")).text)
        return grown("penstock_gateway_request_seconds_count") == 5

    await until(counted, "all five answers are counted")
    assert grown('penstock_gateway_requests_total{api="http",code="ok"}') == 4
    assert grown('penstock_gateway_requests_total{api="http",code="model_not_found"}') == 1
    assert grown("penstock_gateway_prompt_tokens_total") == 4 * prompt
    assert grown("penstock_gateway_output_tokens_total") == 28
    assert grown("penstock_gateway_cached_tokens_total") > 0
    assert grown("penstock_gateway_ttft_seconds_count") >= 1
    assert after["penstock_gateway_tasks"] > 0
    assert before.keys() <= after.keys()
