"""LoRA adapters through the whole pipeline: the native engine, the demo model, and workers that are killed."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.model import modeldir
from tests.adapters import greedy, merged, write_adapter
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, http_of, ok, until

PROMPT = "The harbour of the town is where the boats of the fishermen come home in the evening, and then they tell"
COUNT, LONG = 12, 80
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of adapters: two at start, and two more further down."""
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poet", "clerk", "later/second", "later/third")):
        write_adapter(made / name, modeldir.DEMO, seed=seed + 1, rank=4, strength=0.6, targets=("q_proj", "down_proj"))
    return made


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment, folder: Path) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--workers", "2", "--threads", "1", "--block-size", "8", "--lora-folder", str(folder)),
        *("--max-loras", "2", "--runtime-lora-updating"),
    )


http = http_of("deployment")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """By the folder of an adapter, "" for none: what the demo model answers with it merged into its weights."""
    prompt = modeldir.load(modeldir.DEMO).tokenizer.encode(PROMPT).ids
    return {
        name: greedy(merged(modeldir.DEMO, folder / name if name else None), prompt, COUNT)
        for name in ("", "poet", "clerk", "later/second", "later/third")
    }


def body(model: str, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": PROMPT, **fixed, **more}


async def answered(http: httpx.AsyncClient, model: str, **more: Any) -> tuple[list[int], Any]:
    """The tokens, and the whole answer."""
    answer = await ok(http.post("/v1/completions", json=body(model, **more)))
    found = answer.json()
    return found["choices"][0]["token_ids"], found


async def change(http: httpx.AsyncClient, what: str, name: str, path: str = "", **more: Any) -> httpx.Response:
    asked = {"lora_name": name, **({"lora_path": path} if path else {}), **more}
    return await http.post(f"/v1/{what}_lora_adapter", json=asked)


async def models(http: httpx.AsyncClient) -> dict[str, tuple[str, str | None]]:
    """Root and parent by name."""
    return {each["id"]: (each["root"], each["parent"]) for each in (await http.get("/v1/models")).json()["data"]}


def pids(deployment: Deployment) -> dict[str, int]:
    """Of its workers."""
    return {process.name: process.pid for process in deployment.state.processes if process.role == "worker"}


async def back(deployment: Deployment, http: httpx.AsyncClient, before: dict[str, int]) -> bool:
    """Whether workers run again that were killed, and all are ready.

    Args:
        before: those that were killed, and their process ids then.
    """
    listed = (await http.get("/health")).json()["components"]
    ready = [each for each in listed if each.get("role") == "aggregated" and each["ready"]]
    now = pids(deployment)
    return len(ready) == len(now) and all(now[name] not in (0, pid) for name, pid in before.items())


async def test_adapters_and_the_model_at_once_answer_as_with_merged_weights(
    http: httpx.AsyncClient, expected: dict[str, list[int]]
) -> None:
    assert len({tuple(each) for each in expected.values()}) == len(expected)
    names = ["demo", "poet", "clerk"] * 2
    answers = await asyncio.gather(*(answered(http, name) for name in names))
    for name, (tokens, whole) in zip(names, answers, strict=True):
        assert tokens == expected["" if name == "demo" else name], name
        assert whole["model"] == name

    async def counted() -> dict[str, int]:
        page = (await http.get("/v1/usage", params={"group_by": "model,adapter", "bucket_width": "1mo"})).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        assert {each["model"] for each in results} <= {"demo"}
        found = {each["adapter"] or "": each["output_tokens"] for each in results}
        return found if sum(found.values()) >= 6 * COUNT else {}

    used = await until(counted, "what each adapter used is counted")
    assert used == {"": 2 * COUNT, "poet": 2 * COUNT, "clerk": 2 * COUNT}


async def test_they_are_listed_as_vllm_lists_them_and_chosen_by_every_api(http: httpx.AsyncClient) -> None:
    assert await models(http) == {"demo": ("demo", None), "clerk": ("clerk", "demo"), "poet": ("poet", "demo")}
    one = (await http.get("/v1/models/poet")).json()
    assert (one["id"], one["parent"]) == ("poet", "demo")
    messages = [{"role": "user", "content": "Hello"}]
    for path, more in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
        ("/api/chat", {"messages": messages, "stream": False}),
    ):
        answer = await http.post(path, json={"model": "poet", **more})
        assert (answer.status_code, answer.json().get("model")) == (200, "poet"), answer.text


async def test_an_unknown_name_gets_404_with_what_there_is(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=body("painter"))
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "model 'painter' is not served here; served: 'demo', 'clerk', 'poet'"


async def test_caches_of_adapters_never_mix(http: httpx.AsyncClient, expected: dict[str, list[int]]) -> None:
    """On one worker, whose cache has the prompt for each of them afterwards."""
    worker = (await http.get("/health")).json()["components"]
    name = next(each["name"] for each in worker if each.get("role") == "aggregated")
    for _ in range(2):
        for model in ("demo", "poet", "clerk"):
            tokens, whole = await answered(http, model, worker=name, cache_salt="mixed")
            assert tokens == expected["" if model == "demo" else model], (model, whole["usage"])
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (whole["usage"]["prompt_tokens"] - 1) // 8 * 8, "the second round came from the cache"


async def test_inspect_shows_the_adapter_and_its_revision(
    deployment: Deployment, http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = await answered(http, "poet")
    assert await asyncio.to_thread(main, ["inspect", "--data-dir", str(deployment.data_dir), whole["id"]]) == 0
    assert ", adapter poet@" in capsys.readouterr().out


async def test_one_is_loaded_replaced_and_unloaded_in_all_workers_and_outlives_them(
    deployment: Deployment, http: httpx.AsyncClient, expected: dict[str, list[int]]
) -> None:
    answer = await change(http, "load", "extra", "later/second")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'extra' added successfully.")
    assert (await models(http))["extra"] == ("later/second", "demo")
    assert (await change(http, "load", "extra", "later/second")).status_code == 400
    answers = await asyncio.gather(*(answered(http, "extra", cache_salt=str(each)) for each in range(4)))
    assert [tokens for tokens, _ in answers] == [expected["later/second"]] * 4

    answer = await change(http, "load", "extra", "later/third", load_inplace=True)
    assert answer.status_code == 200, answer.text
    answers = await asyncio.gather(*(answered(http, "extra") for _ in range(4)))
    assert [tokens for tokens, _ in answers] == [expected["later/third"]] * 4

    for pid in (before := pids(deployment)).values():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: back(deployment, http, before), "both workers are back", 60)
    assert (await models(http))["extra"] == ("later/third", "demo")
    assert (await answered(http, "extra"))[0] == expected["later/third"]

    answer = await change(http, "unload", "extra")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'extra' removed successfully.")
    assert (await http.post("/v1/completions", json=body("extra"))).status_code == 404
    assert (await change(http, "unload", "extra")).status_code == 404


@pytest.mark.slow  # demo/test_demo_model has it without an adapter
async def test_an_answer_continues_with_its_adapter_when_its_worker_is_killed(
    deployment: Deployment, http: httpx.AsyncClient, folder: Path
) -> None:
    prompt = modeldir.load(modeldir.DEMO).tokenizer.encode(PROMPT).ids
    wanted = await asyncio.to_thread(greedy, merged(modeldir.DEMO, folder / "poet"), prompt, LONG)
    before, killed, found = pids(deployment), dict[str, int](), list[int]()
    asked = body("poet", max_tokens=LONG, stream=True, cache_salt="killed")
    async with http.stream("POST", "/v1/completions", json=asked) as stream:
        request = stream.headers["x-request-id"]
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                found += event["choices"][0].get("token_ids") or []
                if len(found) > 5 and not killed:
                    worker = (await http.get(f"/v1/requests/{request}")).json().get("worker", "")
                    name = next((each for each in before if worker.startswith(each)), "")
                    if name and not killed:
                        killed[name] = before[name]
                        os.kill(before[name], signal.SIGKILL)
    assert killed, "no worker was killed"
    assert found == wanted
    await until(lambda: back(deployment, http, killed), "the worker is back", 60)


@pytest.mark.parametrize("path", ["../poet", "/etc", "later/../../outside", "nothing"])
async def test_only_folders_that_workers_allow_are_loaded(http: httpx.AsyncClient, path: str) -> None:
    answer = await change(http, "load", "evil", path)
    assert answer.status_code == 400
    reason = "has no adapter_config.json" if path == "nothing" else "is not within the worker's --lora-folder"
    assert reason in answer.json()["error"]["message"]
    assert "evil" not in await models(http)


async def test_one_that_is_unloaded_in_mid_answer_ends_it_in_good_order(
    http: httpx.AsyncClient, expected: dict[str, list[int]]
) -> None:
    assert (await change(http, "load", "brief", "later/second")).status_code == 200
    began = asyncio.Event()

    async def whole() -> int:
        async with http.stream("POST", "/v1/completions", json=body("brief", max_tokens=300, stream=True)) as stream:
            events = 0
            async for line in stream.aiter_lines():
                events += line.startswith("data: {")
                began.set()
            assert line or events
        return events

    running = asyncio.create_task(whole())
    await began.wait()
    assert (await change(http, "unload", "brief")).status_code == 200
    assert await running > 50


@pytest.mark.slow
async def test_prefill_and_decode_workers_hand_over_the_blocks_of_adapters(
    new_deployment: NewDeployment, folder: Path, expected: dict[str, list[int]]
) -> None:
    apart = new_deployment(
        *("--engine", "native", "--prefill", "1", "--decode", "1", "--threads", "1", "--block-size", "8"),
        *("--local-prefill-tokens", "0", "--lora-folder", str(folder)),
    )
    async with httpx.AsyncClient(base_url=apart.urls[0], trust_env=False, timeout=60) as http:
        for model in ("demo", "poet", "clerk", "poet"):
            tokens, whole = await answered(http, model)
            assert tokens == expected["" if model == "demo" else model]
            status = (await http.get(f"/v1/requests/{whole['id']}")).json()
            assert status["worker"].startswith("decode"), status
