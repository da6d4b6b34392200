"""Speculation on a GPU: the demo model's answers with and without proposals, which must be equal, and their speed.

python -m tests.gpu.speculation
"""

import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from infra.demo_model import task_mix
from infra.demo_model.template import prompt
from infra.model import modeldir
from schemas.requests import Sampling, Stop
from workers.engines.base import SequenceRequest
from workers.engines.native.build import build
from workers.engines.native.options import NativeOptions

TASKS = ("copying", "counting", "facts", "json", "needle", "thinking")
DRAFT = str(modeldir.DEMO.parent / "demo-draft")
PER_TASK, NEW = 4, 160


def asked(tag: object) -> list[SequenceRequest]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(modeldir.DEMO / "tokenizer.json"))
    samples = [sample for task in TASKS for sample in task_mix.cases(task, PER_TASK, 7)]
    texts = [tokenizer.encode(prompt(each.messages, each.tools), add_special_tokens=False) for each in samples]
    return [
        SequenceRequest((tag, n), tokens, Sampling(temperature=0.0 if n % 2 else 0.6, seed=n), Stop(NEW))
        for n, tokens in enumerate(texts)
    ]


def run(engine: Any, requests: list[SequenceRequest], together: int) -> tuple[float, dict[Any, list[int]]]:
    """Seconds, and tokens by number; so many requests at a time."""
    found: dict[Any, list[int]] = {request.key[1]: [] for request in requests}  # type: ignore[index]
    began = time.perf_counter()
    for first in range(0, len(requests), together):
        for request in requests[first : first + together]:
            engine.submit(request)
        while engine.has_work():
            for output in engine.step().outputs:
                found[output.key[1]].append(output.token)
    return time.perf_counter() - began, found


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    plain: dict[int, dict[Any, list[int]]] = {}
    for dtype in ("float32",):
        for name, options in (("none", {}), ("n-gram", {"speculative_model": "ngram"}),
                              ("draft model", {"speculative_model": DRAFT})):  # fmt: skip
            made = NativeOptions(device="cuda", dtype=dtype, kv_blocks=2000, max_running=32, warm=True, **options)  # type: ignore[arg-type]
            engine = build(str(modeldir.DEMO), made)
            run(engine, asked("first"), 8)
            for together in (1, 8):
                before = engine.stats()
                seconds, found = run(engine, asked(together), together)
                after = engine.stats()
                count = sum(map(len, found.values()))
                proposed = after.draft_tokens - before.draft_tokens
                right = after.accepted_tokens - before.accepted_tokens
                same = sum(found[n] == plain.setdefault(together, found)[n] for n in found)
                print(f"{dtype}, proposals: {name}, {together} at a time: {count / seconds:,.0f} tokens/s; {right} of "
                      f"{proposed} proposals right; {same} of {len(found)} answers equal", flush=True)  # fmt: skip
            engine.close()


if __name__ == "__main__":
    main()
