"""What clients get for requests that cannot be served: OpenAI's error shape, a code, and what to do."""

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from penstock.schemas.errors import Code
from tests.pipeline.support import Deployment, Oracle, connected, samples, token_prompt

GOOD: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 3,
    "temperature": 0,
}
CHAT = "/v1/chat/completions"
MODEL_LIMIT = 131_072


def check_error(answer: httpx.Response, status: int, code: str, *named: str, param: str | None = None) -> None:
    """The answer is an error of OpenAI's shape that names what the client has to know."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert Code(code).status == status or code == "invalid_request"
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] == param
    for text in named:
        assert text in error["message"], error["message"]


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient, client: openai.OpenAI) -> None:
    for path, body in ((CHAT, GOOD), ("/v1/completions", {"model": "tiny", "prompt": "x"})):
        answer = await http.post(path, json={**body, "model": "gpt-5"})
        check_error(answer, 404, "model_not_found", "gpt-5", "'tiny'", "'other'", param="model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**GOOD, "model": "TINY"})
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("change", "param", "named"),
    [
        ({"temperature": 2.5}, "temperature", "2.0"),
        ({"temperature": "warm"}, "temperature", "float"),
        ({"top_p": 0}, "top_p", "0.0"),
        ({"n": 129}, "n", "128"),
        ({"n": 0}, "n", "1"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 2.5}, "max_tokens", "int"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": ""}, "stop", "1"),
        ({"stop": "y" * 257}, "stop", "256"),
        ({"stop_token_ids": [4096]}, "stop_token_ids", "4096"),
        ({"logit_bias": {"4096": 1}}, "logit_bias", "4096"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "100"),
        ({"presence_penalty": -2.1}, "presence_penalty", "-2.0"),
        ({"seed": 1 << 64}, "seed", ""),
        ({"messages": []}, "messages", "1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"min_tokens": 9}, "min_tokens", "3"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"timeout_s": 0}, "timeout_s", "0"),
        ({"timeout_s": 1e9}, "timeout_s", "3600"),
        ({"priority": "vip"}, "priority", "vip"),
        ({"worker": "a.b"}, "worker", ""),
        ({"user": "u" * 257}, "user", "256"),
        ({"worker": "nobody"}, None, "unknown_worker"),
        ({"functions": [{"name": "f"}], "tools": [{"function": {"name": "f"}}]}, "functions", "excludes"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "function_call names 'g'"),
    ],
    ids=str,
)
async def test_a_bad_value_is_refused_with_its_field_and_limit(
    http: httpx.AsyncClient, change: dict[str, Any], param: str | None, named: str
) -> None:
    for stream in ({}, {"stream": True} if "stream_options" not in change else {}):
        answer = await http.post(CHAT, json={**GOOD, **change, **stream})
        check_error(answer, 400, "invalid_request", named, param=param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"modalities": ["audio"], "audio": {}}, "modalities"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "custom"}},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_refused_not_ignored(
    http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    words = "takes no images" if param.endswith("image_url") else "not supported"
    check_error(await http.post(CHAT, json={**GOOD, **change}), 400, "unsupported", words, param=param)


async def test_a_prompt_that_is_too_long_is_refused_with_the_limit(http: httpx.AsyncClient) -> None:
    code = "context_length_exceeded"
    body = {"model": "tiny", "prompt": token_prompt(MODEL_LIMIT, 9), "max_tokens": 1}
    check_error(await http.post("/v1/completions", json=body), 400, code, str(MODEL_LIMIT))
    body["prompt"] = "a very long story " * 400_000
    check_error(await http.post("/v1/completions", json=body), 400, code, str(MODEL_LIMIT))
    body = {"model": "tiny", "prompt": token_prompt(1000, 9), "max_tokens": MODEL_LIMIT}
    answer = await http.post("/v1/completions", json=body)
    check_error(answer, 400, code, f"at most {MODEL_LIMIT - 1000}", param="max_tokens")


async def test_paths_and_methods_that_do_not_exist(http: httpx.AsyncClient) -> None:
    check_error(await http.get("/v1/nothing"), 404, "endpoint_not_found", "/v1/nothing", "/docs")
    check_error(await http.post("/v1/audio/speech", json={}), 404, "endpoint_not_found", "/v1/audio/speech", "sound")
    answer = await http.get(CHAT)
    check_error(answer, 405, "invalid_request", "GET", "/docs")
    assert answer.headers["allow"] == "POST"
    check_error(await http.put("/v1/requests/x"), 405, "invalid_request")


async def test_a_body_above_the_limit_is_refused_before_it_is_read(fast: Deployment) -> None:
    async with asyncio.timeout(10), connected(fast.urls[0]) as (reader, writer):
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 40}\r\n\r\n{{".encode())
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(http: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(17):
            yield b" " * (1 << 20)

    answer = await http.post(CHAT, content=endless())
    check_error(answer, 413, "body_too_large", str(16 << 20), "--max-body-bytes")


# -- a thousand malformed bodies ----------------------------------------------------------------------------------

JUNK: list[Any] = [None, True, -1, 1e999, "x", [], {}, [[]], {"a": 1}, [None], 1 << 70, "\ud800", [1, "a"], {"role": 3}]


def malformed(rng: random.Random) -> bytes:
    """A body that no reading of the API allows."""
    kind = rng.randrange(8)
    good = json.dumps(GOOD).encode()
    if kind == 0:  # cut short
        return good[: rng.randrange(len(good))]
    if kind == 1:  # bytes that are no UTF-8, within a text
        return good.replace(b"hello", bytes([0xC3, 0x28, rng.randrange(0x80, 0xFF)]))
    if kind == 2:
        return rng.randbytes(rng.randrange(1, 300))
    if kind == 3:  # nested beyond any stack
        depth = rng.choice([100, 1_000, 50_000])
        return b'{"model":"tiny","messages":' + b"[" * depth + b"]" * rng.choice([0, depth]) + b"}"
    if kind == 4:  # JSON, but no object
        return json.dumps(rng.choice([junk for junk in JUNK if not isinstance(junk, dict)])).encode()
    if kind == 5:  # a required field is of another kind
        field, bad = rng.choice([("model", [-1, [], {}, 1.5, True]), ("messages", [-1, "x", {}, [3], [[]], None])])
        return json.dumps({**GOOD, field: rng.choice(bad)}).encode()
    if kind == 6:  # an optional one is
        field = rng.choice(["temperature", "max_tokens", "n", "seed", "top_p", "stop_token_ids", "logit_bias"])
        return json.dumps({**GOOD, field: rng.choice(["x", {"a": []}, [[]], "\u0000", {"1": "y"}])}).encode()
    missing = {key: value for key, value in GOOD.items() if key != "messages"}
    return json.dumps(missing).encode() + rng.choice([b"", b"}", b"\x00", b",", b"//"])


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> int:
    """Post one body over a connection that stays open; the status of a well-formed error."""
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
    answer = await reader.readexactly(int(lines["content-length"]))
    assert json.loads(answer)["error"]["message"]
    return int(head.split()[1])


async def test_a_thousand_malformed_bodies_get_4xx_and_harm_nobody(
    fast: Deployment, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    pids = {process.name: process.pid for process in fast.state.processes}
    before = samples((await http.get("/metrics")).text)
    rng = random.Random(20)
    bodies = [malformed(rng) for _ in range(1000)]
    statuses: list[int] = []

    async def one_client(number: int) -> None:
        async with connected(fast.urls[0]) as (reader, writer):
            for i, body in enumerate(bodies[number::20]):
                path = CHAT if (number + i) % 3 else "/v1/completions"
                statuses.append(await exchange(reader, writer, path, body))

    async def somebody_else() -> None:
        for _ in range(20):
            answer = await http.post(CHAT, json=GOOD)
            assert answer.json()["choices"][0]["message"]["content"] == oracle.answer(GOOD, 3)

    async with asyncio.timeout(30):
        await asyncio.gather(somebody_else(), *(one_client(number) for number in range(20)))
    assert len(statuses) == 1000
    assert {status // 100 for status in statuses} == {4}
    after = samples((await http.get("/metrics")).text)
    counted = 'penstock_gateway_requests_total{api="http",code="invalid_request"}'
    refused = sum(
        value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith("penstock_gateway_requests_total") and 'code="ok"' not in name
    )
    assert refused == 1000
    assert after[counted] - before.get(counted, 0.0) > 900
    assert {process.name: process.pid for process in fast.state.processes} == pids
    assert "Traceback" not in fast.logs("gateway")


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["no HTTP", "negative length", "two lengths", "bad chunk"],
)
async def test_bytes_that_are_no_http_are_answered_with_4xx(fast: Deployment, raw: bytes) -> None:
    async with asyncio.timeout(10), connected(fast.urls[0]) as (reader, writer):
        writer.write(raw)
        answer = await reader.read(1 << 16)
    assert answer.startswith(b"HTTP/1.1 4")
