"""Kernels of the native engine against plain torch in float32.

python -m tests.gpu.kernels                                (on a GPU; every check on its own, then times)
TRITON_INTERPRET=1 python -m tests.gpu.kernels [uneven] --device cpu   (without one, slowly)
"""

import argparse
import itertools
import random
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.native.cuda import dense, few_rows, fp8, modules, rewrite, rows
from penstock.workers.engines.native.cuda import packing as chunks
from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.cuda.dense import DenseAttention
from penstock.workers.engines.native.cuda.device_sampler import DeviceSampler
from penstock.workers.engines.native.cuda.packing import LONG, PromptChunk
from penstock.workers.engines.native.cuda.paged import PagedAttention, PagedBatch, Scratch, tile_rows
from penstock.workers.engines.native.model import quantize, sampler
from penstock.workers.engines.native.model.attention import AttentionParams, ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.pool import KvPool, KvShape

BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


class Case:
    """A pool with random contents, and a batch of decodes and chunks of prompts over it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int = 8,
                 decodes: tuple[int, ...] = (1, 9, 70, 200), chunks: tuple[tuple[int, int], ...] = ((0, 40), (33, 150)),
                 layers: int = 2, least: int = LONG, stored: torch.dtype | None = None) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.dim, self.device, self.dtype = heads, kv_heads, dim, device, dtype
        ends = [*decodes, *(start + count for start, count in chunks)]
        blocks = sum(-(-end // page) for end in ends)
        ids = list(range(blocks))
        random.Random(3).shuffle(ids)
        self.pool, self.twin = (
            KvPool(KvShape(layers, kv_heads, dim), blocks, page, stored or dtype, device, dtype) for _ in range(2)
        )
        self.pool.data.copy_(torch.randn(self.pool.data.shape, device=device))
        self.twin.data.copy_(self.pool.data)
        width = max(-(-end // page) for end in ends) + 1
        tables = torch.zeros((len(ends), width), dtype=torch.int32)
        self.spans, table_rows, positions, tiles = [], [], [], []
        for table_row, end in enumerate(ends):
            mine = [ids.pop() for _ in range(-(-end // page))]
            tables[table_row, : len(mine)] = torch.tensor(mine)
            start = end - 1 if table_row < len(decodes) else chunks[table_row - len(decodes)][0]
            count = end - start
            row = len(table_rows)
            self.spans.append(TokenSpan(row, start, count, mine))
            if table_row >= len(decodes):
                most = tile_rows(dtype)
                tiles += [(row + at, start + at, min(most, count - at), table_row) for at in range(0, count, most)]
            table_rows += [table_row] * count
            positions += range(start, end)
        ends = [sum(span.count for span in self.spans[: n + 1]) for n in range(len(self.spans))]
        long = tuple(
            PromptChunk(end - span.count, span.start, span.count, table_row)
            for table_row, (span, end) in enumerate(zip(self.spans, ends, strict=True))
            if table_row >= len(decodes) and span.count >= least
        )
        rest = [tile for tile in tiles if not any(chunk.table_row == tile[3] for chunk in long)]
        together = [chunk for chunk in long if not chunk.start]
        grouped = [tuple(same) for _, same in itertools.groupby(together, lambda chunk: chunk.rows)]
        grouped += [(chunk,) for chunk in long if chunk.start]
        self.tokens = len(table_rows)
        as_ints: Callable[[Any], torch.Tensor] = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
        self.batch = PagedBatch(
            tables.to(device), as_ints(table_rows), as_ints(positions), len(decodes), as_ints(tiles) if tiles else None,
            tuple(grouped), as_ints(rest) if rest else None,
        )  # fmt: skip
        self.dense = DenseAttention(device)
        self.scratch = Scratch(max(1, len(decodes)), kv_heads, heads, dim, device)
        both = torch.randn((self.tokens, heads + 2 * kv_heads, dim), device=device).to(dtype)
        self.q, self.k, self.v = both.split([heads, kv_heads, kv_heads], dim=1)
        angles = torch.randn((1, self.tokens, dim // 2), device=device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.float().chunk(2, -1)
        cos, sin = self.cos[0, :, None].float(), self.sin[0, :, None].float()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(self.dtype)

    def compare(self, rotate: bool, window: int | None, softcap: float, sinks: bool) -> tuple[float, float]:
        sink = torch.randn(self.heads, device=self.device).to(self.dtype) if sinks else None
        rotation = modules.Rotation()
        if rotate:
            # As GPT-OSS makes them if there are sinks: a token's are not beside each other.
            turned = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (self.cos, self.sin))
            rotation._deferred = tuple(turned) if sinks else (self.cos, self.sin)  # type: ignore[assignment]
        paged = PagedAttention(self.pool, self.scratch, rotation, self.batch, self.dense)
        found = paged.attend(1, self.q, self.k, self.v, AttentionParams(self.dim**-0.5, window, softcap, sink))
        q, k = (self.rotated(self.q), self.rotated(self.k)) if rotate else (self.q, self.k)
        twin = self.twin
        data = twin.data.float()
        exact = KvPool(twin.shape, twin.blocks, twin.block_size, torch.float32, self.device)
        exact.data.copy_(data)
        spans = self.spans
        reference = ReferenceAttention.__new__(ReferenceAttention)
        kept = exact.clear
        exact.clear = lambda blocks: None  # type: ignore[method-assign]
        reference.__init__(exact, spans)  # type: ignore[misc]
        exact.clear = kept  # type: ignore[method-assign]
        params = AttentionParams(self.dim**-0.5, window, softcap, None if sink is None else sink.float())
        expected = reference.attend(1, q.float(), k.float(), self.v.float(), params)
        stored = apart(self.pool.data.float(), exact.data)
        return apart(found, expected), stored


def check_attention(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != torch.float32 and device.type == "cpu":
            continue
        for heads, kv_heads, dim in ((8, 2, 128), (4, 2, 16), (4, 4, 80)):
            for rotate, window, softcap, sinks in (
                (True, None, 0.0, False), (False, None, 0.0, True), (True, 16, 0.0, True), (True, None, 5.0, False),
                (False, 100, 0.0, False),
            ):  # fmt: skip
                for prompts in (((0, 40), (33, 150)), ()):  # without prompts one kernel stores and attends
                    case = Case(device, dtype, heads, kv_heads, dim, chunks=prompts)
                    out, stored = case.compare(rotate, window, softcap, sinks)
                    good = out < BOUND[dtype] and stored < BOUND[dtype]
                    print(f"attention {dtype} {heads}/{kv_heads} x {dim} {'mixed' if prompts else 'decode'} "
                          f"rotate={rotate} window={window} cap={softcap} sinks={sinks}: {out:.1e}, "
                          f"stored {stored:.1e}" + ("" if good else "   WRONG"))  # fmt: skip
    check_uneven(device)


def check_uneven(device: torch.device) -> None:
    """Rows of very different lengths, whose keys are divided among programs."""
    rows = (tuple(range(1, 20)), (5, 900), (3,) * 10 + (700, 64, 65, 129, 32, 31, 33))
    if device.type != "cpu":
        rows += ((576,) * 60 + (32_000,) * 2 + (1, 4096), (100,) * 250 + (8192,) * 3)
    for decodes in rows:
        for softcap, sinks in ((0.0, False), (5.0, True)):
            case = Case(device, torch.float32, 8, 2, 16, decodes=decodes, chunks=())
            out, stored = case.compare(True, None, softcap, sinks)
            good = out < BOUND[torch.float32] and stored < BOUND[torch.float32] and not case.scratch.counters.any()
            print(f"{len(decodes)} decodes of {min(decodes)} to {max(decodes)} sinks={sinks}: {out:.1e}, "
                  f"stored {stored:.1e}" + ("" if good else "   WRONG"))  # fmt: skip


def check_narrow_pool(device: torch.device) -> None:
    """Pools of 8-bit floats, with values read in pairs, and one by one if heads are small."""
    if device.type == "cpu":
        return
    for heads, kv_heads, dim in ((8, 2, 128), (4, 4, 80), (4, 2, 16)):
        case = Case(device, torch.bfloat16, heads, kv_heads, dim, stored=torch.float8_e4m3fn)
        out, stored = case.compare(True, None, 0.0, False)
        good = out < 0.05 and stored < 0.05
        print(f"attention, 8-bit pool {heads}/{kv_heads} x {dim}: {out:.1e}, stored {stored:.1e}"
              + ("" if good else "   WRONG"))  # fmt: skip


def check_long(device: torch.device) -> None:
    """Chunks outside of the pages: from the beginning, behind cached tokens, beside short ones."""
    small = device.type == "cpu"
    dtype, step = (torch.float32, 16) if small else (torch.bfloat16, chunks.STEP)
    mixed = ((0, 3), (0, 50), (0, 64), (37, 20), (32, 48))
    equal = ((0, 32), (0, 32))  # one group without padding
    if not small:
        mixed, equal = ((0, 100), (0, 2500), (0, 2300), (1111, 2900), (1024, 2048)), ((0, 2048), (0, 2048))
    with mock.patch.object(chunks, "STEP", step), mock.patch.object(dense, "STEP", step):
        for heads, kv_heads, dim in ((8, 2, 128), (6, 3, 16), (32, 8, 64)):
            for rotate, window, softcap, sinks in ((True, None, 0.0, False), (True, step, 0.0, False)):
                least = 20 if small else LONG
                for ranges, decodes in ((mixed, (9,)), (equal, ())):
                    case = Case(device, dtype, heads, kv_heads, dim, chunks=ranges, decodes=decodes, least=least)
                    out, stored = case.compare(rotate, window, softcap, sinks)
                    wrong = "" if out < BOUND[dtype] and stored < BOUND[dtype] and case.dense.enabled else "   WRONG"
                    print(f"long chunks {dtype} {heads}/{kv_heads} x {dim} {ranges} window={window}: {out:.1e}, "
                          f"stored {stored:.1e}{wrong}")  # fmt: skip


def check_rows(device: torch.device) -> None:
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        x = torch.randn((3, 4096), device=device).to(dtype)
        for count, out_features, in_features in ((1, 136, 512), (1, 40, 1200)):
            linear = modules.Linear(
                torch.randn((out_features, in_features), device=device).to(dtype) * in_features**-0.5,
                torch.randn(out_features, device=device).to(dtype),
            )
            given = x[:count, :in_features].contiguous()
            residual = torch.randn((count, out_features), device=device).to(dtype)
            expected = residual.double() + torch.nn.functional.linear(
                given.double(), linear.weight.double(), linear.bias.double() if linear.bias is not None else None
            )
            print(f"gemv {dtype} {count} x {in_features} -> {out_features}: "
                  f"{apart(linear.gemv(given, residual), expected):.1e}")  # fmt: skip
        check_fused(device, dtype)
    logits = torch.randn((5, 9000), device=device)
    logits[3, 77] = logits[3, 4099] = 9.0
    keys = [sampler.key(seed, 0, 5) for seed in range(5)]
    temperatures = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0], device=device)
    noisy = torch.where(
        temperatures[:, None] > 0,
        logits / temperatures.clamp(min=1e-5)[:, None] + sampler.gumbel(keys, 9000, device),
        logits,
    )
    signed = torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys], device=device)
    drawn, latest, best = (torch.zeros(64, dtype=torch.int32, device=device) for _ in range(3))
    targets = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32, device=device)
    counters = torch.zeros(5, dtype=torch.int32, device=device)
    scores = torch.zeros(64, device=device)
    words = -(-9000 // 32)
    masks = torch.randint(-(1 << 31), (1 << 31) - 1, (2, words), device=device).to(torch.int32)
    numbers = torch.tensor([-1, 0, 1, -1, 0], dtype=torch.int32, device=device)
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = bits.reshape(2, -1)[numbers.clamp(min=0).long(), :9000].bool() | (numbers < 0)[:, None]
    for masked in (False, False, True):
        rows.sample[(5, 3)](
            logits, signed, temperatures, targets, scores, best, counters, latest, drawn, numbers, masks, scores, best,
            9000, 9000, CHUNKS=3, CHUNKS_P=4, CHUNK=4096, BLOCK=1024, RANDOM=True, MASKED=masked, WORDS=words,
            CUT=False, num_warps=4,
        )  # fmt: skip
        expected = noisy.masked_fill(~allowed, float("-inf")).argmax(-1) if masked else noisy.argmax(-1)
        print(f"draws{' with masks' if masked else ''}:", drawn[:5].tolist(), "expected", expected.tolist(),
              "by table row", latest[:5].tolist())  # fmt: skip


def check_fused(device: torch.device, dtype: torch.dtype) -> None:
    """Norm, gate and activation within the product of one row."""
    for inner, wide in ((512, 72), (1200, 40)):
        x = torch.randn((1, 1, inner), device=device).to(dtype)
        for kind in (rows.ROUNDED, rows.SHIFTED):
            norm = modules.RmsNorm(torch.rand(inner, device=device).to(dtype), 1e-6, kind)
            weight = torch.randn((2 * wide, inner), device=device).to(dtype) * inner**-0.5
            linear = modules.Linear(weight, torch.randn(2 * wide, device=device).to(dtype))
            factor = norm.weight.double() + (1 if kind == rows.SHIFTED else 0)
            normal = x.double() * (x.double().pow(2).mean() + 1e-6).rsqrt() * factor
            both = torch.nn.functional.linear(normal, weight.double(), linear.bias.double())
            for act, function in ((rows.SILU, torch.nn.functional.silu), (rows.GELU_TANH, gelu)):
                low, high = both.chunk(2, -1)
                print(f"norm and gate {dtype} {inner} -> {wide} kind {kind} act {act}: "
                      f"{apart(linear.gemv(x, None, norm, act), function(low) * high):.1e}")  # fmt: skip
            print(f"norm {dtype} {inner} -> {2 * wide} kind {kind}: {apart(linear.gemv(x, None, norm), both):.1e}")


def check_narrow(device: torch.device) -> None:
    """Layers of 8-bit floats: one row by a kernel that leaves the input as it is; a few by another; more by torch."""
    if device.type != "cpu":
        inner, wide = 1024, 208
        layer = torch.nn.Linear(inner, 2 * wide, bias=True, device=device, dtype=torch.bfloat16).requires_grad_(False)
        narrow = quantize.Fp8Linear(layer)
        linear = modules.Linear(narrow.weight, narrow.bias, narrow.scale)
        weight = narrow.weight.double() * narrow.scale.double()
        for count in (1, 5, 64, 80):
            x = torch.randn((1, count, inner), device=device, dtype=torch.bfloat16)
            expected = torch.nn.functional.linear(x.double(), weight, narrow.bias.double())
            print(f"8-bit {count} rows: {apart(linear(x), expected):.1e}, as before {apart(narrow(x), expected):.1e}")
        low, high = torch.nn.functional.linear(x[:, :1].double(), weight, narrow.bias.double()).chunk(2, -1)
        found = linear.gemv(x[:, :1].contiguous(), None, None, rows.SILU)
        print(f"8-bit gate: {apart(found, torch.nn.functional.silu(low) * high):.1e}")
    check_narrow_rows(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for count, out, inner in (
        (1, 80, 128),
        (5, 136, 512),
        (16, 64, 256),
        (17, 200, 1024),
        (40, 72, 512),
        (64, 64, 512),
    ):
        x, weight = (fp8.Narrow(*quantize.narrowed(torch.randn((each, inner), device=device))) for each in (count, out))
        bias, residual = (torch.randn(size, device=device).to(dtype) for size in ((out,), (count, out)))
        counts, added = fp8.counters(out, device), residual.clone()
        expected = residual.double() + torch.nn.functional.linear(
            x.values.double() * x.scales.double(), weight.values.double() * weight.scales.double(), bias.double()
        )
        shape = few_rows.shape_for(count, out, inner)
        assert shape is not None
        fp8.launch(shape, x, weight.values, weight.scales, bias, added, added, counts)
        off, good = apart(added, expected), not counts.any()
        print(f"8-bit product {shape}: {off:.1e}" + ("" if good and off < 2 * BOUND[torch.bfloat16] else "   WRONG"))


def check_narrow_rows(device: torch.device) -> None:
    """Rows that become 8-bit floats within the kernel before."""
    dtype, bound = (torch.float32, 0.1) if device.type == "cpu" else (torch.bfloat16, 0.04)  # one truncates
    for count, width in ((1, 64), (3, 1200), (70, 512)):
        x, added = (torch.randn((1, count, width), device=device).to(dtype) for _ in range(2))
        norm = modules.RmsNorm(torch.rand(width, device=device).to(dtype), 1e-6, rows.ROUNDED)
        total = (x + added).double()
        expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
        given = x.clone()
        low, high = x.double().chunk(2, -1)
        for name, narrow, wanted in (
            ("row", fp8.narrowed(x), x.double()),
            ("norm", fp8.normalised(given, norm, added), expected),
            ("gate", fp8.gated(x, rows.SILU), torch.nn.functional.silu(low) * high),
        ):
            off = apart((narrow.values.double() * narrow.scales.double()), wanted)
            print(f"8-bit {name} of {count} x {width}: {off:.1e}" + ("" if off < bound else "   WRONG"))
        print(f"8-bit norm adds: {apart(given, total):.1e}")


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def check_modules(device: torch.device) -> None:
    from transformers import AutoModelForCausalLM

    from tests.workers.engines.native.models import CONFIGS

    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).to(device).eval().requires_grad_(False)
        _, counts = rewrite.rewrite(model)
        print(name, dict(counts))


def check_head(device: torch.device) -> None:
    """Logits in float32 of values of 16 bits, by the kernel for one row, by torch, and by that of equal rows."""
    # The interpreter multiplies no bfloat16.
    hidden, vocab, dtype = (128, 300, torch.float16) if device.type == "cpu" else (4096, 128_256, torch.bfloat16)
    plain = torch.nn.Linear(hidden, vocab, device=device, dtype=dtype).requires_grad_(False)
    for count, invariant in ((1, False), (5, False), (1, True), (5, True)):
        head = modules.Linear(plain.weight, plain.bias, None, torch.float32)
        head.invariant = invariant
        x = torch.randn((1, count, hidden), device=device).to(dtype)
        found = head(x)
        expected = torch.nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
        off = float((found - expected).norm() / expected.norm())
        good = found.dtype == torch.float32 and found.shape == expected.shape and off < 1e-5
        print(f"head {count} rows invariant={invariant}: {off:.1e}, rounded {apart(plain(x), expected):.1e}"
              + ("" if good else "   WRONG"))  # fmt: skip


LIMITS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    *({"temperature": 0.6, "top_p": each} for each in (0.0, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999999)),
    *({"temperature": 1.0, "top_k": each} for each in (1, 2, 20, 1000, 1 << 40)),
    *({"temperature": 1.3, "min_p": each} for each in (1e-4, 0.1, 0.7, 1.0)),
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 2.0, "top_p": 0.95, "top_k": 64, "min_p": 0.05},
    {"temperature": 1e-3, "top_p": 0.9},
)


def check_cutoff(device: torch.device) -> None:
    """What min_p, top_k and top_p keep, and draws from it, as the sorting of ``sampler`` says; also of equal logits."""
    vocab = 2500 if device.type == "cpu" else 128_256
    wanted = [Sampling(seed=row, **each) for row, each in enumerate(LIMITS)]
    penalised = Sampling(temperature=0.7, top_p=0.9, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2)
    draws = [drawn_by(row, sampling) for row, sampling in enumerate([*wanted, penalised])]
    all_draws, draws = draws, draws[:-1]
    count, sequences, lengths = len(draws), [each.sequence for each in draws], [each.length for each in draws]
    random_rows = [row for row, each in enumerate(wanted) if each.temperature > 0]
    targets = torch.arange(count + 1, dtype=torch.int32, device=device)
    upload = Upload(1 << 16, device)
    latest = torch.zeros(count + 1, dtype=torch.int32, device=device)
    made = DeviceSampler(vocab, count + 1, upload, latest)
    upload.begin()
    parameters, of_all = made.parameters(draws), made.parameters(all_draws)
    upload.send()
    assert parameters is not None
    numbers = torch.arange(count, dtype=torch.int32, device=device) % 3 - 1
    masks = torch.randint(-(1 << 31), (1 << 31) - 1, (2, -(-vocab // 32)), device=device).to(torch.int32)
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = bits.reshape(2, -1)[numbers.clamp(min=0).long(), :vocab].bool() | (numbers < 0)[:, None]
    for step, masked in itertools.product((0.0, 0.25, 2.0), (False, True)):
        logits = 3 * torch.randn((count, vocab), device=device)
        if step:  # many are equal, some of them zeros of both signs
            logits = (logits / step).round() * step
        seen = logits.masked_fill(~allowed, float("-inf")) if masked else logits
        made._launch(logits, targets, parameters, made._sampled, (numbers, masks) if masked else None, random=True)
        found = made._sampled[:count].tolist()
        scaled = seen / torch.tensor([max(each.temperature, 1e-5) for each in wanted], device=device)[:, None]
        kept = sampler.narrow(scaled[random_rows], [sequences[row] for row in random_rows]) > float("-inf")
        least, last = made._least[random_rows, None], made._last[random_rows, None]
        ours = (scaled[random_rows] > least) | (
            (scaled[random_rows] == least) & (torch.arange(vocab, device=device) <= last)
        )
        ours &= seen[random_rows] > float("-inf")
        expected = sampler.choose(seen, sequences, lengths).tokens.tolist()
        # Sums are rounded otherwise, which may decide about tokens that are hardly ever drawn.
        off = (scaled[random_rows].double().softmax(-1) * (ours != kept)).sum(-1).tolist()
        wrong = [row for row, each in zip(random_rows, off, strict=True) if each > 1e-5]
        others = [row for row in range(count) if found[row] != expected[row]]
        print(f"cut off{', equal logits' if step else ''}{', masks' if masked else ''}: {int(kept.sum())} kept"
              + (f"   WRONG: {[LIMITS[row] for row in wrong]}" if wrong else "")
              + (f"   WRONG tokens: {[LIMITS[row] for row in others]}" if others else ""))  # fmt: skip

    logits = 3 * torch.randn((count + 1, vocab), device=device)
    expected = sampler.choose(logits, [*sequences, all_draws[-1].sequence], [*lengths, 4]).tokens.tolist()
    for way, most in {"sorted": logits.numel(), "by kernels": 0}.items():
        with mock.patch.object(sampler, "DRAWN_LOGITS", most):
            chosen, fewer = made.sample(logits, all_draws, targets, of_all), made.sample(
                logits[:-1], draws, targets, parameters
            )  # fmt: skip
        assert isinstance(chosen, sampler.Chosen)
        others = (fewer.tokens if isinstance(fewer, sampler.Chosen) else fewer).tolist()
        good = chosen.tokens.tolist() == latest.tolist() == expected and chosen.logprobs is not None
        good &= others == expected[:-1]
        print(f"cut off beside a penalised row, {way}"
              + ("" if good else f"   WRONG: {latest.tolist()}, expected {expected}"))  # fmt: skip


def drawn_by(row: int, sampling: Sampling) -> chunks.Draw:
    sequence = Sequence(row, [1, 2, 3], 3, sampling, Stop(max_tokens=8), 0, [], b"")
    return chunks.Draw(sequence, chunks.TableRow(row, sequence), 4, row)


CHECKS = {
    "head": check_head,
    "cutoff": check_cutoff,
    "narrow": check_narrow,
    "narrow_pool": check_narrow_pool,
    "long": check_long,
    "rows": check_rows,
    "attention": check_attention,
    "modules": check_modules,
    "uneven": check_uneven,  # a part of "attention"
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="*", metavar="check", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    for name in asked.checks or list(CHECKS)[:-1]:
        try:
            CHECKS[name](torch.device(asked.device))
        except Exception:
            traceback.print_exc(limit=-6)


if __name__ == "__main__":
    main()
