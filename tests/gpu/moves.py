"""The beginning of a prompt read from another worker's GPU instead of computed, through the whole pipeline.

python -m tests.gpu.moves --folder /dev/shm/random-8b [--layout pair] [--prompt 4096] [--streams 0,64]

The folder is written by `python -m tests.gpu.pipeline --write`. Two workers on two GPUs ("aggregated"), or a prefill
and a decode worker ("pair"). Each round asks one worker for a new prompt, and then the other for the same prompt with
some tokens more: that one computes a few tokens and reads the rest. Times to the first token are compared with those of
prompts of the same length that nobody knows, and that the same worker knows itself; alone, and beside answers that run.
The answer behind what was read has to be that behind what was computed.

In a pair the conversation goes on: the second prompt continues the first answer, which only the decode worker has.
"""

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from penstock.launch.state import DeploymentState
from tests.gpu import disaggregated
from tests.gpu.arrivals import IDS
from tests.gpu.pipeline import ints, words_for

LAYOUTS = {
    "aggregated": ("--workers", 2, "--move-prefixes", "on"),
    "pair": ("--prefill", 1, "--decode", 1, "--local-prefill-tokens", 0, "--move-prefixes", "on"),
}
MORE, ANSWER = 16, 8  # tokens behind a prompt that was asked before, and of an answer
EVENTS_S = 0.3  # until routers know what a worker has computed
SHORT, RUNNING = 256, 256  # tokens of prompts and answers that run beside


class Answer(NamedTuple):
    first_ms: float
    tokens: list[int]


async def ask(http: httpx.AsyncClient, model: str, prompt: list[int], worker: str) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "return_token_ids": True} | ({"worker": worker} if worker else {})
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                first = first or time.perf_counter()
                tokens += choices[0].get("token_ids") or ()
    return Answer((first - began) * 1e3, tokens)


async def rounds(asked: argparse.Namespace, state: DeploymentState, seed: int) -> dict[str, Any]:
    """Medians of the times to the first token, in ms, and how many answers differed."""
    draw, times = random.Random(seed), dict[str, list[float]]()
    different = 0
    names = ("worker-0", "worker-1") if asked.layout == "aggregated" else ("", "")

    def prompt(length: int) -> list[int]:
        return draw.choices(range(*IDS), k=length)

    async with httpx.AsyncClient(base_url=state.http_url, trust_env=False, timeout=60) as http:
        for number in range(asked.rounds + 1):
            one, other = names[:: 1 - 2 * (number % 2)]
            begin, more = prompt(asked.prompt), prompt(MORE)
            cold = await ask(http, state.model, begin, one)
            further = [*begin, *([] if one else cold.tokens), *more]
            await asyncio.sleep(EVENTS_S)
            moved = await ask(http, state.model, further, other)
            unknown = await ask(http, state.model, prompt(len(further)), other)
            known = await ask(http, state.model, further, one)
            different += moved.tokens != known.tokens
            if number:  # the first one connects
                for name, each in (("moved", moved), ("computed", unknown), ("known", known)):
                    times.setdefault(name, []).append(each.first_ms)
    return {name: statistics.median(each) for name, each in times.items()} | {"different": different}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the model")
    parser.add_argument("--layout", choices=LAYOUTS, default="aggregated")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--streams", type=ints, default=(0, 64), help="answers that run beside; 0: none")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.engine = "native"
    disaggregated.LAYOUTS |= LAYOUTS
    data, found = Path(tempfile.mkdtemp(prefix="moves-")), dict[int, Any]()
    process, state = disaggregated.up(asked, asked.layout, data)
    try:
        for streams, seed in zip(asked.streams, itertools.count(1)):
            beside, since_ns = None, time.time_ns()
            if streams:
                words = words_for(asked.folder, SHORT)
                beside, _ = disaggregated.load(state, data, streams, words, RUNNING, 60.0, seed)
                time.sleep(disaggregated.WARM_S)
            each = found[streams] = asyncio.run(rounds(asked, state, seed))
            if beside is not None:
                beside.kill()
                beside.wait()
            each["transfers"] = disaggregated.moved(state, since_ns)
            print(f"{asked.layout}, {asked.prompt} tokens, {streams} answers beside: TTFT computed "
                  f"{each['computed']:.1f}, read {each['moved']:.1f}, known {each['known']:.1f} ms; "
                  f"{each['different']} of {asked.rounds + 1} answers differ; transfers {each['transfers']}",
                  flush=True)  # fmt: skip
    finally:
        disaggregated.stop(process)
        disaggregated.logs(data)
        shutil.rmtree(data, ignore_errors=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
