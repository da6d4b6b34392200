"""``python -m tests.embeddings MODEL --state FILE``: vectors and CPU time of a deployment and of plain transformers.

MODEL is the folder of a sentence-transformers model with mean pooling, which the deployment of ``--state`` serves. The
recipe beside it tokenises, runs the model, takes the mean and normalises, with one thread. CPU times of the deployment
are of all its processes; start it with ``--threads 1``.
"""

import argparse
import asyncio
import base64
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from penstock.launch.state import DeploymentState, read_state

CLIENTS = 64
TOGETHER = 32  # texts of a batch of the recipe
WORDS = (5, 10, 20, 40, 80, 120)  # in a text
LONGEST = 256  # tokens, as all-MiniLM-L6-v2 has it


class Recipe:
    """Vectors by plain transformers."""

    def __init__(self, path: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModel.from_pretrained(path).eval()

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        given = self._tokenizer(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1).float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    def tokens(self, texts: Sequence[str]) -> int:
        return sum(map(len, self._tokenizer(list(texts), truncation=True, max_length=LONGEST)["input_ids"]))


class Served:
    """Vectors by a deployment."""

    def __init__(self, state: DeploymentState) -> None:
        self._url = state.http_url + "/v1/embeddings"
        self._model = state.model
        self._pids = [process.pid for process in state.processes]

    def _body(self, given: str | Sequence[str]) -> dict[str, Any]:
        options = {"encoding_format": "base64", "truncate_prompt_tokens": -1}
        return {"model": self._model, "input": given, **options}

    def together(self, texts: Sequence[str]) -> torch.Tensor:
        answer = httpx.post(self._url, json=self._body(texts), timeout=600, trust_env=False).raise_for_status()
        packed = [bytearray(base64.b64decode(each["embedding"])) for each in answer.json()["data"]]
        return torch.stack([torch.frombuffer(each, dtype=torch.float32) for each in packed])

    def each_alone(self, texts: Sequence[str]) -> None:
        async def run() -> None:
            slots = asyncio.Semaphore(CLIENTS)
            async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

                async def ask(text: str) -> None:
                    async with slots:
                        (await client.post(self._url, json=self._body(text))).raise_for_status()

                await asyncio.gather(*map(ask, texts))

        asyncio.run(run())

    def beside(self, short: str, bulk: Sequence[str], requests: int) -> tuple[list[float], float]:
        """Seconds of one request after the other with a short text, while several with all texts of ``bulk`` run; and
        the seconds of these."""

        async def run() -> tuple[list[float], float]:
            async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
                began = time.perf_counter()
                asked = [client.post(self._url, json=self._body(bulk)) for _ in range(requests)]
                running, took = [asyncio.create_task(each) for each in asked], list[float]()
                while not all(each.done() for each in running) or (not running and len(took) < 100):
                    asked_at = time.perf_counter()
                    (await client.post(self._url, json=self._body(short))).raise_for_status()
                    took.append(time.perf_counter() - asked_at)
                return took, time.perf_counter() - began

        return asyncio.run(run())

    def cpu_s(self) -> float:
        """Of all processes, since they were started."""
        fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids)
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.embeddings", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--state", default=".penstock/state.json", type=Path)
    parser.add_argument("--texts", default=300, type=int)
    parser.add_argument("--beside", type=int, help="time a short text beside so many requests with all texts, instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    recipe, served, rng = Recipe(args.model), Served(read_state(args.state)), random.Random(1)
    words = Path("README.md").read_text(encoding="utf-8").split()
    texts = [" ".join(rng.choices(words, k=rng.choice(WORDS))) for _ in range(args.texts)]

    if args.beside is not None:
        for requests in (0, args.beside):
            took, seconds = served.beside("How deep is the sea?", texts, requests)
            low, high = (1e3 * sorted(took)[int(share * len(took))] for share in (0.5, 0.95))
            print(
                f"beside {requests}: short text p50 {low:.0f} ms, p95 {high:.0f} ms ({len(took)}); all {seconds:.1f} s"
            )
        return
    checked = [*texts[:200], "x " * 600]
    wanted = torch.cat([recipe([text]) for text in checked])
    print(f"{len(checked)} vectors: largest difference {(served.together(checked) - wanted).abs().max():.2g}")

    print(f"{len(texts)} texts, {recipe.tokens(texts)} tokens; load of the machine {os.getloadavg()[0]:.1f}")

    def measure(what: str, work: Callable[[], object], clock: Callable[[], float]) -> None:
        began, cpu = time.perf_counter(), clock()
        work()
        each = len(texts)
        seconds, cpu = time.perf_counter() - began, clock() - cpu
        print(f"{what:<42} {cpu / each * 1e3:6.1f} CPU-ms/text {each / seconds:7.0f} texts/s")

    batches = [texts[at : at + TOGETHER] for at in range(0, len(texts), TOGETHER)]
    measure(f"transformers, batches of {TOGETHER} as given", lambda: [*map(recipe, batches)], time.process_time)
    measure("transformers, a text at a time", lambda: [recipe([text]) for text in texts], time.process_time)
    measure("penstock, one request", lambda: served.together(texts), served.cpu_s)
    measure(f"penstock, {CLIENTS} clients with a text each", lambda: served.each_alone(texts), served.cpu_s)


if __name__ == "__main__":
    main()
