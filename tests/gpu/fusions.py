"""What fused kernels, dependent launches and shapes of kernels do to a decode step of an 8B Llama with random weights.

python -m tests.gpu.fusions [sweep] [fp8] [fp8-kv]

The time is that of a captured graph, replayed: nothing of the host is in it.
"""

import random
import sys
import traceback
from typing import Any

import torch

from penstock.workers.engines.native.build import assemble
from penstock.workers.engines.native.cuda import modules, paged, rewrite
from penstock.workers.engines.native.cuda.fusions import FUSIONS
from penstock.workers.engines.native.model.loading import describe
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.quantize import quantize
from tests.gpu.native import ask, drive, large

VARIANTS: dict[str, tuple[bool, bool]] = {  # products, dependent
    "none": (False, False),
    "products": (True, False),
    "dependent": (False, True),
    "products, dependent": (True, True),
}
SIZES = (1, 2, 32, 128, 256)


def step_ms(executor: Any, size: int) -> float:
    """Of one replay of a new graph for ``size`` rows; the places are those of the last decode step."""
    with torch.inference_mode():
        executor.run_fixed(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor.run_fixed(size)
        for _ in range(3):
            graph.replay()
        found = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 4)
    return sorted(found)[len(found) // 2]


def use(products: bool, dependent: bool) -> None:
    FUSIONS.products, FUSIONS.dependent = products, dependent


def compare(engine: Any) -> None:
    for size in SIZES:
        drive(engine, ask(size, 512, 64, 128256, 40 + size))
        for name, (products, dependent) in VARIANTS.items():
            if size > 1 and products:
                continue
            use(products, dependent)
            print(f"{size:>3} rows, {name}: {step_ms(engine.ahead, size):.3f} ms a step", flush=True)
    use(True, True)


def tiles(engine: Any) -> None:
    """Positions that attention takes at a time, and programs that it is split into."""
    usual = paged.DECODE, paged.PROGRAMS
    for size, context in ((1, 512), (1, 3900), (8, 512), (32, 512)):
        drive(engine, ask(size, context, 64, 128256, 140 + size))
        line = []
        for tile in (32, 64, 128):
            for paged.PROGRAMS in (64, 128, 256):
                paged.DECODE = usual[0]._replace(tile=tile)
                line.append(f"{tile}, {paged.PROGRAMS}: {step_ms(engine.ahead, size):.3f}")
        print(f"{size} x {context} (positions, programs), ms:", "; ".join(line), flush=True)
        paged.DECODE, paged.PROGRAMS = usual


KINDS = {
    "qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336), "gate and up": (28672, 4096), "head": (128256, 4096),
}  # fmt: skip
SMALL = (
    (8, 512, 4, 4), (4, 1024, 2, 4), (4, 1024, 3, 4), (4, 512, 3, 2), (4, 2048, 2, 4), (8, 1024, 2, 8), (2, 2048, 2, 4),
    (4, 1024, 4, 8), (8, 512, 2, 4), (4, 1024, 3, 2), (4, 4096, 2, 4),
)  # fmt: skip
LARGE = (
    (8, 1024, 2, 4), (8, 512, 2, 2), (8, 512, 3, 4), (8, 1024, 3, 4), (8, 1024, 2, 8), (4, 1024, 2, 4), (8, 2048, 2, 8),
    (8, 1024, 1, 4), (4, 2048, 2, 4), (8, 1024, 4, 8), (4, 4096, 2, 4), (8, 2048, 2, 4),
)  # fmt: skip


def sweep(engine: Any) -> None:
    """Shapes of the kernel for one row, one kind of product at a time; the best is kept for the next."""
    drive(engine, ask(1, 512, 64, 128256, 41))
    usual = modules.gemv_shape
    best: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    modules.gemv_shape = lambda *size: best.get(size[:2]) or usual(*size)
    for kind, size in KINDS.items():
        found = {}
        for shape in SMALL if size[0] < 8192 else LARGE:
            best[size] = shape
            found[shape] = step_ms(engine.ahead, 1)
        best[size] = min(found, key=lambda shape: found[shape])
        print(f"{kind}:", "; ".join(f"{shape} {ms:.3f}" for shape, ms in sorted(found.items(), key=lambda e: e[1])),
              flush=True)  # fmt: skip
    modules.gemv_shape = usual


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    random.seed(1)
    made = large()
    described = describe(made)
    if "fp8" in sys.argv:
        print("layers of 8-bit floats:", quantize(made))
        rewrite.ROUNDING_FP8 = 0.9  # noise of 8 bits grows from layer to layer if weights are random
    kv_dtype = "fp8" if "fp8-kv" in sys.argv else "auto"
    engine = assemble(
        described, NativeOptions(max_running=256, max_model_len=4096, warm=False, kv_blocks=8192, kv_dtype=kv_dtype)
    )
    for measure in (compare, tiles, sweep) if "sweep" in sys.argv else (compare,):
        try:
            measure(engine)
        except Exception:
            traceback.print_exc(limit=-5)


if __name__ == "__main__":
    main()
