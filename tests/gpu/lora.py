"""LoRA adapters on a GPU: the kernels against plain torch, answers with and without graphs, and the speed of batches.

python -m tests.gpu.lora [kernels] [parity] [speed]
TRITON_INTERPRET=1 python -m tests.gpu.lora kernels parity     (without a GPU, slowly)
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.infra.model.adapter import AdapterFolder, read_adapter
from penstock.schemas.requests import Stop
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.native.build import assemble, build
from penstock.workers.engines.native.cuda.adapters import CudaAdapters
from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.model.adapters import HostMatrices, SlotRows, TorchAdapters
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from tests.adapters import merged, write_adapter
from tests.gpu.native import GREEDY, INTERPRETED, LLAMA_8B, ask, interpreted, large
from tests.workers.engines.native import models

DEVICE = "cpu" if INTERPRETED else "cuda"
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
ADAPTERS, RANK = 8, 16
PROMPT, ANSWER = 128, 96  # tokens
COUNTS = (32, 256)
MIXTURES = (0, 1, 8)  # adapters in a batch


class OneLayer(nn.Module):
    """A model of one product, as far as ``TorchAdapters`` looks at a model."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.product = nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=DEVICE).requires_grad_(False)

    def get_output_embeddings(self) -> None:
        return None


class LikeModel:
    """What ``TorchAdapters`` reads of a ``Model``."""

    multimodal = False

    def __init__(self, forward: OneLayer) -> None:
        self.forward, self.dtype, self.device = forward, forward.product.weight.dtype, forward.product.weight.device


def kernels(asked: argparse.Namespace) -> bool:
    """Both kernels against ``TorchAdapters`` over random batches, in all sizes of tiles."""
    good = True
    shapes = ((96, 80), (4096, 6144), (14336, 4096)) if not INTERPRETED else ((96, 80), (1040, 144))
    rows_of = (1, 5, 32, 256, 700) if not INTERPRETED else (1, 5, 40, 300)
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16):
        for inputs, outputs in shapes:
            model: Any = LikeModel(OneLayer(inputs, outputs, dtype))
            plain, grouped = TorchAdapters(model, 4, 32), CudaAdapters(model, 4, 32)
            for slot, rank in enumerate((4, 16, 32)):  # one slot stays empty
                down = torch.randn((rank, inputs), dtype=dtype) / math.sqrt(inputs)
                each = [HostMatrices(0, 0, down, torch.randn((rank, outputs), dtype=dtype))]
                plain.copy(slot, each)
                grouped.copy(slot, each)
            upload = Upload(1 << 16, torch.device(DEVICE))
            grouped.place(upload, 64, max(rows_of))
            for rows in rows_of:
                slots = [random.randrange(-1, 4) for _ in range(rows)]
                slots[0] = 0
                x = torch.randn((1, rows, inputs), dtype=dtype, device=DEVICE)
                out = torch.randn((1, rows, outputs), dtype=dtype, device=DEVICE)
                expected, found = out.clone(), []
                plain.begin(SlotRows(slot, row, 1) for row, slot in enumerate(slots))
                plain.add(0, x, expected)
                for size in (0, rows + 3):  # computed eagerly; with the inputs of a graph, which has padding
                    result = out.clone()
                    upload.begin()
                    grouped.put(slots, size)
                    upload.send()
                    if size:
                        grouped.fix(size, active=True)
                    grouped.add(0, x, result)
                    found.append(result)
                error = max(float((each - expected).float().norm() / expected.float().norm()) for each in found)
                untouched = [row for row, slot in enumerate(slots) if slot in (-1, 3)]
                same = all(torch.equal(each[0, untouched], out[0, untouched]) for each in found)
                good &= error < BOUND[dtype] and same
                print(f"kernels {dtype} {inputs} -> {outputs}, {rows} rows: error {error:.1e}"
                      + ("" if error < BOUND[dtype] and same else "   <--"), flush=True)  # fmt: skip
    return good


def parity(asked: argparse.Namespace) -> bool:
    """Answers of the kernels, with several adapters in a batch, against merged weights in plain torch on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    good = True
    lengths = (1, 9, 40) if INTERPRETED else (1, 7, 31, 65, 130)
    count = 4 if INTERPRETED else 16
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama",) if INTERPRETED else ("llama", "qwen3_moe"):
            path = models.save(name, Path(folder))
            attention = ("q_proj", "k_proj", "v_proj", "o_proj")
            targets = {"targets": attention} if name.endswith("moe") else {}
            one = write_adapter(Path(folder) / f"{name}-1", path, seed=1, rank=8, **targets)  # type: ignore[arg-type]
            two = write_adapter(Path(folder) / f"{name}-2", path, seed=2, rank=4, targets=("v_proj", "o_proj"))
            options = NativeOptions(
                device=DEVICE, dtype="float32", kv_blocks=400, block_size=8, max_running=16, max_batched_tokens=96,
                warm=not INTERPRETED, max_loras=2, max_lora_rank=8,
            )  # fmt: skip
            with interpreted() if INTERPRETED else contextlib.nullcontext():
                engine = build(str(path), options)
            assert engine.adapters is not None
            named: dict[str, Path | None] = {"": None}
            for adapter in (one, two):
                read = read_adapter(adapter, 8)
                engine.adapters.add(adapter.name, engine.adapters.prepare(read, adapter.name))
                named[adapter.name] = adapter
            keys = [(adapter, length) for length in lengths for adapter in named]
            for sampled in range(2):  # the second time most of the prompts are in the cache, under other names each
                found = models.tokens(
                    models.run(
                        engine,
                        [models.request((adapter, length), models.prompt(length), count, adapter=adapter,
                                        root=adapter.encode().ljust(16)) for adapter, length in keys],
                    )
                )  # fmt: skip
                alike = 0
                for adapter, weights in named.items():
                    whole = merged(path, weights)
                    for length in lengths:
                        prompt = torch.tensor([models.prompt(length)])
                        wanted = whole.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None,
                                                attention_mask=torch.ones_like(prompt))  # fmt: skip
                        alike += found[adapter, length] == wanted[0, length:].tolist()
                good &= alike == len(keys)
                print(f"parity {name}, run {sampled}: {alike} of {len(keys)} answers equal merged weights"
                      + ("" if alike == len(keys) else "   <--"), flush=True)  # fmt: skip
            engine.close()
    return good


def random_adapter(adapters: TorchAdapters, rank: int, folder: AdapterFolder) -> list[HostMatrices]:
    """For every layer of a model."""
    return [
        HostMatrices(
            number,
            at,
            (torch.randn((rank, product.inputs)) / math.sqrt(product.inputs)).bfloat16().pin_memory(),
            (0.01 * torch.randn((rank, part.size))).bfloat16().pin_memory(),
        )
        for number, product in enumerate(adapters.products)
        for at, part in enumerate(product.parts)
    ]


def decode_rate(engine: ScheduledEngine, requests: list[SequenceRequest]) -> tuple[float, float]:
    """Tokens per second of all requests, and the median step that only decodes, in ms."""
    for request in requests:
        engine.submit(request)
    began = last = time.perf_counter()
    steps, answered = [], 0
    while engine.has_work():
        result = engine.step()
        assert not result.failures, result.failures
        now = time.perf_counter()
        if len(result.outputs) == len(requests):
            steps.append(now - last)
        last, answered = now, answered + len(result.outputs)
    return answered / (last - began), 1e3 * statistics.median(steps)


def speed(asked: argparse.Namespace) -> bool:
    """Tokens per second with an 8B Llama's shape: without room for adapters, and with 0, 1 and 8 in a batch."""
    rows: list[dict[str, Any]] = []
    for slots in (0, ADAPTERS):
        options = NativeOptions(
            max_running=max(COUNTS), max_batched_tokens=8192, max_model_len=4096, warm=True, max_loras=slots,
            max_lora_rank=asked.max_rank, kv_blocks=4096,
        )  # fmt: skip
        began = time.perf_counter()
        engine = assemble(describe(large()), options)
        print(f"{slots} slots: ready in {time.perf_counter() - began:.1f} s, "
              f"{torch.cuda.memory_allocated() >> 20} MiB allocated", flush=True)  # fmt: skip
        names = [""]
        if engine.adapters is not None:
            applied: TorchAdapters = engine.adapters._matrices.__self__  # type: ignore[attr-defined]
            engine.adapters._matrices = partial(random_adapter, applied, RANK)
            names = [f"adapter-{number}" for number in range(ADAPTERS)]
            for name in names:
                folder = AdapterFolder(Path(name), name, RANK, 1.0, {})
                began = time.perf_counter()
                prepared = engine.adapters.prepare(folder, name)
                read = time.perf_counter()
                engine.adapters.add(name, prepared)
                torch.cuda.synchronize()
                print(f"{name}: {1e3 * (time.perf_counter() - read):.1f} ms to the device "
                      f"({1e3 * (read - began):.0f} ms to make)", flush=True)  # fmt: skip
        for count in COUNTS:
            for mixed in MIXTURES if slots else (0,):
                best = []
                for attempt in range(asked.runs + 1):  # the first one warms up
                    requests = ask(count, PROMPT, ANSWER, LLAMA_8B.vocab_size, 1000 * count + 10 * mixed + attempt)
                    for number, request in enumerate(requests):
                        request.adapter = names[number % mixed] if mixed else ""
                        request.stop = Stop(ANSWER if attempt else 8, ignore_eos=True)
                        request.sampling = GREEDY
                    found = decode_rate(engine, requests)
                    best += [found] if attempt else []
                rate, step = max(best)
                rows.append({"slots": slots, "rows": count, "adapters": mixed, "tokens_per_s": round(rate),
                             "step_ms": round(step, 3)})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        engine.close()
        del engine
        torch.cuda.empty_cache()
    base = {row["rows"]: row for row in rows if not row["slots"]}
    for row in rows:
        if row["slots"]:
            slower = row["step_ms"] / base[row["rows"]]["step_ms"]
            faster = row["tokens_per_s"] / base[row["rows"]]["tokens_per_s"]
            print(f"{row['rows']} rows, {row['adapters']} adapters: a step takes {slower:.3f} of the model's alone, "
                  f"{faster:.3f} of its tokens per second")  # fmt: skip
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA adapters on a GPU: kernels, parity, speed")
    parser.add_argument("what", nargs="*", default=["kernels", "parity", "speed"])
    parser.add_argument("--runs", type=int, default=2, help="of each row of the speed table, the best of which counts")
    parser.add_argument("--max-rank", type=int, default=32, help="of a slot")
    parser.add_argument("--json", default="", help="file for the speed table")
    asked = parser.parse_args()
    print("interpreted" if INTERPRETED else torch.cuda.get_device_name(), torch.__version__, json.dumps(asked.what))
    good = True
    for what in asked.what:
        try:
            good &= {"kernels": kernels, "parity": parity, "speed": speed}[what](asked)
        except Exception:
            traceback.print_exc(limit=-8)
            good = False
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
