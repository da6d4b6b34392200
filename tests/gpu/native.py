"""The native engine on a GPU: answers equal to the CPU's, and its speed with an 8B Llama's shape and random weights.

python -m tests.gpu.native [parity] [speed] [profile]
TRITON_INTERPRET=1 python -m tests.gpu.native parity --only llama     (without a GPU, slowly)
"""

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.infra.model import modeldir
from penstock.infra.process.gc_policy import freeze_loaded
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native import build as engine_build
from penstock.workers.engines.native import executors
from penstock.workers.engines.native.build import assemble, build
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.native import models

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 9, 40) if INTERPRETED else (1, 2, 7, 8, 9, 31, 40, 65, 100, 130, 200)
ANSWER = 8 if INTERPRETED else 20  # tokens
GREEDY = Sampling(temperature=0.0)
SAMPLINGS = (
    (GREEDY, "greedy"),
    (Sampling(temperature=1.0, seed=7), "temperature 1"),
    (Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7), "top-k 50, top-p 0.9"),
)
DRAWN = (
    (GREEDY, "greedy"),
    (Sampling(temperature=0.8, seed=3), "drawn"),
    (Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3), "top-k and top-p"),
    (Sampling(temperature=0.0, presence_penalty=1.0, logprobs=2), "penalised"),
)
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# (streams, prompt, answer, what vLLM 0.25 reached in tokens/s)
ROWS = (
    (1, 512, 128, 201.6),
    (32, 512, 128, 3711),
    (256, 512, 128, 6827),
    (512, 128, 128, 16551),
    (64, 2048, 128, 1897),
)


def large(config: Any = LLAMA_8B, device: str = "cuda") -> Any:
    """Random weights, made where they are used."""
    attention.register()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        model = model.to_empty(device=device)
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if weight.dtype == torch.uint8:  # of 4 bits, with about the same spread
            weight.data.fill_(120) if name.endswith("scales") else weight.data.random_(0, 256)
        else:
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(std=0.02)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary.to(device)
    return model.eval().requires_grad_(False)


def ask(
    count: int, prompt: int, answer: int, vocab: int, seed: int, sampling: Sampling = GREEDY
) -> list[SequenceRequest]:
    draw = random.Random(seed)
    return [
        SequenceRequest((seed, n), [draw.randrange(10, vocab) for _ in range(prompt)], sampling,
                        Stop(answer, ignore_eos=True))
        for n in range(count)
    ]  # fmt: skip


def drive(engine: ScheduledEngine, requests: list[SequenceRequest]) -> tuple[float, float, float, list[float]]:
    """Seconds of all, to the first token, between first and last token of those that run at last; times of steps."""
    for request in requests:
        engine.submit(request)
    first, times = 0.0, []
    began = last = time.perf_counter()
    waiting = len(requests)
    full = 0.0
    while engine.has_work():
        result = engine.step()
        assert not result.failures, result.failures
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if result.outputs and not first:
            first = now - began
        waiting -= sum(1 for each in result.started)
        if waiting == 0 and not full and len(result.outputs) == len(requests):
            full = now
    return last - began, first, (last - full) if full else 0.0, times


def speed(asked: argparse.Namespace) -> None:
    began = time.perf_counter()
    made = large()
    torch.cuda.synchronize()
    print(f"weights made in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    engine = assemble(
        describe(made), NativeOptions(max_running=512, max_batched_tokens=asked.batched, max_model_len=4096, warm=True)
    )
    ready = time.perf_counter() - began
    _, first, _, _ = drive(engine, ask(1, 16, 2, 128256, 99))
    freeze_loaded()  # as a worker does
    print(f"engine ready in {ready:.1f} s, first token {first * 1e3:.1f} ms later; {engine.info.total_blocks} blocks")
    for sampling, text in SAMPLINGS:
        for count, prompt, answer, bar in ROWS[: asked.rows if sampling is GREEDY else min(3, asked.rows - 1)]:
            drive(engine, ask(min(count, 8), prompt, 4, 128256, random.randrange(1 << 30), sampling))
            seconds, first, tail, times = drive(
                engine, ask(count, prompt, answer, 128256, count if sampling is GREEDY else 5000 + count, sampling)
            )
            rate = count * answer / seconds
            steps = sorted(times[-answer // 2 :])
            if asked.trace:
                print("  steps, ms:", *(round(seconds * 1e3, 1) for seconds in times[:40]))
            print(f"{text} {count:>3} x {prompt}->{answer}: {rate:,.0f} tokens/s ({rate / bar:.2f} of {bar:,}), "
                  f"first token {first * 1e3:.1f} ms, step {steps[len(steps) // 2] * 1e3:.2f} ms, "
                  f"all decode for {tail * 1e3:.0f} ms")  # fmt: skip
    if asked.rows < len(ROWS):
        return
    for count, prompt in ((64, 512), (16, 2048), (1, 512), (1, 2048)):
        seconds, *_ = drive(engine, ask(count, prompt, 1, 128256, count + prompt))
        print(f"prefill {count} x {prompt}: {count * prompt / seconds:,.0f} tokens/s ({seconds * 1e3:.1f} ms)")
    if asked.profile:
        profile(engine)
    engine.close()


def profile(engine: ScheduledEngine) -> None:
    """Where a step's time goes, by kernel."""
    for count, prompt, steps in ((1, 512, 20), (256, 512, 10), (16, 512, 0)):
        for request in ask(count, prompt, 64 if steps else 1, 128256, 77 + count):
            engine.submit(request)
        while steps and len(engine.step().outputs) < count:
            pass
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            began = time.perf_counter()
            for _ in range(steps or 2):
                if engine.has_work():
                    engine.step()
            torch.cuda.synchronize()
            wall = time.perf_counter() - began
        each = [e for e in found.key_averages() if str(e.device_type).endswith("CUDA")]
        each.sort(key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in each)
        n = steps or 1
        print(f"profile {count} x {prompt}, {steps} decode steps: {wall / n * 1e3:.2f} ms a step,"
              f" kernels {total / n / 1e3:.2f}")  # fmt: skip
        for e in each[:13]:
            print(f"  {e.self_device_time_total / n / 1e3:8.3f} ms {e.count / n:7.1f} x {e.key[:90]}")
        while engine.has_work():
            engine.step()


def answers(engine: ScheduledEngine, vocab: int, sampling: Sampling) -> dict[object, list[int]]:
    draw = random.Random(5)
    requests = [
        SequenceRequest(
            n, [draw.randrange(1, vocab - 2) for _ in range(length)], sampling, Stop(ANSWER, ignore_eos=True)
        )
        for n, length in enumerate(LENGTHS)
    ]
    return models.tokens(models.run(engine, requests))


def same(name: str, path: Path, running: int = 8, blocks: int = 400, few: bool = False, **more: Any) -> None:
    """Compare answers of the kernels with those of plain torch on a CPU. ``more``: options of the kernels' engine."""
    vocab = 0
    for sampling, text in DRAWN[: 1 if few else None]:
        found = []
        for kernels in (False, True):
            options = NativeOptions(
                device="cuda" if kernels and not INTERPRETED else "cpu",
                dtype="float32",
                kv_blocks=blocks,
                block_size=8,
                max_running=running,
                max_batched_tokens=96,
                warm=kernels and not INTERPRETED,
                **more if kernels else {},
            )
            with interpreted() if kernels and INTERPRETED else contextlib.nullcontext():
                engine = build(str(path), options)
                vocab = vocab or engine.info.vocab_size
                found.append(answers(engine, vocab, sampling))
            stats = engine.stats()
            engine.close()
        one, other = found
        alike = sum(one[key] == other[key] for key in one)
        proposed = f", {stats.accepted_tokens} of {stats.draft_tokens} proposals" if stats.draft_tokens else ""
        print(
            f"{name}, {text}: {alike} of {len(one)} answers equal the CPU's{proposed}"
            + ("" if alike == len(one) else "   <--"),
            flush=True,
        )


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """The kernels on a CPU, by Triton's interpreter."""
    from penstock.workers.engines.native.cuda.rewrite import prepare

    def prepared(model: Any, reload: Any, *, invariant: bool = False) -> executors.PreparedModel:
        return executors.PreparedModel(model, prepare(model, invariant=invariant))

    with mock.patch.object(engine_build, "prepared", prepared):
        yield


def parity(asked: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    draft = str(modeldir.DEMO.parent / "demo-draft")
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in models.CONFIGS]
    cases += [("llama, preempted", {"blocks": 60}), ("gemma3, preempted", {"blocks": 60})]
    cases += [(f"{name}, one pool", {"few": True, "hybrid_kv_cache": False}) for name in ("gemma3", "gpt_oss")]
    cases += [
        (f"{name}, n-gram", {"few": True, "speculative_model": "ngram"}) for name in ("llama", "gemma3", "gpt_oss")
    ]
    cases += [
        ("llama, invariant", {"batch_invariant": True}),
        ("gemma3, invariant, preempted", {"few": True, "batch_invariant": True, "blocks": 60}),
        ("demo", {}),
        ("demo, one by one", {"running": 1}),
        ("demo, n-gram", {"speculative_model": "ngram"}),
        ("demo, draft model", {"speculative_model": draft}),
        ("demo, draft model, preempted", {"few": True, "speculative_model": draft, "blocks": 60}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, more in cases:
            if asked.only and asked.only not in name:
                continue
            model = name.split(",")[0]
            try:
                same(name, modeldir.DEMO if model == "demo" else models.save(model, Path(folder)), **more)
            except Exception:
                traceback.print_exc(limit=-6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["parity", "speed"])
    parser.add_argument("--batched", type=int, default=8192)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many rows of the table")
    parser.add_argument("--only", default="", help="parity: models whose name has this")
    parser.add_argument("--trace", action="store_true", help="seconds of each of the first steps")
    asked = parser.parse_args()
    print("interpreted" if INTERPRETED else torch.cuda.get_device_name(), torch.__version__, json.dumps(asked.what))
    for what in asked.what:
        try:
            {"parity": parity, "speed": speed}[what](asked)
        except Exception:
            traceback.print_exc(limit=-8)


if __name__ == "__main__":
    main()
