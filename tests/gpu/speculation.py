"""Speculation on a GPU: answers with and without proposals, which must be equal, and their speed.

python -m tests.gpu.speculation [demo] [8b]

The demo model has a draft model that was trained for it. For an 8B Llama's shape with random weights there is none; a
model that resembles it is made: the last layers add little to the residual stream, and the draft model lacks them.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import assemble, build
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model import task_mix
from tests.demo_model.template import prompt

TASKS = ("copying", "counting", "facts", "json", "needle", "thinking")
DRAFT = str(modeldir.DEMO.parent / "demo-draft")
PER_TASK, NEW = 4, 160
LAYERS, SHARE = 2, 0.02


def asked(tag: object) -> list[SequenceRequest]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(modeldir.DEMO / "tokenizer.json"))
    samples = [sample for task in TASKS for sample in task_mix.cases(task, PER_TASK, 7)]
    texts = [tokenizer.encode(prompt(each.messages, each.tools), add_special_tokens=False) for each in samples]
    return [
        SequenceRequest((tag, n), tokens, Sampling(temperature=0.0 if n % 2 else 0.6, seed=n), Stop(NEW))
        for n, tokens in enumerate(texts)
    ]


def run(
    engine: Any, requests: list[SequenceRequest], together: int
) -> tuple[float, dict[Any, list[int]], tuple[float, float]]:
    """Seconds, tokens by number, and medians of a step with prompts and of one without; so many requests at a time."""
    found: dict[Any, list[int]] = {request.key[1]: [] for request in requests}  # type: ignore[index]
    times: dict[bool, list[float]] = {True: [], False: []}
    began = time.perf_counter()
    for first in range(0, len(requests), together):
        for request in requests[first : first + together]:
            engine.submit(request)
        while engine.has_work():
            at = time.perf_counter()
            result = engine.step()
            times[bool(result.started)].append(time.perf_counter() - at)
            for output in result.outputs:
                found[output.key[1]].append(output.token)
    prompts, steps = (statistics.median(times[each]) * 1e3 for each in (True, False))
    return time.perf_counter() - began, found, (prompts, steps)


def demo() -> None:
    plain: dict[int, dict[Any, list[int]]] = {}
    for dtype in ("float32",):
        for name, options in (("none", {}), ("n-gram", {"speculative_model": "ngram"}),
                              ("draft model", {"speculative_model": DRAFT})):  # fmt: skip
            made = NativeOptions(device="cuda", dtype=dtype, kv_blocks=2000, max_running=32, warm=True, **options)  # type: ignore[arg-type]
            engine = build(str(modeldir.DEMO), made)
            run(engine, asked("first"), 8)
            for together in (1, 8):
                before = engine.stats()
                seconds, found, (prompt_ms, step_ms) = run(engine, asked(together), together)
                after = engine.stats()
                count = sum(map(len, found.values()))
                proposed = after.draft_tokens - before.draft_tokens
                right = after.accepted_tokens - before.accepted_tokens
                same = sum(found[n] == plain.setdefault(together, found)[n] for n in found)
                print(f"{dtype}, proposals: {name}, {together} at a time: {count / seconds:,.0f} tokens/s; {right} of "
                      f"{proposed} proposals right; {same} of {len(found)} answers equal; {count} tokens, a step with "
                      f"prompts {prompt_ms:.2f} ms, another {step_ms:.2f} ms", flush=True)  # fmt: skip
            engine.close()


def pair() -> tuple[Any, Any]:
    """An 8B-shaped model, and one of its first two layers."""
    from tests.gpu.beside import config
    from tests.gpu.native import large

    torch.manual_seed(1)
    target = large(config("8b"))
    for layer in target.model.layers[LAYERS:]:
        layer.self_attn.o_proj.weight.mul_(SHARE)
        layer.mlp.down_proj.weight.mul_(SHARE)
    shape = config("8b")
    shape.num_hidden_layers = LAYERS
    draft = large(shape)
    kept = set(dict(draft.named_parameters()))
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in kept}, strict=False)
    return target, draft


def eight() -> None:
    from tests.gpu.beside import SHAPES
    from tests.gpu.native import ask, drive

    vocab = SHAPES["8b"][0]
    for tokens in (0, 2, 4, 6):
        target, draft = pair()
        options: dict[str, Any] = {"speculative_model": "draft", "num_speculative_tokens": tokens} if tokens else {}
        made = NativeOptions(max_running=32, max_model_len=4096, warm=True, **options)
        engine = assemble(describe(target), made, draft=describe(draft) if tokens else None)
        del target, draft
        for streams in (1, 8, 32):
            drive(engine, ask(streams, 512, 8, vocab, 50 + streams))
            before = engine.stats()
            seconds = min(drive(engine, ask(streams, 512, 128, vocab, turn + streams))[0] for turn in (1, 2))
            after = engine.stats()
            proposed = after.draft_tokens - before.draft_tokens
            right = after.accepted_tokens - before.accepted_tokens
            print(f"8B, {tokens} proposals, {streams} x 512 -> 128: {streams * 128 / seconds:,.0f} tokens/s; "
                  f"{right} of {proposed} right", flush=True)  # fmt: skip
        engine.close()
        del engine
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["demo", "8b"])
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for what in asked.what:
        {"demo": demo, "8b": eight}[what]()


if __name__ == "__main__":
    main()
