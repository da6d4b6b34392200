"""How long the native engine's kernels take, beside what torch offers: an 8B Llama's shapes in bfloat16.

python -m tests.gpu.times [quick] [fp8] [head] [sums] [draws]

``fp8``: products of 8-bit floats by torch and by the kernel for few rows, in shapes that are chosen from; decodes over
a pool of 8-bit floats. ``head``: logits in bfloat16 and in float32, and a draw from them. ``sums``: products whose
partial sums may be bfloat16, as torch allows by default, or may not. ``draws``: with min_p, top_k and top_p.
"""

import itertools
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton

from penstock.schemas.requests import Sampling
from penstock.workers.engines.native.cuda import attend, few_rows, fp8, modules, paged
from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.cuda.device_sampler import DeviceSampler
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.attention import AttentionParams
from penstock.workers.engines.native.model.pool import KvPool
from penstock.workers.engines.native.model.quantize import FP8, narrowed
from tests.gpu.kernels import Case, drawn_by

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
DEVICE = torch.device("cuda")


def timed(call: Callable[[], object], times: int = 1) -> float:
    """Milliseconds of one of ``times`` things that a call does, as replayed by a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
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
    """By fixed numbers of splits, and divided as ``attend.divide`` does; the last batches have rows of many lengths."""
    even = (
        (1, 576),
        (1, 4096),
        (4, 640),
        (8, 640),
        (16, 640),
        (32, 576),
        (64, 576),
        (64, 2112),
        (128, 576),
        (256, 576),
    )
    batches = [(context,) * count for count, context in even]
    batches += [(576,) * 63 + (4096,), (576,) * 60 + (32_000,) * 4, (576,) * 250 + (8192,) * 6]
    batches += [tuple(range(64, 1088, 16)), tuple(range(64, 1088, 4))]
    for contexts in batches:
        count = len(contexts)
        case = Case(DEVICE, torch.bfloat16, 32, 8, 128, page=32, decodes=contexts, chunks=(), layers=16)
        bytes_read = sum(contexts) * 2 * 8 * 128 * 2
        params = AttentionParams(0.088)
        line, usual = [], paged.num_splits
        for parts in (1, 2, 4, 8, 16, 32, 0):
            scratch = paged.Scratch(count, 8, 32, 128, DEVICE, parts=32 * count)
            with (
                mock.patch.object(paged, "num_splits", lambda rows, kv_heads, parts=parts: parts),
                mock.patch.object(paged.Scratch, "divides", lambda *_, parts=parts: not parts),
            ):
                run = paged.PagedAttention(case.pool, scratch, modules.Rotation(), case.batch)
                ms = timed(lambda: [run.attend(n, case.q, case.k, case.v, params) for n in range(16)], 16)
            line.append(f"{parts or 'divided'}: {ms * 1e3 - 1.9:.1f}")
        print(
            f"decode {count} rows of {min(contexts)} to {max(contexts)}, us by splits (at 4.1 TB/s "
            f"{bytes_read / 4.1e6:.1f}, if fixed {usual(count, 8)}):",
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


def variants(rows: int, columns: int, inner: int) -> list[few_rows.FewRowsShape]:
    """Shapes of the product of few rows that could be the fastest."""
    found = []
    for tile, depth, splits in itertools.product((64, 128), (128, 256), (1, 2, 4, 8, 16)):
        programs = -(-columns // tile) * splits
        if inner % (splits * depth) or not (120 <= programs <= 900):
            continue
        for stages in (3, 4, 6):
            if 48_000 <= stages * (tile + rows) * depth <= 160_000:
                found.append(few_rows.FewRowsShape(rows, tile, depth, splits, 4, stages))
    return found


class Product:
    """A product of few rows over several layers' weights, so that none is in the cache."""

    def __init__(self, count: int, columns: int, inner: int, copies: int = 10) -> None:
        self.copies = copies
        self.x = fp8.narrowed(torch.randn((count, inner), device=DEVICE, dtype=torch.bfloat16))
        self.weights = [torch.randint(0, 100, (columns, inner), device=DEVICE, dtype=torch.uint8).view(FP8)
                        for _ in range(copies)]  # fmt: skip
        self.scales = torch.rand((columns, 1), device=DEVICE)
        self.counts = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        self.out = torch.empty((count, columns), device=DEVICE, dtype=torch.bfloat16)

    def ours(self, shape: few_rows.FewRowsShape) -> float:
        return timed(
            lambda: [
                fp8.launch(shape, self.x, weight, self.scales, None, None, self.out, self.counts)
                for weight in self.weights
            ],
            self.copies,
        )

    def torchs(self) -> float:
        return timed(
            lambda: [
                torch._scaled_mm(self.x.values, weight.t(), self.x.scales, self.scales.t(), out_dtype=torch.bfloat16,
                                 use_fast_accum=True) for weight in self.weights
            ],
            self.copies,
        )  # fmt: skip


def _compile(case: tuple[int, int, int]) -> None:
    """Fill Triton's cache, in a process of its own."""
    product = Product(*case, copies=1)
    for shape in variants(*case):
        fp8.launch(shape, product.x, product.weights[0], product.scales, None, None, product.out, product.counts)


def narrow_products() -> None:
    counts = (16, 32, 64, 128)
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(_compile, [(count, *size) for count in counts for size in SHAPES.values()], chunksize=1)
    for count in (8, *counts, 256, 512):
        totals = [0.0, 0.0]
        for name, size in SHAPES.items():
            product = Product(count, *size)
            usual = product.torchs()
            found = {shape: product.ours(shape) for shape in variants(max(16, count), *size)} if count <= 128 else {}
            best = sorted(found, key=lambda shape: found[shape])[:4]
            text = "; ".join(f"{tuple(shape[1:])} {found[shape] * 1e3:.1f}" for shape in best)
            floor = size[0] * size[1] / 4.1e6
            print(f"{count:>4} rows, {name}, us: at 4.1 TB/s {floor:.1f}, torch {usual * 1e3:.1f}; {text}", flush=True)
            totals[0] += usual
            totals[1] += found[best[0]] if best else usual
        print(f"{count:>4} rows, 32 layers: torch {totals[0] * 32:.2f} ms, ours {totals[1] * 32:.2f} ms", flush=True)


def narrow_rows() -> None:
    """Kernels that make rows of 8-bit floats."""
    norm = modules.RmsNorm(torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), 1e-5, 0)
    for count in (16, 32, 64, 128, 256, 2048, 8192):
        x, both = (torch.randn((count, width), device=DEVICE, dtype=torch.bfloat16) for width in (4096, 28672))
        added = torch.randn_like(x)
        times = {
            "row": timed(lambda: [fp8.narrowed(x) for _ in range(8)], 8),
            "norm": timed(lambda: [fp8.normalised(x, norm) for _ in range(8)], 8),
            "norm of a sum": timed(lambda: [fp8.normalised(x, norm, added) for _ in range(8)], 8),
            "gate": timed(lambda: [fp8.gated(both, 0) for _ in range(8)], 8),
        }
        print(f"{count:>4} rows, us:", ", ".join(f"{name} {ms * 1e3:.1f}" for name, ms in times.items()), flush=True)
    assert narrowed(x)[0].dtype == FP8


def narrow_decodes() -> None:
    params, usual = AttentionParams(0.088), paged.DECODE_FP8
    for count, context in ((1, 576), (8, 576), (32, 576), (128, 576), (256, 576), (64, 2112)):
        case = Case(DEVICE, torch.bfloat16, 32, 8, 128, page=32, decodes=(context,) * count, chunks=(), layers=8)
        read = count * context * 2 * 8 * 128
        line = []
        for kind in ("bfloat16", "8-bit"):
            pool = case.pool
            if kind == "8-bit":
                pool = KvPool(pool.shape, pool.blocks, pool.block_size, FP8, DEVICE, torch.bfloat16)
            run = paged.PagedAttention(pool, case.scratch, modules.Rotation(), case.batch)
            shapes = itertools.product((64, 128), (4, 8), (2, 3, 4)) if kind == "8-bit" else ((64, 4, 3),)
            for shape in shapes:
                paged.DECODE_FP8 = paged.DecodeShape(*shape)
                ms = timed(lambda: [run.attend(n, case.q, case.k, case.v, params) for n in range(8)], 8)
                line.append((ms * 1e3, f"{kind if kind != '8-bit' else shape} {ms * 1e3:.1f}"))
        first, *others = line
        print(f"decode {count} x {context}, us (8 bits at 4.1 TB/s {read / 4.1e6:.1f}):", first[1], "; ",
              ", ".join(text for _, text in sorted(others)), flush=True)  # fmt: skip
    paged.DECODE_FP8 = usual


def heads() -> None:
    """The output layer over two copies of its weight, so that none is in the cache."""
    for vocab, hidden in ((128_256, 4096), (151_936, 4096)):
        weights = [torch.randn((vocab, hidden), device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(2)]
        layers = {out: [modules.Linear(each, None, None, out) for each in weights] for out in (None, torch.float32)}
        for count in (1, 4, 32, 64, 128, 256):
            x, line, totals = torch.randn((count, hidden), device=DEVICE, dtype=torch.bfloat16), [], []
            expected = x.double() @ weights[0][:4096].double().T
            draws = DeviceSampler(
                vocab, count, Upload(1 << 16, DEVICE), torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
            )
            targets, drawn = (torch.zeros(count, dtype=torch.int32, device=DEVICE) for _ in range(2))
            keys, temperatures = torch.arange(count, device=DEVICE), torch.ones(count, device=DEVICE)
            for out, pair in layers.items():
                product = timed(lambda pair=pair: [each(x) for each in pair], 2) * 1e3
                both = timed(
                    lambda pair=pair: [draws.sample_random(e(x), targets, temperatures, keys, drawn) for e in pair], 2
                ) * 1e3  # fmt: skip
                off = float((pair[0](x)[:, :4096] - expected).abs().max())
                line.append(f"{out or 'bfloat16'} {product:.0f}, with a draw {both:.0f}, error up to {off:.1e}")
                totals.append(both)
            size = 2 * count * vocab * 2  # more bytes, written and read
            print(
                f"head {hidden} -> {vocab}, {count:>3} rows, us: {'; '.join(line)}; {totals[1] - totals[0]:+.1f} "
                f"(by bytes at 4.1 TB/s {size / 4.1e6:+.1f})"
            )


def draws() -> None:
    """A step's draws with what most models' own defaults cut, by kernels and by sorting."""
    vocab = 128_256
    limits: dict[str, dict[str, Any]] = {
        "temperature": {}, "top_p 0.95": {"top_p": 0.95}, "top_k 20": {"top_k": 20},
        "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8}, "min_p 0.05": {"min_p": 0.05},
    }  # fmt: skip
    for count in (1, 32, 256):
        logits = 2.5 * torch.randn((count, vocab), device=DEVICE)
        targets = torch.arange(count, dtype=torch.int32, device=DEVICE)
        for name, each in limits.items():
            sampling = [Sampling(temperature=0.7, seed=row, **each) for row in range(count)]
            drawn = [drawn_by(row, one) for row, one in enumerate(sampling)]
            upload = Upload(1 << 16, DEVICE)
            made = DeviceSampler(vocab, count, upload, torch.zeros(count + 1, dtype=torch.int32, device=DEVICE))
            upload.begin()
            parameters = made.parameters(drawn)
            upload.send()
            with mock.patch.object(sampler, "DRAWN_LOGITS", 0):
                kernels = timed(lambda: made.sample(logits, drawn, targets, parameters)) * 1e3
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with mock.patch.object(sampler, "DRAWN_LOGITS", logits.numel()):
                for _ in range(3):
                    begin.record()
                    made.sample(logits, drawn, targets, parameters)
                    end.record()
                    end.synchronize()
            sorting = begin.elapsed_time(end) * 1e3
            print(f"draws of {count:>3} rows, {name}, us: {kernels:.0f}, by sorting {sorting:.0f}")


def sums() -> None:
    """Products of few rows, which cuBLAS splits."""
    copies = 10
    for name, (out, inner) in SHAPES.items():
        weights = [torch.randn((out, inner), device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for count in (2, 8, 32, 128, 256):
            x, line = torch.randn((count, inner), device=DEVICE, dtype=torch.bfloat16), []
            expected = x.double() @ weights[0].double().T
            for allowed in (True, False):
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
                us = timed(lambda weights=weights, x=x: [x @ each.t() for each in weights], copies) * 1e3
                off = float((x @ weights[0].t() - expected).norm() / expected.norm())
                line.append(f"{'allowed' if allowed else 'not'} {us:.1f}, error {off:.2e}")
            print(f"partial sums in bfloat16, {name}, {count:>3} rows, us: {'; '.join(line)}")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    chosen: tuple[Callable[[], None], ...] = (decodes, prefills, products)
    if "quick" in sys.argv:
        chosen = (decodes,)
    if "fp8" in sys.argv:
        chosen = (narrow_decodes,) if "quick" in sys.argv else (narrow_products, narrow_rows, narrow_decodes)
    named = {"head": heads, "sums": sums, "draws": draws}
    chosen = tuple(named[each] for each in sys.argv[1:] if each in named) or chosen
    for measure in chosen:
        try:
            measure()
        except Exception:
            traceback.print_exc(limit=-5)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
