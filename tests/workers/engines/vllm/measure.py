"""What the adapter and the pipeline cost on top of vLLM: a bare ``AsyncLLM`` loop, our engine on the same AsyncLLM, and
clients of a whole deployment, one after the other, on the bundled demo model.

``python -m tests.workers.engines.vllm.measure`` in an environment that has vLLM; no test. With ``schemas``: how long a
stream waits between two tokens while other requests bring schemas of 4,000 properties, compiled beside the engine's
thread, as workers do, or in it.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from penstock.infra.model.modeldir import DEMO
from penstock.schemas.requests import Constraint
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


HEAVY = 4_000  # properties of a schema
EVERY = 150  # tokens of the stream between two of them
STREAM = 1_500  # tokens
ROUNDS = 3


def heavy(number: int) -> Constraint:
    properties = {f"field_{number}_{at}": {"type": "string"} for at in range(HEAVY)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Constraint("json_schema", json.dumps(schema))


def gaps(engine: Any, how: str, first: int) -> list[float]:
    """Seconds between tokens of one stream.

    Args:
        how: "without" schemas, compiled "beside" the engine's thread, or "in" it.
        first: number of the first schema: each is new.
    """
    driver, at = Driver(engine), list[float]()
    driver.engine.submit(ask(f"stream-{first}", WORDS[:64], STREAM, GREEDY))
    number, asked, prepared = first, 0, list[tuple[str, Constraint, Future[object]]]()
    with ThreadPoolExecutor(1) as beside:
        while len(at) < STREAM:
            came = len(driver.seen.of(f"stream-{first}"))
            driver.step()
            at += [time.perf_counter()] * (len(driver.seen.of(f"stream-{first}")) - came)
            if how != "without" and len(at) >= EVERY * (asked + 1):
                asked, number = asked + 1, number + 1
                constraint = heavy(number)
                if how == "beside":
                    compiled = beside.submit(engine.grammars.compile, constraint)
                    prepared.append((f"schema-{number}", constraint, compiled))
                else:
                    engine.submit(ask(f"schema-{number}", WORDS[:64], 8, GREEDY, constraint=constraint))
            while prepared and prepared[0][2].done():
                key, constraint, compiled = prepared.pop(0)
                compiled.result()
                engine.submit(ask(key, WORDS[:64], 8, GREEDY, constraint=constraint))
    driver.idle()
    assert not driver.seen.failures, driver.seen.failures
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def schemas(engine: Any) -> None:
    ways = ("without", "beside", "in")
    found: dict[str, list[float]] = {how: [] for how in ways}
    gaps(engine, "beside", 0)
    for round in range(1, ROUNDS + 1):
        for at, how in enumerate(ways):
            found[how] += gaps(engine, how, 1_000 * round + 100 * at)
    for how, each in found.items():
        each.sort()
        p50, p99, most = (1000 * each[int(share * (len(each) - 1))] for share in (0.5, 0.99, 1.0))
        print(f"schemas {how:8}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {most:.0f} ms of {len(each)} gaps")


def report(name: str, measure: Callable[[int, int], float]) -> None:
    for count in COUNTS:
        measure(count, 0)
        found = [measure(count, round) for round in range(1, REPEATS + 1)]
        print(f"{name:9} {count} at once: {statistics.median(found):8.0f} tokens/s (best {max(found):.0f})", flush=True)


def main() -> None:
    began = time.perf_counter()
    eager = '{"enforce_eager": true}'
    options = OPTIONS | ({"max_model_len": 2048} if sys.argv[1:] else {})
    engine: Any = SUBJECT.make(SUBJECT.settings(**options, max_batched_tokens=2048, override_engine_args=eager), DEMO)
    print(f"start {time.perf_counter() - began:.1f} s", flush=True)
    try:
        if sys.argv[1:] == ["schemas"]:
            schemas(engine)
            return
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
