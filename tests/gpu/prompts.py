"""Prompts computed with their attention in pages and, of chunks of 1,024 tokens on, by cuDNN: kernels, then an engine.

python -m tests.gpu.prompts [plans] [kernels] [engine] [short] [memory]

One layer's attention of an 8B Llama's shape in bfloat16 (gathering and merging included), the time that cuDNN takes to
plan a new shape, then prompt tokens per second of the whole model, and what a short prompt takes with and without
CUDA graphs. "memory": graphs are captured with too little memory for the larger ones.
"""

import argparse
import gc
import statistics
import time
from typing import Any
from unittest import mock

import torch

from penstock.workers.engines.native.cuda import dense, packing, prompt_graphs
from penstock.workers.engines.native.cuda.modules import Rotation
from penstock.workers.engines.native.cuda.paged import PagedAttention
from penstock.workers.engines.native.model.attention import AttentionParams
from tests.gpu.kernels import Case
from tests.gpu.times import DEVICE

NEVER, LEAST = 1 << 60, 1024  # tokens from which on a chunk is computed by cuDNN
LAYERS = 4
SHORT = (16, 64, 128, 256, 512, 640, 1024, 1536, 2000)
# (start, tokens) of the chunks of a step
CASES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 512),) * 16, ((0, 1024),) * 8, ((0, 2048),), ((0, 2048),) * 4, ((0, 4000),) * 2, ((0, 8192),),
    ((8192, 8192),), ((24576, 8192),), ((4000, 2000),), ((30000, 1500),),
)  # fmt: skip
PROMPTS = ((16, 512), (16, 1024), (16, 2048), (8, 4096), (4, 8192), (1, 2048), (1, 32000))


def timed(paged: PagedAttention, case: Case) -> float:
    """Milliseconds of one layer."""
    params = AttentionParams(0.088)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(6):
        begin.record()
        for layer in range(LAYERS):
            paged.attend(layer, case.q, case.k, case.v, params)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / LAYERS)
    return statistics.median(found[1:])


def kernels() -> None:
    print("| chunks: tokens after cached ones | in pages | by cuDNN | TFLOP/s | | differ by |")
    for parts in CASES:
        case = Case(DEVICE, torch.bfloat16, 32, 8, 128, page=32, decodes=(), chunks=parts, layers=LAYERS, least=0)
        flops = sum(4 * 4096 * tokens * (start + tokens / 2) for start, tokens in parts)
        milliseconds, answers = [], []
        for using in (None, case.dense):
            paged = PagedAttention(case.pool, case.scratch, Rotation(), case.batch, using)
            answers.append(paged.attend(0, case.q, case.k, case.v, AttentionParams(0.088)).float())
            milliseconds.append(timed(paged, case))
        differ = float((answers[0] - answers[1]).norm() / answers[0].norm())
        speeds = " | ".join(f"{flops / each / 1e9:.0f}" for each in milliseconds)
        print(f"| {len(parts)} x {parts[0][1]:,} behind {parts[0][0]:,} | {milliseconds[0]:.3f} ms | "
              f"{milliseconds[1]:.3f} ms | {speeds} | {differ:.1e} |", flush=True)  # fmt: skip
        del case, paged, answers
        torch.cuda.empty_cache()


def plans() -> None:
    """How long the first call of a shape takes."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for causal in (True, False):
        for rows in range(1536, 8193, 1536):
            keys = rows if causal else 2560
            q = torch.randn((1, rows, 32, 128), device=DEVICE, dtype=torch.bfloat16)
            k, v = (torch.randn((1, keys, 8, 128), device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            times = []
            for _ in range(2):
                torch.cuda.synchronize()
                began = time.perf_counter()
                dense._attention(q, k, v, 0.088, causal=causal)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e3)
            found[causal].append(times[0] - times[1])
    for causal, each in found.items():
        print(f"a new shape, {'with' if causal else 'without'} a mask: {', '.join(f'{ms:.1f}' for ms in each)} ms")


def whole() -> None:
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.beside import config
    from tests.gpu.native import ask, drive, large

    shape = config("8b")
    shape.max_position_embeddings = 36_000
    options: Any = {"max_running": 64, "max_batched_tokens": 8192, "max_model_len": 36_000, "warm": False}
    engine = assemble(describe(large(shape)), NativeOptions(**options))
    print("| prompts | in pages, tokens/s | by cuDNN |")
    for streams, tokens in PROMPTS:
        seconds: dict[int, list[float]] = {NEVER: [], LEAST: []}
        for turn in range(8):  # in turns: a GPU slows down as it warms up
            least = (NEVER, LEAST)[turn % 2]
            with (
                mock.patch.object(packing, "LONG", least),
                mock.patch.object(packing, "LONG_AFTER", least),
                mock.patch.object(packing, "BEHIND_WORK", least),
            ):
                took, *_ = drive(engine, ask(streams, tokens, 1, 128256, 100 * (streams + tokens) + turn))
            if turn > 1:
                seconds[least].append(took)
        rates = [streams * tokens / statistics.median(each) for each in seconds.values()]
        print(f"| {streams} x {tokens:,} | {rates[0]:,.0f} | {rates[1]:,.0f} |", flush=True)
    engine.close()


def short() -> None:
    """Milliseconds of short prompts with CUDA graphs and without, alone and beside running answers."""
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.beside import config
    from tests.gpu.native import ask, drive, large

    options = NativeOptions(max_running=256, max_batched_tokens=8192, max_model_len=4096, warm=True)
    for name, sizes in (("graphs", prompt_graphs.ROWS), ("launched one by one", ())):
        with mock.patch.object(prompt_graphs, "ROWS", sizes):
            engine = assemble(describe(large(config("8b"))), options)
        seeds = iter(range(1, 1_000_000))
        found = []
        for tokens in SHORT:
            times = [drive(engine, ask(1, tokens, 1, 128256, next(seeds)))[0] for _ in range(9)]
            found.append(f"{tokens} tokens {statistics.median(times) * 1e3:.1f} ms")
        print(f"{name}: {', '.join(found)}", flush=True)
        for running in (1, 60, 200):
            for request in ask(running, 256, 400, 128256, next(seeds)):
                engine.submit(request)
            took: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(120):
                arrives = turn > 40 and turn % 8 == 0
                if arrives:
                    engine.submit(ask(1, 256, 2, 128256, next(seeds))[0])
                began = time.perf_counter()
                for _ in range(4):  # steps run ahead: the one with the prompt is among them
                    engine.step()
                took[arrives].append(time.perf_counter() - began)
            while engine.has_work():
                engine.step()
            plain, mixed = (statistics.median(each) * 1e3 for each in took.values())
            print(f"  {running} running: four steps {plain:.1f} ms, with a prompt of 256 tokens {mixed:.1f} ms")
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def memory() -> None:
    """Which graphs are left when the process may take so many MiB more while they are captured, and what prompts take.

    With less memory there are fewer sizes, and never an error.
    """
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.beside import config
    from tests.gpu.native import ask, drive, large

    options = NativeOptions(max_running=64, max_batched_tokens=4096, max_model_len=4096, warm=True, kv_blocks=2048)
    total, capture = torch.cuda.get_device_properties(0).total_memory, prompt_graphs.PromptGraphs.capture
    for mib in (0, 32, 128, 512, 8192):
        made: list[prompt_graphs.PromptGraphs] = []

        def limited(self: Any, *given: Any, mib: int = mib, made: Any = made, **named: Any) -> str:
            made.append(self)
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (mib << 20)) / total)
            try:
                return capture(self, *given, **named)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

        with mock.patch.object(prompt_graphs.PromptGraphs, "capture", limited):
            engine = assemble(describe(large(config("8b"))), options)
        seconds = [drive(engine, ask(1, tokens, 4, 128256, tokens))[0] for tokens in (64, 512, 2000)]
        sizes = sorted({size for size, _ in made[-1].graphs})
        print(f"{mib} MiB: {len(sizes)} sizes, {sizes[-1:]} rows; 64, 512 and 2,000 tokens took {seconds}", flush=True)
        assert sizes == made[-1].sizes or not sizes
        engine.close()
        del engine, made
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["plans", "kernels", "engine", "short"])
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())
    for what in asked.what:
        {"plans": plans, "kernels": kernels, "engine": whole, "short": short, "memory": memory}[what]()


if __name__ == "__main__":
    main()
