"""What the adapter and the pipeline cost on top of vLLM: a bare ``AsyncLLM`` loop, our engine on the same AsyncLLM, and
clients of a whole deployment, one after the other, on the bundled demo model.

``python -m tests.workers.engines.vllm.measure`` in an environment that has vLLM; no test.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from penstock.infra.model.modeldir import DEMO
from tests.pipeline.support import Deployment
from tests.workers.engines.contract import ALL, GREEDY, WORDS, Driver, ask

COUNTS = (1, 8)  # sequences at once
TOKENS = 128
REPEATS = 5
OPTIONS = {"max_running": 8, "max_model_len": 512, "block_size": 32, "threads": 1, "dtype": "float32"}
(SUBJECT,) = (subject for subject in ALL if subject.name == "vllm")


def prompts(count: int, round: int) -> list[list[int]]:
    return [list(WORDS[(round * 8 + number) * 3 :][:64]) for number in range(count)]


def bare(engine: Any, count: int, round: int) -> float:
    """Tokens per second of AsyncLLM alone, in its own loop."""
    llm, api = engine.runtime.llm, engine.runtime.api

    async def one(number: int, prompt: list[int]) -> None:
        params = api.sampling(
            max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=api.delta
        )
        results = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"bare-{count}-{round}-{number}"):
            results += len(output.outputs[0].token_ids)
        assert results == TOKENS

    async def every() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(count, round))))
        return count * TOKENS / (time.perf_counter() - began)

    found: float = engine.runtime.loop.run(every(), 300)
    return found


def adapter(engine: Any, count: int, round: int) -> float:
    """The same through our engine protocol."""
    driver = Driver(engine)
    began = time.perf_counter()
    asked = (ask(number, prompt, TOKENS, GREEDY) for number, prompt in enumerate(prompts(count, round)))
    assert len(driver.run(*asked).outputs) == count * TOKENS
    return count * TOKENS / (time.perf_counter() - began)


def pipeline(url: str, count: int, round: int) -> float:
    """The same through HTTP, gateway, router, broker and worker, streamed."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body | usage) as stream:
            results = 0
            async for line in stream.aiter_lines():
                if '"usage":{' in line:
                    results = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        assert results == TOKENS

    async def every() -> float:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
            began = time.perf_counter()
            await asyncio.gather(*(one(client, prompt) for prompt in prompts(count, round)))
            return count * TOKENS / (time.perf_counter() - began)

    return asyncio.run(every())


def report(name: str, measure: Callable[[int, int], float]) -> None:
    for count in COUNTS:
        measure(count, 0)
        found = [measure(count, round) for round in range(1, REPEATS + 1)]
        print(f"{name:9} {count} at once: {statistics.median(found):8.0f} tokens/s (best {max(found):.0f})", flush=True)


def main() -> None:
    began = time.perf_counter()
    eager = '{"enforce_eager": true}'
    engine: Any = SUBJECT.make(SUBJECT.settings(**OPTIONS, max_batched_tokens=2048, override_engine_args=eager), DEMO)
    print(f"start {time.perf_counter() - began:.1f} s", flush=True)
    try:
        report("bare", lambda count, round: bare(engine, count, round))
        report("adapter", lambda count, round: adapter(engine, count, round))
        report("bare", lambda count, round: bare(engine, count, round))
    finally:
        engine.close()
    with tempfile.TemporaryDirectory() as home:
        deployment = Deployment(Path(home), "--engine", "native", "--workers", "0")
        flags = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        worker = deployment.also(
            "worker", "--engine", "vllm", "--model", str(DEMO), "--override-engine-args", eager, *flags
        )
        worker.wait_for("worker_registered", 240)
        report("pipeline", lambda count, round: pipeline(deployment.urls[0], count, round))
        worker.stop()
        deployment.stop()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
