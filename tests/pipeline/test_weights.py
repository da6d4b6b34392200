"""Weights that change while workers run, through the whole pipeline: the native engine and the demo model."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.cli.commands import main
from penstock.client import PenstockError
from penstock.client.weights import send_weights
from penstock.infra.model import modeldir
from tests import standins
from tests.adapters import other_weights
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import ROOT, Deployment, ok, until

PROMPT = "The harbour of the town is where the boats of the fishermen come home in the evening, and then they tell"
COUNT, LONG = 8, 100
KEY = "an-operator-s-own-key"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of weights, as a trainer writes them: one folder a step."""
    made = tmp_path_factory.mktemp("weights")
    for seed in (1, 2, 3):
        other_weights(modeldir.DEMO, made / f"step-{seed}", seed=seed, noise=0.02)
    return made


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment, folder: Path, staging: Path) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--workers", "2", "--threads", "1", "--block-size", "8", "--api-key", KEY),
        *("--weights-folder", str(folder), "--weights-staging", str(staging)),
    )


@pytest.fixture
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=deployment.urls[0], headers=headers, trust_env=False, timeout=90) as made:
        yield made


class Trained:
    """What ``transformers`` computes with a folder's weights."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.revision = modeldir.revision(folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        known = self._known.get(tuple(tokens), [])
        if len(known) < count:
            exactly = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}
            with torch.inference_mode():
                made = self._model.generate(torch.tensor([tokens]), **exactly)
            known = self._known[tuple(tokens)] = made[0, len(tokens) :].tolist()
        return known[:count]

    def logprobs(self, before: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            values = self._model(torch.tensor([before + tokens])).logits[0].log_softmax(-1)
        return values[len(before) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]

    async def send(self, deployment: Deployment, **more: Any) -> Any:
        """As a trainer does: its own modules' tensors."""
        given = {"api_key": KEY, "backend": "gloo", "bucket_bytes": 1 << 20} | more
        tensors = given.pop("tensors", self._model.state_dict())
        return await asyncio.to_thread(send_weights, deployment.urls[0], tensors, **given)


@pytest.fixture(scope="module")
def steps(folder: Path) -> Iterator[dict[str, Trained]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {"": Trained(modeldir.DEMO)} | {f"step-{seed}": Trained(folder / f"step-{seed}") for seed in (1, 2, 3)}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return modeldir.load(modeldir.DEMO).tokenizer.encode(PROMPT).ids


def body(count: int = COUNT, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    return {"model": "demo", "prompt": PROMPT, **fixed, **more}


async def answered(http: httpx.AsyncClient, **more: Any) -> tuple[list[int], Any]:
    """The tokens, and the whole answer."""
    answer = await ok(http.post("/v1/completions", json=body(**more)))
    found = answer.json()
    return found["choices"][0]["token_ids"], found


async def change(http: httpx.AsyncClient, what: str, **asked: Any) -> Any:
    return (await ok(http.post(f"/v1/admin/{what}", json=asked))).json()


class Stream:
    """An answer that is read in the background."""

    def __init__(self, http: httpx.AsyncClient, **more: Any) -> None:
        self.tokens: list[int] = []
        self.id = ""
        self._http, self._asked = http, body(**{"count": LONG, "stream": True} | more)
        self._some = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> list[int]:
        async with self._http.stream("POST", "/v1/completions", json=self._asked) as stream:
            assert stream.status_code == 200
            self.id = stream.headers["x-request-id"]
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.tokens += choice.get("token_ids") or []
                    if len(self.tokens) > 3:
                        self._some.set()
        return self.tokens

    async def begun(self) -> None:
        await asyncio.wait_for(self._some.wait(), 30)


def pids(deployment: Deployment) -> dict[str, int]:
    return {process.name: process.pid for process in deployment.state.processes if process.role == "worker"}


async def test_running_answers_end_on_the_old_weights_and_later_ones_begin_with_the_new(
    deployment: Deployment, http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    before = pids(deployment)
    old, new = steps[""], steps["step-1"]
    wanted = old.greedy(prompt, LONG)
    assert (await answered(http))[0] == wanted[:COUNT]
    streams = [Stream(http, cache_salt=str(each)) for each in range(4)]
    await asyncio.gather(*(each.begun() for each in streams))
    updating = asyncio.create_task(change(http, "update_weights", path="step-1"))
    late = [asyncio.create_task(answered(http, cache_salt=f"late {each}")) for each in range(4)]
    assert [await each.task for each in streams] == [wanted] * 4
    told = await updating
    assert (told["revision"], told["update"], told["paused"]) == (new.revision, 1, False)
    assert [(each["revision"], each["update"]) for each in told["workers"]] == [(new.revision, 1)] * 2
    for tokens, _ in await asyncio.gather(*late):
        assert tokens in (old.greedy(prompt, COUNT), new.greedy(prompt, COUNT)), "of one revision"
    tokens, whole = await answered(http)
    assert tokens == new.greedy(prompt, COUNT)
    assert not (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"), "old blocks never match"
    tokens, whole = await answered(http)
    assert tokens == new.greedy(prompt, COUNT)
    assert pids(deployment) == before, "no worker was restarted"


async def test_running_answers_continue_with_the_new_weights_if_asked_and_their_records_say_where(
    deployment: Deployment,
    http: httpx.AsyncClient,
    steps: dict[str, Trained],
    prompt: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    await change(http, "update_weights", path="step-1")
    old, new = steps["step-1"], steps["step-2"]
    streams = [Stream(http, cache_salt=str(each)) for each in range(3)]
    await asyncio.gather(*(each.begun() for each in streams))
    await change(http, "pause", running="continue")
    assert (await change(http, "update_weights", path="step-2", running="continue"))["paused"]
    assert not any(each.task.done() for each in streams)
    await change(http, "resume")
    for stream in streams:
        tokens = await stream.task
        begins = old.greedy(prompt, LONG)
        cut = next(at for at in range(LONG) if tokens[at] != begins[at])
        assert 3 < cut < LONG
        assert tokens[cut:] == new.greedy(prompt + tokens[:cut], LONG - cut)
    assert await asyncio.to_thread(main, ["inspect", "--data-dir", str(deployment.data_dir), streams[0].id]) == 0
    shown = capsys.readouterr().out
    assert f"revision {new.revision}" in shown
    assert f"tokens from {old.revision}" in shown


async def test_a_paused_model_keeps_what_waits_and_what_stands_still_until_it_is_resumed(
    http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    await change(http, "update_weights", path="step-2")
    model = steps["step-2"]
    stream = Stream(http)
    await stream.begun()
    told = await change(http, "pause", running="continue")
    assert told["paused"]
    waiting = asyncio.create_task(answered(http))
    there = len(stream.tokens)
    await change(http, "pause", running="continue")  # again: nothing changes
    for _ in range(20):
        assert (await http.get("/health")).status_code == 200
    assert len(stream.tokens) - there <= 64, "at most what was on its way"
    assert not waiting.done()
    assert not stream.task.done()
    assert not (await change(http, "resume"))["paused"]
    assert await stream.task == model.greedy(prompt, LONG)
    assert (await waiting)[0] == model.greedy(prompt, COUNT)


@pytest.mark.parametrize("path", ["../step-1", "/etc", "nothing"])
async def test_weights_that_cannot_be_used_are_refused_and_the_present_ones_serve_on(
    http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int], path: str
) -> None:
    before = (await change(http, "update_weights", path="step-3"))["revision"]
    answer = await http.post("/v1/admin/update_weights", json={"path": path})
    assert answer.status_code == 400
    reason = "there is no model in" if path == "nothing" else "is not within --weights-folder"
    assert reason in answer.json()["error"]["message"]
    told = await change(http, "resume")
    assert {each["revision"] for each in told["workers"]} == {before}
    assert (await answered(http))[0] == steps["step-3"].greedy(prompt, COUNT)


async def test_log_probabilities_of_drawn_tokens_are_those_of_a_forward_pass(
    http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    """Also behind an update, whatever the temperature is."""
    await change(http, "update_weights", path="step-1")
    asked = {"count": 40, "temperature": 0.7, "seed": 5, "logprobs": 0}
    tokens, whole = await answered(http, **asked)
    found = torch.tensor(whole["choices"][0]["logprobs"]["token_logprobs"])
    difference = (found - steps["step-1"].logprobs(prompt, tokens)).abs()
    assert (len(tokens), len(found)) == (40, 40)
    assert float(difference.max()) < 1e-3


def received(staging: Path) -> list[str]:
    return sorted(str(each.relative_to(staging)) for each in staging.glob("*/*"))


async def test_tensors_of_a_trainer_are_received_by_all_workers_while_they_answer(
    deployment: Deployment, http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int], staging: Path
) -> None:
    await change(http, "update_weights", path="step-1")
    streams = [Stream(http, cache_salt=str(each)) for each in range(4)]
    await asyncio.gather(*(each.begun() for each in streams))
    told = await steps["step-2"].send(deployment)
    assert [await each.task for each in streams] == [steps["step-1"].greedy(prompt, LONG)] * 4
    assert len({(each["revision"], each["update"]) for each in told["workers"]}) == 1
    assert told["revision"] not in {each.revision for each in steps.values()}
    asked = {"count": 40, "temperature": 0.7, "seed": 5, "logprobs": 0}
    for salt in range(4):
        tokens, whole = await answered(http, cache_salt=f"sent {salt}", **asked)
        found = torch.tensor(whole["choices"][0]["logprobs"]["token_logprobs"])
        assert float((found - steps["step-2"].logprobs(prompt, tokens)).abs().max()) < 1e-3
    assert not (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    assert received(staging) == [f"worker-{number}/{told['revision']}" for number in (0, 1)], (
        "nothing of earlier updates"
    )
    backend = "nixl" if find_spec("nixl_cu12") or find_spec("nixl_cu13") else "gloo"
    again = await steps["step-3"].send(deployment, dtype=torch.bfloat16, backend=backend)
    assert again["update"] == told["update"] + 1
    tokens, _ = await answered(http)
    assert tokens != steps["step-2"].greedy(prompt, COUNT)
    back = await change(http, "update_weights", path="step-1")
    assert back["revision"] == steps["step-1"].revision
    assert not received(staging)


async def test_tensors_that_do_not_fit_are_refused_by_name_and_change_nothing(
    deployment: Deployment, http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    before = (await change(http, "update_weights", path="step-1"))["revision"]
    whole = Trained(modeldir.DEMO)._model.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    for tensors, reason in (
        ({key: each for key, each in whole.items() if key != name}, name),
        (whole | {name: whole[name][:-1]}, name),
        (whole | {name: torch.full_like(whole[name], float("nan"))}, "NaN or infinite"),
    ):
        with pytest.raises(PenstockError, match=reason):
            await steps["step-2"].send(deployment, tensors=tensors)
    with pytest.raises(PenstockError, match="CPU, which NCCL does not reach"):
        await steps["step-2"].send(deployment, backend="nccl")
    answer = await http.post("/v1/admin/update_weights", json={"from": "gloo"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "address")
    trainer = {"from": "gloo", "address": "127.0.0.1", "port": 1, "world_size": 2}
    answer = await http.post("/v1/admin/update_weights", json=trainer)
    assert "it is 3: the trainer, and 2 workers" in answer.json()["error"]["message"]
    assert {each["revision"] for each in (await change(http, "resume"))["workers"]} == {before}
    assert (await answered(http))[0] == steps["step-1"].greedy(prompt, COUNT)


DIES = """
import os, sys
from penstock.client import weights
from safetensors.torch import load_file

sent = 0
class Group:
    def __init__(self, group):
        self.group = group
    def broadcast(self, part, root):
        global sent
        sent += 1
        if sent == 3:
            os._exit(3)
        return self.group.broadcast(part, root)

made = weights._group
weights._group = lambda *args: Group(made(*args))
tensors = load_file(sys.argv[2] + "/model.safetensors")
weights.send_weights(sys.argv[1], tensors, api_key=sys.argv[3], backend="gloo", bucket_bytes=1 << 20)
"""


async def test_a_trainer_that_dies_in_mid_update_changes_nothing(
    deployment: Deployment, http: httpx.AsyncClient, folder: Path, steps: dict[str, Trained], prompt: list[int]
) -> None:
    before = await change(http, "update_weights", path="step-1")
    arguments = (sys.executable, "-c", DIES, deployment.urls[0], str(folder / "step-2"), KEY)
    trainer = await asyncio.create_subprocess_exec(*arguments)
    assert await trainer.wait() == 3
    told = await steps["step-3"].send(deployment)
    assert told["update"] > before["update"]
    assert "tensors of the trainer at" in deployment.logs("worker-0")
    assert (await answered(http))[0] == steps["step-3"].greedy(prompt, COUNT)


@pytest.mark.slow  # one that is killed in mid-update comes back below
async def test_a_worker_that_comes_back_has_the_tensors_or_waits_for_the_next(
    deployment: Deployment, http: httpx.AsyncClient, staging: Path, steps: dict[str, Trained], prompt: list[int]
) -> None:
    told = await steps["step-2"].send(deployment)
    for lost in (False, True):
        before = pids(deployment)
        if lost:
            shutil.rmtree(staging / "worker-0")
        os.kill(before["worker-0"], signal.SIGKILL)

        async def back(before: dict[str, int] = before, lost: bool = lost) -> bool:
            found = {each["worker"]: each for each in (await change(http, "resume"))["workers"]}
            mine = found.get("worker-0")
            return mine is not None and pids(deployment) != before and mine["paused"] == lost

        await until(back, "it is registered", 90)
        assert len(await revisions(http)) == 2
        assert (await revisions(http))["worker-1"] == told["revision"]
        answers = await asyncio.gather(*(answered(http, cache_salt=f"{lost} {each}") for each in range(4)))
        assert [tokens for tokens, _ in answers] == [steps["step-2"].greedy(prompt, COUNT)] * 4
    told = await steps["step-3"].send(deployment)
    assert [each["paused"] for each in told["workers"]] == [False, False]
    answers = await asyncio.gather(*(answered(http, cache_salt=str(each)) for each in range(4)))
    assert [tokens for tokens, _ in answers] == [steps["step-3"].greedy(prompt, COUNT)] * 4


async def test_workers_that_sleep_are_woken_by_a_request(
    http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    await change(http, "update_weights", path="step-1")
    wanted = steps["step-1"].greedy(prompt, COUNT)
    await answered(http)
    told = await change(http, "sleep")
    assert [each["asleep"] for each in told["workers"]] == [True, True]
    tokens, whole = await answered(http)
    assert tokens == wanted
    assert not (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"), "the cache went"
    awake = [not each["asleep"] for each in (await change(http, "resume"))["workers"]]
    assert awake.count(True) >= 1
    told = await change(http, "wake")
    assert [each["asleep"] for each in told["workers"]] == [False, False]
    assert [(await answered(http, cache_salt=str(each)))[0] for each in range(3)] == [wanted] * 3


async def test_the_command_changes_weights_and_shows_them(
    deployment: Deployment, steps: dict[str, Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    async def weights(*argv: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["weights", *argv, "--data-dir", str(deployment.data_dir), "--key", KEY])
        shown = capsys.readouterr()
        return status, " ".join((shown.out + shown.err).split())

    status, shown = await weights("update", "step-1")
    assert status == 0
    assert shown.count(steps["step-1"].revision) == 3, "the model's, and that of both workers"
    assert (await weights("pause"))[1].count("paused") == 2
    assert (await weights("resume"))[1].count("awake") == 2
    status, shown = await weights("sleep", "--worker", "worker-1")
    assert (status, shown.count("asleep"), shown.count("awake")) == (0, 1, 1)
    assert (await weights("wake"))[1].count("awake") == 2
    assert await weights("show") == (0, (await weights("resume"))[1])
    status, shown = await weights("update", "nothing")
    assert status == 1
    assert "there is no model in" in shown


async def test_only_operators_change_weights(deployment: Deployment) -> None:
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as anyone:
        for what in ("pause", "update_weights", "resume", "sleep", "wake"):
            assert (await anyone.post(f"/v1/admin/{what}", json={"path": "step-1"})).status_code == 401


async def revisions(http: httpx.AsyncClient) -> dict[str, str]:
    """By worker."""
    return {each["worker"]: each["revision"] for each in (await change(http, "resume"))["workers"]}


async def test_answers_of_a_worker_that_is_killed_in_mid_update_continue_and_it_comes_back_with_the_new_weights(
    deployment: Deployment, http: httpx.AsyncClient, steps: dict[str, Trained], prompt: list[int]
) -> None:
    await change(http, "update_weights", path="step-2")
    before = pids(deployment)
    pid = next(iter(before.values()))
    streams = [Stream(http, cache_salt=str(each)) for each in range(4)]
    await asyncio.gather(*(each.begun() for each in streams))
    os.kill(pid, signal.SIGSTOP)
    updating = asyncio.create_task(change(http, "update_weights", path="step-3", running="continue"))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    told = await updating
    assert {each["revision"] for each in told["workers"]} == {steps["step-3"].revision}
    for stream in streams:
        tokens = await stream.task
        begins = steps["step-2"].greedy(prompt, LONG)
        cut = next((at for at in range(LONG) if tokens[at] != begins[at]), LONG)
        assert tokens[cut:] == steps["step-3"].greedy(prompt + tokens[:cut], LONG - cut)

    async def both() -> bool:
        return await revisions(http) == dict.fromkeys(before, steps["step-3"].revision)

    await until(both, "the killed worker has the new weights", 90)


@pytest.mark.slow  # session/test_weights has what a folder must be
async def test_a_worker_that_missed_an_update_does_not_start_without_its_folder(
    deployment: Deployment, http: httpx.AsyncClient, folder: Path, steps: dict[str, Trained], prompt: list[int]
) -> None:
    await change(http, "update_weights", path="step-3")
    before = pids(deployment)
    name = next(iter(before))
    shutil.move(folder / "step-3", folder / "away")
    try:
        os.kill(before[name], signal.SIGKILL)

        async def refuses() -> bool:
            return "the weights that an operator asked for cannot be served" in deployment.logs(name)

        await until(refuses, "it does not start", 90)
        assert name not in await revisions(http)
        answers = await asyncio.gather(*(answered(http, cache_salt=str(each)) for each in range(4)))
        assert [tokens for tokens, _ in answers] == [steps["step-3"].greedy(prompt, COUNT)] * 4
    finally:
        shutil.move(folder / "away", folder / "step-3")


@pytest.mark.slow  # the contract of engines has both
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_workers_of_other_packages_change_their_weights_and_sleep_in_the_same_way(
    new_deployment: NewDeployment,
    folder: Path,
    tmp_path: Path,
    steps: dict[str, Trained],
    prompt: list[int],
    engine: str,
) -> None:
    """On their stand-ins, whose faults are those of the packages."""
    made = new_deployment(
        *("--engine", engine, "--model", "demo", "--workers", "2", "--threads", "1", "--max-running", "8"),
        *("--block-size", "32", "--max-model-len", "2048", "--gpus", "none", "--api-key", KEY),
        *("--weights-folder", str(folder), "--weights-staging", str(tmp_path), "--sleep-after-s", "3600"),
        PYTHONPATH=f"{standins.FOLDER}:{ROOT}",
        VLLM_STANDIN_PLATFORM="cuda",
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=made.urls[0], headers=headers, trust_env=False, timeout=60) as http:
        assert (await answered(http))[0] == steps[""].greedy(prompt, COUNT)
        streams = [Stream(http, cache_salt=str(each)) for each in range(3)]
        await asyncio.gather(*(each.begun() for each in streams))
        await change(http, "update_weights", path="step-1")
        for stream in streams:
            assert await stream.task == steps[""].greedy(prompt, LONG)
        for _ in range(2):
            tokens, whole = await answered(http)
            assert tokens == steps["step-1"].greedy(prompt, COUNT)
        streams = [Stream(http, cache_salt=str(each)) for each in range(3)]
        await asyncio.gather(*(each.begun() for each in streams))
        await change(http, "update_weights", path="step-2", running="continue")
        for stream in streams:
            tokens, begins = await stream.task, steps["step-1"].greedy(prompt, LONG)
            cut = next(at for at in range(LONG) if tokens[at] != begins[at])
            assert tokens[cut:] == steps["step-2"].greedy(prompt + tokens[:cut], LONG - cut)
        told = await change(http, "sleep")
        assert [each["asleep"] for each in told["workers"]] == [True, True]
        tokens, whole = await answered(http)
        assert tokens == steps["step-2"].greedy(prompt, COUNT)
        assert not (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"), "the cache went"
        await steps["step-3"].send(made)
        answers = await asyncio.gather(*(answered(http, cache_salt=str(each)) for each in range(3)))
        assert [tokens for tokens, _ in answers] == [steps["step-3"].greedy(prompt, COUNT)] * 3
        answer = await http.post("/v1/admin/update_weights", json={"path": "nothing"})
        assert answer.status_code == 400
        assert (await answered(http))[0] == steps["step-3"].greedy(prompt, COUNT)


@pytest.mark.slow  # session/test_weights has the turns
async def test_models_that_share_a_device_take_turns_as_requests_come(new_deployment: NewDeployment) -> None:
    shared = new_deployment(
        *("--mock-speedup", "0", "--model", "demo", "--model", "small=tiny", "--workers", "1", "--api-key", KEY),
        *("--share-device", f"test-{os.getpid()}"),
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=shared.urls[0], headers=headers, trust_env=False, timeout=60) as http:

        async def awake() -> list[str]:
            found = [await change(http, "resume", model=model) for model in ("demo", "small")]
            return [each["model"] for each in found for worker in each["workers"] if not worker["asleep"]]

        for model in ("demo", "small", "demo"):
            await ok(http.post("/v1/completions", json=body(model=model)))
            assert await awake() == [model]
        both = [http.post("/v1/completions", json=body(model=model)) for model in ("demo", "small") * 8]
        assert [each.status_code for each in await asyncio.gather(*both)] == [200] * 16
        assert len(await awake()) == 1


@pytest.mark.slow  # workers/engines/native/test_ranks has each rank's part
async def test_each_rank_of_a_split_model_has_its_part_of_a_trainers_tensors(
    new_deployment: NewDeployment, tmp_path: Path, steps: dict[str, Trained], prompt: list[int]
) -> None:
    split = new_deployment(
        *("--engine", "native", "--workers", "1", "--threads", "2", "--tensor-parallel-size", "2", "--api-key", KEY),
        *("--weights-staging", str(tmp_path)),
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=split.urls[0], headers=headers, trust_env=False, timeout=60) as http:
        assert (await answered(http))[0] == steps[""].greedy(prompt, COUNT)
        for step in ("step-1", "step-2"):
            await steps[step].send(split)
            assert (await answered(http))[0] == steps[step].greedy(prompt, COUNT)
        answer = await http.post("/v1/admin/sleep", json={})
        assert answer.status_code == 400
        assert "on another GPU" in answer.json()["error"]["message"]
