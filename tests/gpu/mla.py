"""Multi-head latent attention of the native engine: its kernels, whole models, and speed at DeepSeek-V2-Lite's shape.

python -m tests.gpu.mla check                     (on a GPU: kernels against float64, tiny models against ``generate``)
python -m tests.gpu.mla speed [--tiles]           (16B with random weights; --tiles: other shapes of programs)
python -m tests.gpu.mla uneven                    (decodes of many lengths: splits by their number, and divided)
TRITON_INTERPRET=1 python -m tests.gpu.mla check --device cpu [--models]   (without a GPU, slowly)
"""

import argparse
import contextlib
import functools
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from penstock.workers.engines.native.cuda import dense, latent, paged, prompt_graphs
from penstock.workers.engines.native.cuda import packing as chunks
from penstock.workers.engines.native.cuda.dense import DenseAttention
from penstock.workers.engines.native.cuda.latent import LatentShape, make_scratch, paged_attention
from penstock.workers.engines.native.cuda.modules import Rotation, RotationForm
from penstock.workers.engines.native.cuda.packing import PromptChunk
from penstock.workers.engines.native.cuda.paged import PagedBatch, tile_rows
from penstock.workers.engines.native.model.attention import AttentionParams, Expansion, ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.pool import KvPool, KvShape

BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
FORMS = (RotationForm(0, True, True), RotationForm(1, True), RotationForm(1))  # DeepSeek V2, V3, halves


class Sizes:
    """Sizes of a model's latents and heads."""

    def __init__(self, heads: int, size: int = 512, rotated: int = 64, key: int = 128, value: int = 128) -> None:
        self.heads, self.size, self.rotated, self.key, self.value = heads, size, rotated, key, value


class Case:
    """A pool with random latents, and a batch of decodes and chunks of prompts over it."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sizes, decodes: tuple[int, ...],
        ranges: tuple[tuple[int, int], ...], *, page: int = 8, least: int = 1 << 30, stored: torch.dtype | None = None,
        layers: int = 2,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.sizes = device, dtype, sizes
        ends = [*decodes, *(start + count for start, count in ranges)]
        ids = list(range(sum(-(-end // page) for end in ends)))
        random.Random(3).shuffle(ids)
        shape = KvShape(layers, 1, sizes.size + sizes.rotated, latent=sizes.size)
        self.pool = KvPool(shape, len(ids), page, stored or dtype, device, dtype)
        for block in range(0, len(ids), 4096):
            part = self.pool.data[block : block + 4096]
            part.copy_(torch.randn(part.shape, device=device))
        tables = torch.zeros((len(ends), max(-(-end // page) for end in ends) + 1), dtype=torch.int32)
        self.spans: list[TokenSpan] = []
        table_rows, positions, tiles, long = [], [], [], []
        for table_row, end in enumerate(ends):
            mine = [ids.pop() for _ in range(-(-end // page))]
            tables[table_row, : len(mine)] = torch.tensor(mine)
            start = end - 1 if table_row < len(decodes) else ranges[table_row - len(decodes)][0]
            row, count = len(table_rows), end - start
            self.spans.append(TokenSpan(row, start, count, mine))
            if table_row >= len(decodes):
                most = tile_rows(dtype)
                tiles += [(row + at, start + at, min(most, count - at), table_row) for at in range(0, count, most)]
                if count >= least:
                    long.append(PromptChunk(row, start, count, table_row))
            table_rows += [table_row] * count
            positions += range(start, end)
        kept = {chunk.table_row for chunk in long}
        rest = [tile for tile in tiles if tile[3] not in kept]
        whole = [chunk for chunk in long if not chunk.start]
        groups = [tuple(same) for _, same in itertools.groupby(whole, lambda chunk: chunk.rows)]
        groups += [(chunk,) for chunk in long if chunk.start]

        def ints(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.batch = PagedBatch(
            tables.to(device), ints(table_rows), ints(positions), len(decodes), ints(tiles) if tiles else None,
            tuple(groups), ints(rest) if rest else None,
        )  # fmt: skip
        self.tokens = len(table_rows)
        self.dense = DenseAttention(device)
        self.scratch = make_scratch(shape, sizes.heads, max(1, len(decodes)), device, fixed=False)
        draw = [(sizes.heads, sizes.key + sizes.rotated), (1, sizes.size), (1, sizes.rotated)]
        self.q, self.latents, self.rotated = (
            torch.randn((self.tokens, *each), device=device).to(dtype) for each in draw
        )
        weight = torch.randn((sizes.heads, sizes.key + sizes.value, sizes.size), device=device) * sizes.size**-0.5
        self.expansion = Expansion(weight.to(dtype), sizes.key)
        angles = torch.randn((1, self.tokens, sizes.rotated // 2), device=device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def params(self, dtype: torch.dtype | None = None) -> AttentionParams:
        expansion = Expansion(self.expansion.weight.to(dtype or self.dtype), self.expansion.key_dim)
        return AttentionParams((self.sizes.key + self.sizes.rotated) ** -0.5, expansion=expansion)

    def turned(self, x: Tensor, form: RotationForm) -> Tensor:
        half = x.shape[-1] // 2
        low, high = (x[..., ::2], x[..., 1::2]) if form.in_pairs else (x[..., :half], x[..., half:])
        cos, sin = self.cos[0, :, None].double(), self.sin[0, :, None].double()
        parts = [low * cos - high * sin, high * cos + low * sin]
        return (torch.stack(parts, -1).flatten(-2) if form.out_pairs else torch.cat(parts, -1)).to(self.dtype)

    def attend(self, form: RotationForm | None) -> Tensor:
        rotation = Rotation()
        if form is not None:
            factors = torch.view_as_real(torch.complex(self.cos, self.sin)).unbind(-1)
            cos, sin = (torch.cat([each] * 2, -1) for each in (self.cos, self.sin))
            rotation._deferred = (cos, sin) if form.width else factors  # type: ignore[assignment]
            rotation.form = form
        paged = paged_attention(self.pool, self.scratch, rotation, self.batch, self.dense)
        # As transformers passes them on: a view of (1, heads, tokens, dim).
        query = self.q.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        return paged.attend(1, query, self.latents, self.rotated, self.params())

    def compare(self, form: RotationForm | None) -> tuple[float, float]:
        """Relative errors of attention and of what is stored."""
        exact = KvPool(self.pool.shape, self.pool.blocks, self.pool.block_size, torch.float64, self.device)
        exact.data.copy_(self.pool.data.double())
        found = self.attend(form)
        key = self.sizes.key
        q, rotated = self.q.double(), self.rotated.double()
        if form is not None:
            q = torch.cat([q[..., :key], self.turned(q[..., key:], form).double()], -1)
            rotated = self.turned(rotated, form).double()
        with mock.patch.object(exact, "clear"):
            reference = ReferenceAttention(exact, self.spans)
        expected = reference.attend(1, q, self.latents.double(), rotated, self.params(torch.float64))
        return apart(found, expected), apart(self.pool.data.double(), exact.data)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def judged(what: str, case: Case, form: RotationForm | None, bound: float = 0.0) -> bool:
    out, stored = case.compare(form)
    good = out < (bound or BOUND[case.dtype]) and stored < (bound or BOUND[case.dtype]) and case.dense.enabled
    print(f"{what}, {case.dtype}: {out:.1e}, stored {stored:.1e}" + ("" if good else "   WRONG"), flush=True)
    return good


def check_kernels(device: torch.device) -> bool:
    small = device.type == "cpu"
    good = True
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        tiny, odd = Sizes(4, 32, 8, 16, 12), Sizes(20, 96, 16, 24, 40)
        for sizes in (tiny, odd) if small else (tiny, odd, Sizes(16), Sizes(128)):
            for form in FORMS[:1] if small and sizes is odd else (*FORMS, None):
                for ranges in (((0, 40), (33, 70)), ()):
                    case = Case(device, dtype, sizes, (1, 9, 70, 200), ranges)
                    name = "mixed" if ranges else "decodes"
                    good &= judged(f"{sizes.heads} heads of {sizes.size}, {name}, {form and form[1:]}", case, form)
        case = Case(device, dtype, tiny, tuple(range(1, 20)), ())
        case.scratch = make_scratch(case.pool.shape, 4, 8, device, fixed=False)  # rows in three portions
        good &= judged("19 decodes", case, FORMS[0])
    good &= check_uneven(device)
    step = 16 if small else chunks.STEP
    mixed: tuple[tuple[int, int], ...] = ((0, 3), (0, 50), (0, 64), (37, 20), (32, 48))
    dtype = torch.float32 if small else torch.bfloat16
    if not small:
        mixed = ((0, 100), (0, 2500), (0, 2300), (1111, 2900), (1024, 2048))
    with mock.patch.object(chunks, "STEP", step), mock.patch.object(dense, "STEP", step):
        for values in (latent.EXPANDED_VALUES, 1):
            for ranges, decodes in ((mixed, (9,)), (((0, step * 4),) * 2, ())):
                with mock.patch.object(latent, "EXPANDED_VALUES", values):
                    sizes = Sizes(6, 32, 8, 16, 12) if small else Sizes(16)
                    case = Case(device, dtype, sizes, decodes, ranges, least=20 if small else 2048)
                    good &= judged(f"long chunks {ranges}, {values} values at once", case, FORMS[1])
    if not small:
        case = Case(device, torch.bfloat16, Sizes(16), (1, 9, 70, 200), ((0, 40),), stored=torch.float8_e4m3fn)
        good &= judged("a pool of 8-bit floats", case, FORMS[0], 0.05)
    return good


def check_uneven(device: torch.device) -> bool:
    """Rows of very different lengths, whose latents are divided among programs, and split in a fixed way."""
    good, small = True, device.type == "cpu"
    lengths = [tuple(range(1, 20)), (3,) * 10 + (700, 64, 65, 129, 15, 16, 17), (1, 32_000, 40)]
    shapes = [Sizes(4, 32, 8, 16, 12), Sizes(40, 32, 8, 16, 12)]  # of two programs
    if not small:
        lengths += [(576,) * 60 + (32_000,) * 3 + (1,), (100,) * 250 + (8192,) * 3]
        shapes += [Sizes(16), Sizes(128)]
    for sizes, decodes, fixed in itertools.product(shapes, lengths, (False, True)):
        if small and max(decodes) > 1000 and (fixed or sizes is not shapes[0]):
            continue  # a minute each
        case = Case(device, torch.float32 if small else torch.bfloat16, sizes, decodes, ())
        case.scratch = make_scratch(case.pool.shape, sizes.heads, len(decodes), device, fixed)
        case.scratch.accumulators.fill_(float("nan"))
        good &= judged(f"{len(decodes)} decodes of {min(decodes)} to {max(decodes)}, fixed={fixed}", case, FORMS[1])
        found, padded = case.attend(None), case.batch.positions.clone()
        padded[1] = -1  # as rows of a graph that a step does not use
        case.batch.decode_positions = padded
        found[1] = 0
        good &= apart(case.attend(None), found) < BOUND[case.dtype]
    return good


def one_by_one(engine: Any, asked: list[Any]) -> dict[object, list[int]]:
    """Answers of requests of which one comes with each step, so that prompts are computed beside decoded rows."""
    found: dict[object, list[int]] = {}
    left = list(asked)
    while left or engine.has_work():
        if left:
            engine.submit(left.pop(0))
        for output in engine.step().outputs:
            found.setdefault(output.key, []).append(output.token)
    return found


@mock.patch.object(prompt_graphs, "ROWS", (8, 16, 32, 64))
@mock.patch.object(prompt_graphs, "DECODES", 2)
def check_models(device: torch.device) -> bool:
    """Answers in float32 equal those of ``generate``: with and without graphs, with n-grams, and preempted.

    Graphs of prompts are small, so that decoded rows beside a prompt take one that has room for more of them.
    """
    from penstock.workers.engines.native.build import build
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.native import interpreted
    from tests.workers.engines.native import models

    torch.backends.cuda.matmul.allow_tf32 = False
    good, small = True, device.type == "cpu"
    lengths, count = ((1, 33), 3) if small else ((1, 9, 33, 47, 12, 2, 3, 5), 12)
    with tempfile.TemporaryDirectory() as folder:
        for name, more in itertools.product(
            ("deepseek_v2", "deepseek_v3"),
            ({}, {"warm": True}, {"max_batched_tokens": 7}, {"kv_blocks": 14},
             {"speculative_model": "ngram", "prompt_lookup_min": 1}),
        ):  # fmt: skip
            if small and more:
                continue
            path = models.save(name, Path(folder))
            options: dict[str, Any] = {"block_size": 8, "kv_blocks": 96, "dtype": "float32", "max_running": 8} | more
            with interpreted() if small else contextlib.nullcontext():
                engine = build(str(path), NativeOptions(**options))
            running: Any = engine.executor or engine.ahead
            kinds = {type(module).__name__ for module in running.model.forward.modules()}
            assert "MergedLinear" in kinds, "the kernels' rewrite did not fit"
            asked = [models.request(n, models.prompt(n), count) for n in lengths]
            first, again = (models.tokens(models.run(engine, asked)) for _ in range(2))
            wanted = {n: models.expected(path, models.prompt(n), count) for n in lengths}
            same = first == wanted == again == one_by_one(engine, asked)
            good &= same
            print(f"{name} {more}: {'as transformers' if same else 'WRONG'}", flush=True)
            engine.close()
    return good


def check(asked: argparse.Namespace) -> None:
    device = torch.device(asked.device)
    good = check_kernels(device)
    if device.type == "cuda" or asked.models:
        good &= check_models(device)
    print("all as expected" if good else "SOMETHING IS WRONG")
    sys.exit(not good)


def seconds(run: Any, times: int = 20) -> float:
    """Of one call, on the device, by a graph of ten."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times / 10


def speed_of_kernels(tiles: bool) -> None:
    """Attention of one layer, without its products: µs, and TB/s of latents."""
    device = torch.device("cuda")
    shapes = [latent.DECODE]
    if tiles:
        shapes += [LatentShape(*each) for each in itertools.product((16, 32, 64), (4, 8), (2, 3, 4))]
    for rows, context in ((1, 640), (1, 4096), (32, 640), (32, 4096), (256, 640), (128, 4096)):
        case = Case(device, torch.bfloat16, Sizes(16), (context,) * rows, (), page=32, layers=1)
        batch, query = case.batch, case.q.transpose(0, 1).contiguous().transpose(0, 1)
        best = []
        for shape in shapes:
            with mock.patch.object(latent, "DECODE", shape):
                paged = paged_attention(case.pool, case.scratch, Rotation(), batch)
                try:
                    took = seconds(lambda paged=paged, query=query, case=case: paged.attend(
                        0, query, case.latents, case.rotated, case.params()))  # fmt: skip
                except Exception as error:
                    print(f"  {shape}: {str(error)[:100]}")
                    continue
            best.append((took, shape))
        for took, shape in sorted(best, key=lambda each: each[0])[:4]:
            bytes_read = rows * context * 576 * 2
            print(f"{rows} x {context}: {took * 1e6:.1f} us, {bytes_read / took / 1e12:.2f} TB/s, {shape}", flush=True)


def uneven(asked: argparse.Namespace) -> None:
    """Attention of one layer, without its products, by ways of dividing latents among programs."""
    ways = {"by number": (0, 512)} | {
        f"{programs}/{part}": (programs, part) for programs in (132, 256) for part in (128, 512)
    }
    for heads, lengths in itertools.product((16, 128), (
        (640,), (640,) * 4, (640,) * 32, (576,) * 64, (576,) * 63 + (4096,), (576,) * 60 + (32_000,) * 4,
        (576,) * 256, (576,) * 250 + (8192,) * 6, tuple(range(64, 1088, 16)), tuple(range(64, 1088, 4)),
    )):  # fmt: skip
        case = Case(torch.device("cuda"), torch.bfloat16, Sizes(heads), lengths, (), page=32, layers=1)
        query, line = case.q.transpose(0, 1).contiguous().transpose(0, 1), []
        for name, (programs, part) in ways.items():
            with (
                mock.patch.object(paged, "PROGRAMS", programs or paged.PROGRAMS),
                mock.patch.object(latent, "COMBINED", part),
                mock.patch.object(paged, "LEAST_ROWS", 2 if programs else len(lengths) + 1),
            ):
                scratch = make_scratch(case.pool.shape, heads, len(lengths), case.device, fixed=False)
                attention = paged_attention(case.pool, scratch, Rotation(), case.batch)
                took = seconds(functools.partial(
                    attention.attend, 0, query, case.latents, case.rotated, case.params()))  # fmt: skip
            line.append(f"{name}: {took * 1e6:.1f}")
        ideal = sum(lengths) * 576 * 2 / 4.1e6
        print(f"{heads} heads, {len(lengths)} rows of {min(lengths)} to {max(lengths)}, us by programs/values combined "
              f"(at 4.1 TB/s {ideal:.1f}): {', '.join(line)}", flush=True)  # fmt: skip


def speed(asked: argparse.Namespace) -> None:
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu import beside
    from tests.gpu.native import ask, drive, large

    speed_of_kernels(asked.tiles)
    config = beside.config("mla")
    config.max_position_embeddings = 8192
    loaded = describe(large(config))
    options = NativeOptions(max_running=256, max_batched_tokens=8192, max_model_len=8192, warm=True)
    engine = assemble(loaded, options)
    blocks, size = engine.info.total_blocks, engine.info.block_size
    print(f"{blocks * size:,} tokens fit, {loaded.shape.block_bytes(1, loaded.dtype):,} bytes each", flush=True)
    for rows, prompt in ((1, 640), (32, 640), (256, 640), (1, 4096), (32, 4096), (128, 4096)):
        drive(engine, ask(rows, prompt, 4, loaded.vocab_size, 1))
        took, first, _, times = drive(engine, ask(rows, prompt, 64, loaded.vocab_size, 2))
        steps = sorted(times[-40:])
        print(f"{rows} x {prompt}: prompts {rows * prompt / first:,.0f} tokens/s, a step {steps[20] * 1e3:.2f} ms, "
              f"all {took:.2f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "speed", "uneven"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", action="store_true", help="check: whole models on a CPU, too")
    parser.add_argument("--tiles", action="store_true", help="speed: try other shapes of programs")
    asked = parser.parse_args()
    {"check": check, "speed": speed, "uneven": uneven}[asked.what](asked)


if __name__ == "__main__":
    main()
