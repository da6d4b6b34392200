"""Ollama's API against the whole pipeline: what its clients ask, and what they get."""

import json
from typing import Any

import httpx

from tests.pipeline.support import Oracle

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the name of the river?"}],
    "options": {"temperature": 0, "num_predict": 12, "num_ctx": 2048},
}


def as_chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": CHAT["messages"], "temperature": 0, "max_tokens": 12, **more}


async def test_a_chat_is_streamed_as_lines_unless_that_is_refused(http: httpx.AsyncClient, oracle: Oracle) -> None:
    streamed = await http.post("/api/chat", json=CHAT)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert streamed.headers["x-penstock-ignored-options"] == "options.num_ctx"
    *pieces, last = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(each["message"]["content"] for each in pieces) == oracle.answer(as_chat(), 12)
    assert len(pieces) == 12
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 12)
    assert last["prompt_eval_count"] == len(oracle.prompt(as_chat()))
    whole = (await http.post("/api/chat", json={**CHAT, "stream": False})).json()
    assert whole["message"]["content"] == oracle.answer(as_chat(), 12)
    assert whole["total_duration"] >= whole["eval_duration"]
    status = (await http.get(f"/v1/requests/{streamed.headers['x-request-id']}")).json()
    assert (status["state"], status["result"]["message"]) == ("done", whole["message"])
    again = await http.get(f"/v1/requests/{streamed.headers['x-request-id']}/stream")
    assert again.headers["content-type"] == "application/x-ndjson"
    assert json.loads(again.text.splitlines()[-1])["eval_count"] == 12


async def test_a_prompt_is_answered_as_the_chat_that_it_is(http: httpx.AsyncClient, oracle: Oracle) -> None:
    body = {"model": "other:latest", "prompt": CHAT["messages"][0]["content"], "options": CHAT["options"]}
    whole = (await http.post("/api/generate", json={**body, "stream": False})).json()
    assert whole["response"] == oracle.answer(as_chat(), 12)
    streamed = (await http.post("/api/generate", json=body)).text.splitlines()
    assert "".join(json.loads(line)["response"] for line in streamed) == whole["response"]


async def test_clients_learn_which_models_there_are_and_what_they_can_do(http: httpx.AsyncClient) -> None:
    tags = (await http.get("/api/tags")).json()["models"]
    assert [each["model"] for each in tags] == ["tiny", "other"]
    assert len({each["digest"] for each in tags}) == 1, "both names are of one model"
    assert [each["name"] for each in (await http.get("/api/ps")).json()["models"]] == ["tiny", "other"]
    for name in ({"model": "tiny"}, {"name": "other:latest"}):
        shown = (await http.post("/api/show", json=name)).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 131_072
        assert "completion" in shown["capabilities"]
        assert "<|im_start|>" in shown["template"]
    assert int((await http.get("/api/version")).json()["version"].split(".")[1]) >= 7  # older ones are refused


async def test_a_body_that_asks_nothing_says_whether_the_model_is_there(http: httpx.AsyncClient) -> None:
    loaded = (await http.post("/api/generate", json={"model": "tiny"})).json()
    assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")
    left = (await http.post("/api/chat", json={"model": "tiny:latest", "messages": [], "keep_alive": 0})).json()
    assert (left["done_reason"], left["message"]["content"]) == ("unload", "")
    assert (await http.post("/api/chat", json={"model": "nobody"})).status_code == 404


async def test_errors_have_ollamas_form(http: httpx.AsyncClient) -> None:
    for status, path, body, named in (
        (404, "/api/chat", {**CHAT, "model": "nobody"}, "nobody"),
        (400, "/api/chat", {**CHAT, "options": {"temperature": 9}}, "options.temperature"),
        (400, "/api/generate", {"model": "tiny", "prompt": "x", "raw": True}, "/v1/completions"),
        (404, "/api/show", {"model": "nobody"}, "nobody"),
        (400, "/api/show", {}, "model"),
        (404, "/api/pull", {"model": "x"}, "penstock up --model"),
        (404, "/api/embed", {"model": "nobody", "input": "x"}, "nobody"),
        (400, "/api/embeddings", {"model": "tiny"}, "prompt"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, set(answer.json())) == (status, {"error"}), path
        assert named in answer.json()["error"]
    assert (await http.get("/api/chat")).json()["error"].startswith("/api/chat does not support GET")
