"""How long the native engine's kernels take, beside what torch offers: an 8B Llama's shapes in bfloat16.

python -m tests.gpu.times
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton

from tests.gpu.kernels import Case
from workers.engines.native.attention import AttentionParams
from workers.engines.native.cuda import attend, modules, paged

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
DEVICE = torch.device("cuda")


def timed(call: Callable[[], object], times: int = 1) -> float:
    """Milliseconds of one of ``times`` things that a call does, as replayed by a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(7):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / times)
    return sorted(found)[3]


def products() -> None:
    """Linear layers over 10 layers' weights, so that none is in the cache."""
    copies = 10
    weights = {
        name: [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for name, shape in SHAPES.items()
    }
    head = torch.randn((128256, 4096), device=DEVICE, dtype=torch.bfloat16)
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 8192):
        line, total = [], 0.0
        for name, (out, inner) in SHAPES.items():
            x = torch.randn((count, inner), device=DEVICE, dtype=torch.bfloat16)
            residual = torch.randn((count, out), device=DEVICE, dtype=torch.bfloat16)
            ms = timed(lambda: [torch.nn.functional.linear(x, w) for w in weights[name]], copies)
            text = f"{name} {ms * 1e3:.1f}"
            if out == 4096:
                added = timed(lambda: [torch.addmm(residual, x, w.t(), out=residual) for w in weights[name]], copies)
                text += f" (added {added * 1e3:.1f})"
            line.append(text)
            total += ms
        x = torch.randn((count, 4096), device=DEVICE, dtype=torch.bfloat16)
        ms = timed(lambda: [torch.nn.functional.linear(x, head) for _ in range(2)], 2) if count <= 512 else 0.0
        print(f"cuBLAS {count:>4} rows, us: {', '.join(line)}, head {ms * 1e3:.0f}; 32 layers {32 * total + ms:.2f} ms")


def decodes() -> None:
    for count, context in (
        (1, 576),
        (1, 4096),
        (4, 640),
        (8, 640),
        (16, 640),
        (32, 576),
        (64, 576),
        (64, 2112),
        (128, 576),
    ):
        case = Case(DEVICE, torch.bfloat16, 32, 8, 128, page=32, decodes=(context,) * count, chunks=(), layers=16)
        bytes_read = count * context * 2 * 8 * 128 * 2
        params = AttentionParams(0.088)
        line, usual = [], paged.num_splits
        for parts in (1, 2, 4, 8, 16, 32, 64):
            paged.num_splits = lambda rows, kv_heads, parts=parts: parts
            scratch = paged.Scratch(count, 8, 32, 128, DEVICE)
            run = paged.PagedAttention(case.pool, scratch, modules.Rotation(), case.batch)
            try:
                ms = timed(lambda: [run.attend(n, case.q, case.k, case.v, params) for n in range(16)], 16)
            except Exception as error:
                print(repr(error)[:200])
                continue
            line.append(f"{parts}: {ms * 1e3 - 1.9:.1f}")
        paged.num_splits = usual
        print(
            f"decode {count} x {context}, us by splits (at 4.1 TB/s {bytes_read / 4.1e6:.1f}, now {usual(count, 8)}):",
            ", ".join(line),
        )


def prefills() -> None:
    for count, length in ((16, 512), (4, 2048), (1, 8192)):
        case = Case(DEVICE, torch.bfloat16, 32, 8, 128, page=32, decodes=(), chunks=((0, length),) * count, layers=2)
        flops = count * 2 * 2 * length * length / 2 * 32 * 128
        out = torch.empty((case.tokens, 32, 128), device=DEVICE, dtype=torch.bfloat16)
        strides = (case.q.stride(0), case.q.stride(1), case.batch.tables.stride(0),
                   *(case.pool.data.stride(n) for n in range(3)))  # fmt: skip
        line = []
        assert case.batch.tiles is not None
        tiles = case.batch.tiles[case.batch.tiles[:, 1].argsort(descending=True)].contiguous()
        for tile, warps, stages in (
            (64, 4, 2),
            (64, 4, 3),
            (64, 8, 2),
            (64, 8, 3),
            (64, 8, 4),
            (128, 8, 2),
            (128, 8, 3),
        ):
            meta: dict[str, Any] = dict(
                HEADS=32, KV_HEADS=8, DIM=128, DIM_P=128, PAGE=32, ROWS=128, TILE=tile, WINDOW=0, CAPPED=False,
                SINKS=False, PRECISION="tf32", num_warps=warps, num_stages=stages,
            )  # fmt: skip
            try:
                ms = timed(lambda: attend.prefill[(32, len(tiles))](
                    case.q, case.pool.data, case.batch.tables, tiles, out, out, 1, 0.088, 1.0, *strides, **meta,
                ))  # fmt: skip
                line.append(f"{(tile, warps, stages)} {flops / ms / 1e9:.0f}")
            except Exception as error:
                line.append(repr(error)[:100])
        print(f"prefill {count} x {length}, TFLOP/s of (tile, warps, stages):", "; ".join(line))


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    for measure in (decodes,) if "quick" in sys.argv else (decodes, prefills, products):
        try:
            measure()
        except Exception:
            traceback.print_exc(limit=-5)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
