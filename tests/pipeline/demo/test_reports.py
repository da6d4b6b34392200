"""What users of other servers reported, asked of the native engine: answers through every process of a deployment."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import connect
from tests.pipeline.demo.test_demo_model import TOOLS
from tests.pipeline.fleet.test_survival import used
from tests.pipeline.support import Deployment

pytestmark = pytest.mark.timeout(180)

THINK: dict[str, Any] = {
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is 12*13? Think."}],
    "chat_template_kwargs": {"enable_thinking": True},
}
HAS_PLUS = "2 + 3 + 0 = 5."  # in what the model thinks


async def post(demo: Deployment, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=60) as client:
        answer = await client.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def deltas(demo: Deployment, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=60) as client:
        text = (await client.post("/v1/chat/completions", json={"model": "demo", **body, "stream": True})).text
    bodies = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [body["choices"][0]["delta"] for body in bodies]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"structured_outputs": {"regex": "[0-9]+( [+] [0-9]+)?"}}])
async def test_a_stop_string_in_a_thought_does_not_end_the_answer(demo: Deployment, more: dict[str, Any]) -> None:
    whole = await post(demo, "/v1/chat/completions", {**THINK, "stop": ["+"], **more})
    assert len(whole["choices"]) == more.get("n", 1)
    for choice in whole["choices"]:
        assert HAS_PLUS in choice["message"]["reasoning_content"]
        assert choice["message"]["content"]
        assert "+" not in choice["message"]["content"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    if "n" not in more:
        streamed = await deltas(demo, {**THINK, "stop": ["+"], **more})
        assert all("reasoning_content" in delta for delta in streamed)
        shown = "".join(delta.get("content") or "" for delta in streamed)
        assert shown == whole["choices"][0]["message"]["content"]


async def test_the_ledger_has_the_tokens_of_reasoning_that_clients_were_told(demo: Deployment) -> None:
    bus = await connect(demo.state.nats_url, role="operator", name="test")
    try:
        before = await used(bus)
        told = [(await post(demo, "/v1/chat/completions", {**THINK, "n": n}))["usage"] for n in (1, 2)]
        after = await used(bus)
    finally:
        await bus.close()
    output = sum(each["completion_tokens"] for each in told)
    reasoning = sum(each["completion_tokens_details"]["reasoning_tokens"] for each in told)
    assert 0 < reasoning < output
    assert (after.completion - before.completion, after.reasoning - before.reasoning) == (output, reasoning)
    assert after.reasoning_unknown == before.reasoning_unknown


async def test_nor_does_it_in_the_other_apis(demo: Deployment) -> None:
    asked = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
    said = {"messages": THINK["messages"], "max_tokens": 300, "stop_sequences": ["+"]}
    message = await post(demo, "/v1/messages", {**asked, **said})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert HAS_PLUS in message["content"][0]["thinking"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "+")
    response = await post(demo, "/v1/responses", {**asked, "input": "What is 12*13? Think.", "stop": ["+"]})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert HAS_PLUS in response["output"][0]["content"][0]["text"]
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.0, 0.0)


async def test_a_stop_string_does_not_cut_a_call(demo: Deployment) -> None:
    said = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = await post(
        demo, "/chat/completions", {"messages": said, "tools": TOOLS, "stop": ["Par"], "temperature": 0}
    )
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


async def test_a_call_that_was_cut_off_does_not_end_the_conversation(demo: Deployment) -> None:
    broken = {"id": "c", "type": "function", "function": {"name": "w", "arguments": '{"city": "Pa'}}
    said = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    answer = await post(demo, "/v1/chat/completions", {"messages": said, "temperature": 0, "max_tokens": 20})
    assert answer["choices"][0]["message"]["content"]


async def test_a_prefilled_thought_continues_as_a_thought(demo: Deployment) -> None:
    said = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "<think>\n3 + 4"}]
    body = {"messages": said, "temperature": 0, "continue_final_message": True}
    message = (await post(demo, "/v1/chat/completions", body))["choices"][0]["message"]
    assert "</think>" not in (message["content"] or "")
    assert message["reasoning_content"]


async def test_packed_bodies_are_read_and_every_answer_has_the_clients_id(demo: Deployment) -> None:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=60) as client:
        headers = {"content-encoding": "gzip", "x-request-id": "mine"}
        answer = await client.post("/v1/chat/completions", content=gzip.compress(body), headers=headers)
        assert (answer.status_code, answer.headers["x-client-request-id"]) == (200, "mine")
        refused = await client.post("/v1/chat/completions", content=body, headers={"content-encoding": "br"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (415, "Content-Encoding")
        assert refused.headers["x-request-id"]
        said = {"model": "demo", "input": "hi", "max_output_tokens": 2}
        response = (await client.post("/v1/responses", json=said)).json()
        cancel = await client.post(f"/v1/responses/{response['id']}/cancel")
        assert cancel.status_code == 400


SEPARATED = "a\u2028b\u2029c\u0085d"


@pytest.mark.parametrize("prompt", [SEPARATED, [SEPARATED, "e"]])
async def test_only_line_feeds_end_the_lines_of_a_stream(demo: Deployment, prompt: Any) -> None:
    body = {"model": "demo", "prompt": prompt, "echo": True, "stream": True, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=60) as client:
        text = (await client.post("/v1/completions", json=body)).text
    lines = [line for line in text.splitlines() if line.startswith("data: {")]  # which splits at any of them
    said = [choice["text"] for line in lines for choice in json.loads(line[6:])["choices"] if choice["index"] == 0]
    assert "".join(said).startswith(SEPARATED)


async def test_a_base_url_may_end_with_a_slash_or_the_version(demo: Deployment) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(base_url=demo.urls[0], timeout=60) as client:
        for path in ("//v1/chat/completions", "/v1//chat/completions", "/v1/v1/chat/completions", "/v1/messages/"):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_http_2_is_answered_in_http_1_with_its_body(demo: Deployment, chunked: bool) -> None:
    url = httpx.URL(demo.urls[0])
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = [
        *("POST /v1/chat/completions HTTP/1.1", f"Host: {url.host}", "Content-Type: application/json", length),
        *("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA"),
    ]
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + sent)
        status = await asyncio.wait_for(reader.readline(), 30)
        assert status == b"HTTP/1.1 200 OK\r\n"
    finally:
        writer.close()


async def test_a_forced_call_that_was_cut_off_in_its_thought_is_a_thought(demo: Deployment) -> None:
    body = {**THINK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3}
    [choice] = (await post(demo, "/v1/chat/completions", body))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


async def test_log_probabilities_without_alternatives_are_those_of_the_tokens(demo: Deployment) -> None:
    asked = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "logprobs": True}
    for more in ({}, {"top_logprobs": 0}):
        [choice] = (await post(demo, "/v1/chat/completions", {**asked, **more}))["choices"]
        scored = choice["logprobs"]["content"]
        assert "".join(each["token"] for each in scored) == choice["message"]["content"]
        assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in scored)
    text = {"prompt": "2 + 3 =", "max_tokens": 2, "logprobs": 0, "temperature": 0}
    [choice] = (await post(demo, "/v1/completions", text))["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) > 0
