"""A prefill and a decode worker on the real SGLang behind the whole pipeline, on one GPU or two.

python -m tests.gpu.sglang [--model demo] [--gpus none] [--arguments JSON] [--burst 8]

Greedy answers are compared with those of `transformers` for the same tokens. Then: a prompt that was there before, a
JSON schema, a client that leaves, and a prefill worker killed while answers run. Its speed: `tests.gpu.pipeline`.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model import modeldir
from penstock.launch.state import read_state
from penstock.schemas.wire import unpack_tokens
from tests.chaos.log import held, open_leases, until_none
from tests.gpu.answers import QUESTIONS
from tests.gpu.disaggregated import ready, stop
from tests.gpu.killed import Deployed, Watch, workers
from tests.gpu.pipeline import SGLANG, penstock, report
from tests.pipeline.support import ending, metrics, until

ANSWER = 32
TURNS = (0, 1, 2, 4, 8, 16)
IDLE_S = 20.0
CHECK_S = 120.0  # a killed worker is back after 35 s
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def noise(number: int, length: int) -> list[int]:
    return [(7 + 31 * number + at * at * 13 + at * 5) % 1200 for at in range(length)]


def prompts_of(model: modeldir.ModelDir) -> list[list[int]]:
    """Conversations with more and more turns before the last question: what the demo model was made for."""
    assert model.template is not None
    made = []
    for turns in TURNS:
        said = [{"role": role, "content": text} for at in range(turns) for role, text in
                (("user", QUESTIONS[at % 3]), ("assistant", f"That is {at}."))]  # fmt: skip
        text = model.template.render([*said, {"role": "user", "content": QUESTIONS[turns % 3]}], None)
        made.append(list(model.tokenizer.encode(text, add_special_tokens=False).ids))
    return made


def expected(path: Path, prompts: list[list[int]], ends: Collection[int]) -> tuple[list[list[int]], list[float]]:
    """Greedy answers of `transformers` in full precision, and by how much the least certain token led the second."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    answers, margins = [], []
    for tokens in prompts:
        said, ahead = list(tokens), float("inf")
        while len(said) < len(tokens) + ANSWER and said[-1] not in ends:
            with torch.no_grad():
                logits = model(torch.tensor([said], device=device)).logits[0, -1]
            best = logits.topk(2)
            ahead = min(ahead, float(best.values[0] - best.values[1]))
            said.append(int(best.indices[0]))
        answers.append([token for token in said[len(tokens) :] if token not in ends])
        margins.append(ahead)
    return answers, margins


def up(asked: argparse.Namespace, data: Path) -> subprocess.Popen[bytes]:
    arguments = SGLANG | json.loads(asked.arguments)
    log = data / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            penstock("up", "--engine", "sglang", "--model", asked.model, "--data-dir", data / "penstock",
                     "--http-port", 0, "--prefill", 1, "--decode", 1, "--gpus", asked.gpus, "--max-running", 16,
                     "--kv-blocks", 1024, "--max-model-len", 2048, "--handoff-lease-s", 20, "--ready-s", asked.ready_s,
                     "--log-format", "json", "--drain-s", 3, "--override-engine-args", json.dumps(arguments)),
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    ready(process, log, "prefill and decode")
    return process


async def answer(made: Deployed, tokens: list[int], **more: Any) -> tuple[list[int], Any, float]:
    """A streamed answer's tokens, its terminal event, and when its first text came, in s."""
    body = {"model": made.state.model, "prompt": tokens, "max_tokens": ANSWER, "temperature": 0}
    began, first = time.perf_counter(), 0.0
    async with made.http.stream("POST", "/v1/completions", json=body | {"stream": True} | more) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    _, done = await ending(made.bus, response.headers["x-request-id"])
    assert not done.code, f"{done.code}: {done.message}"
    return list(unpack_tokens(done.choices[0].tokens)), done, first


async def greedy(made: Deployed, prompts: list[list[int]], wanted: list[list[int]], margins: list[float]) -> None:
    found = [await answer(made, tokens) for tokens in prompts]
    together = await asyncio.gather(*(answer(made, tokens) for tokens in prompts))
    for title, answers in (("one by one", found), ("at once", list(together))):
        same = [one == each[0][: len(one)] for one, each in zip(wanted, answers, strict=True)]
        close = [f"{margin:.2g}" for margin, equal in zip(margins, same, strict=True) if not equal]
        row(f"greedy, streamed, {title}", f"{sum(same)} of {len(same)} as transformers"
            + (f"; the others were this close: {', '.join(close)}" if close else "")
            + f"; first text after {', '.join(f'{each[2] * 1e3:.0f}' for each in answers)} ms")  # fmt: skip
    first, again = found[-1][1].usage.cached, together[-1][1].usage.cached
    row("the same prompt again", f"{first}, then {again} of {len(prompts[-1])} tokens from the cache")


async def known(made: Deployed, number: int) -> None:
    """What the router knows of a prefix, from the prefill worker's KV events, when its prompt comes once more."""
    tokens = noise(number, 300)
    (page,) = [process.metrics_url for process in made.state.processes if process.role == "router"]
    before = await index_blocks(page)
    _, first, _ = await answer(made, tokens)

    async def more() -> float:
        return await index_blocks(page) - before

    await until(more, "the prompt's blocks in the router's index", 10)
    _, again, _ = await answer(made, tokens)
    timeline, _ = await ending(made.bus, again.request)
    counted = {each.role: each.overlap_blocks for each in timeline.routed[0].decision.candidates}
    cached = f"{first.usage.cached}, then {again.usage.cached} of {len(tokens)} tokens"
    row("KV events", f"{await more():.0f} blocks more in the router's index; when the prompt came again it counted "
        f"{counted}; from the cache: {cached}")  # fmt: skip
    assert counted["prefill"] > 0


async def index_blocks(page: str) -> float:
    return (await metrics(page.removesuffix("/metrics")))["penstock_router_index_blocks"]


async def schema(made: Deployed) -> None:
    body = {
        "model": made.state.model, "messages": [{"role": "user", "content": "Name a harbour."}], "max_tokens": 200,
        "temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    }  # fmt: skip
    found = await made.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    text = found.json()["choices"][0]["message"]["content"]
    made_of = json.loads(text)
    assert set(made_of) == {"name", "count"}, text
    assert isinstance(made_of["count"], int), text
    row("JSON schema", text)


async def cancelled(made: Deployed) -> None:
    body = {"model": made.state.model, "prompt": noise(77, 200), "max_tokens": 1500, "ignore_eos": True}
    async with made.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                break
    left = time.perf_counter()
    _, done = await ending(made.bus, response.headers["x-request-id"])
    took = time.perf_counter() - left
    still = await until_none(lambda: held(made.bus), IDLE_S)
    tokens = sum(len(unpack_tokens(each.tokens)) for each in done.choices)
    ended = f"ended as {done.code or 'finished'} after {took * 1e3:.0f} ms, {tokens} tokens"
    row("the client leaves", f"{ended}; held: {still or 'nothing'}")


async def kill(made: Deployed, asked: argparse.Namespace, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """Long answers run while the prefill worker dies, and new requests come."""
    pids = await workers(made)
    began = time.perf_counter()
    first = [
        asyncio.create_task(answer(made, tokens, max_tokens=600, ignore_eos=True)) for tokens in prompts[: asked.burst]
    ]
    await asyncio.sleep(0.3)
    os.kill(pids["prefill"], signal.SIGKILL)
    second = [asyncio.create_task(answer(made, tokens)) for tokens in prompts[: asked.burst]]
    ended = await asyncio.gather(*first, *second)
    took = time.perf_counter() - began
    same = [found[0][: len(one)] == one for found, one in zip(ended, 2 * wanted[: asked.burst], strict=True)]
    left = {
        "leases": await until_none(lambda: open_leases(made.bus), IDLE_S),
        "held": await until_none(lambda: held(made.bus), IDLE_S),
    }
    row("the prefill worker is killed", f"{len(ended)} requests answered in {took:.1f} s, {sum(same)} as before; "
        f"attempts {sorted({found[1].attempt for found in ended})}; left: {left}")  # fmt: skip


def row(what: str, found: str) -> None:
    print(f"| {what} | {found} |", flush=True)


async def checks(asked: argparse.Namespace, path: Path, data: Path) -> int:
    """How many failed."""
    model = modeldir.load(path)
    prompts = prompts_of(model)
    wanted, margins = await asyncio.to_thread(expected, path, prompts, model.eos_token_ids)
    state = read_state(data / "penstock" / "state.json")
    bus: Bus = await connect(state.nats_url, role="operator", name="sglang")
    async with httpx.AsyncClient(base_url=state.http_url, trust_env=False, timeout=90) as http:
        made = Deployed(data / "penstock" / "state.json", bus, http, Watch())
        failed, began = 0, time.perf_counter()
        await answer(made, noise(99, 40), max_tokens=4)
        row("first answer", f"{time.perf_counter() - began:.2f} s")
        for check in (
            greedy(made, prompts, wanted, margins),
            known(made, 55),
            schema(made),
            cancelled(made),
            kill(made, asked, prompts, wanted),
            known(made, 56),
        ):
            try:
                async with asyncio.timeout(CHECK_S):
                    await check
            except (Exception, TimeoutError) as error:  # the other rows are worth having
                failed += 1
                row(getattr(check, "__name__", "?"), f"FAILED: {error!r:.400}")
    await bus.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--gpus", default="none", help="none: both workers on the first one")
    parser.add_argument("--arguments", default="{}", help="of the engine, as JSON")
    parser.add_argument("--burst", type=int, default=6)
    parser.add_argument("--ready-s", type=int, default=150)
    parser.add_argument("--logs", type=Path, help="where the logs are copied")
    asked = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="sglang-"))
    process = None
    try:
        process = up(asked, data)
        print("| | |\n|---|---|")
        if failed := asyncio.run(checks(asked, modeldir.resolve(asked.model), data)):
            raise SystemExit(f"{failed} checks failed")
    finally:
        if process is not None:
            stop(process)
        report(data)
        if asked.logs:
            shutil.copytree(data / "penstock" / "logs", asked.logs, dirs_exist_ok=True)
            shutil.copy(data / "up.log", asked.logs)
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
