"""Mixtures of experts on a GPU: the kernels against plain torch, their speed with other tiles, and a step's kernels.

python -m tests.gpu.experts check | compile | sweep | steps [--shape moe] [--rows 1 32] [--json FILE]

``compile`` fills Triton's cache for ``sweep``.
TRITON_INTERPRET=1 python -m tests.gpu.experts check --device cpu     (without a GPU, slowly)
"""

import argparse
import copy
import itertools
import json
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.workers.engines.native.cuda import expert_kernels, experts, rows
from penstock.workers.engines.native.cuda.experts import (
    ExpertRouter,
    ExpertsShape,
    ExpertWeights,
    GatedExperts,
    Routing,
)
from penstock.workers.engines.native.model import quantize
from tests.workers.engines.native.models import CONFIGS, mxfp4_blocks

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Mixture(NamedTuple):
    """The sizes of a mixture of experts."""

    experts: int
    top: int
    width: int
    inner: int
    act: int
    bias: bool
    bits: int = 16  # of a weight


MIXTURES = {
    "moe": Mixture(128, 8, 2048, 768, rows.SILU, False),
    "gpt-oss": Mixture(32, 4, 2880, 2880, expert_kernels.CLAMPED, True),
    "moe-fp8": Mixture(128, 8, 2048, 768, rows.SILU, False, bits=8),
    "gpt-oss-mxfp4": Mixture(32, 4, 2880, 2880, expert_kernels.CLAMPED, True, bits=4),
}
SMALL = (
    Mixture(8, 2, 64, 48, rows.SILU, False), Mixture(5, 3, 96, 40, rows.GELU_TANH, True),
    Mixture(16, 4, 128, 192, expert_kernels.CLAMPED, True),
    Mixture(16, 4, 128, 192, expert_kernels.CLAMPED, True, bits=4), Mixture(8, 2, 64, 48, rows.SILU, False, bits=8),
)  # fmt: skip

WRONG: list[str] = []
CHECKED = {"small": SMALL} | {name: (mixture,) for name, mixture in MIXTURES.items()}


def made(mixture: Mixture, device: torch.device, dtype: torch.dtype) -> GatedExperts:
    count, width, inner = mixture.experts, mixture.width, mixture.inner

    def random(*shape: int, scale: float) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=scale)

    biases = [random(count, n, scale=0.1) if mixture.bias else None for n in (2 * inner, width)]
    weights = random(count, 2 * inner, width, scale=width**-0.5), random(count, width, inner, scale=inner**-0.5)
    layers = [ExpertWeights(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if mixture.bits == 4:
        layers = [
            ExpertWeights(values, layer.bias, scales)
            for layer in layers
            for values, scales in [quantize.packed(*mxfp4_blocks(layer.values))]
        ]
    if mixture.bits == 8:
        narrow = [quantize.narrowed(layer.values) for layer in layers]
        layers = [
            ExpertWeights(values, layer.bias, scales.squeeze(-1))
            for layer, (values, scales) in zip(layers, narrow, strict=True)
        ]
    return GatedExperts(*layers, mixture.act, 1.702, 7.0)


def chosen(mixture: Mixture, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Experts of rows, drawn, and their factors."""
    ids = torch.rand((count, mixture.experts), device=device).topk(mixture.top, -1).indices.to(torch.int32)
    return ids, torch.rand((count, mixture.top), device=device)


def expected(module: GatedExperts, x: Tensor, ids: Tensor, factors: Tensor, mixture: Mixture) -> Tensor:
    """In float64, an expert after the other."""
    out = torch.zeros((len(x), mixture.width), dtype=torch.float64, device=x.device)
    for expert in range(mixture.experts):
        which, place = torch.where(ids == expert)
        both = x[which].double() @ wide(module.gate_up, expert).t()
        if module.gate_up.bias is not None:
            both = both + module.gate_up.bias[expert].double()
        gate, up = both.chunk(2, -1)
        if mixture.act == expert_kernels.CLAMPED:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            hidden = gate * torch.sigmoid(1.702 * gate) * up
        elif mixture.act == rows.SILU:
            hidden = torch.nn.functional.silu(gate) * up
        else:
            hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
        part = hidden @ wide(module.down, expert).t()
        if module.down.bias is not None:
            part = part + module.down.bias[expert].double()
        out.index_add_(0, which, part * factors[which, place].double()[:, None])
    return out


def wide(layer: ExpertWeights, expert: int) -> Tensor:
    """An expert's weights in float64."""
    values = layer.values[expert]
    if layer.scales is None:
        return values.double()
    if values.dtype != torch.uint8:
        return values.double() * layer.scales[expert].double()[:, None]
    rows, step = len(values), quantize.STEP
    groups = 2 * layer.scales.shape[2]
    words = layer.scales[expert].view(rows // step, groups // 2, step)
    halves = values.view(rows // step, groups // 2, step, 32)
    table = torch.tensor([*quantize.VALUES, *(-value for value in quantize.VALUES)], dtype=torch.float64).to(
        values.device
    )
    parts = [
        table[bits.int()] * torch.exp2(((each >> 7) - 127 - quantize.SHIFT).double())[..., None]
        for bits, each in ((halves & 15, words & 0xFFFF), (halves >> 4, words >> 16 & 0xFFFF))
    ]
    return torch.cat(parts, -1).transpose(1, 2).reshape(rows, 32 * groups)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def report(line: str, right: bool) -> None:
    print(line + ("" if right else "   WRONG"), flush=True)
    if not right:
        WRONG.append(line)


def check(device: torch.device, names: list[str]) -> None:
    small = device.type == "cpu"
    torch.manual_seed(1)
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        for mixture in SMALL if small else [each for name in names for each in CHECKED[name]]:
            module = made(mixture, device, dtype)
            for count in (1, 2, 7, 40) if small else (1, 2, 7, 40, 256, 2000):
                x = torch.randn((count, mixture.width), device=device).to(dtype)
                ids, factors = chosen(mixture, count, device)
                residual = torch.randn((count, mixture.width), device=device).to(dtype)
                wanted = expected(module, x, ids, factors, mixture) + residual.double()
                module.residual = residual.clone()
                off = apart(module(x, ids, factors), wanted)
                report(f"experts {dtype} {tuple(mixture)} {count} rows: {off:.1e}", off < BOUND[dtype])
            same_bits(module, mixture, device, dtype)
    if small or "small" in names:
        check_routers(device)
        check_replaced(device)


def same_bits(module: GatedExperts, mixture: Mixture, device: torch.device, dtype: torch.dtype) -> None:
    """Whether a row's result is the same bits alone, among others, and in tiles of any number of rows."""
    counts = (1, 2, 9, 33) if device.type == "cpu" else (1, 2, 9, 33, 130, 700, 3000)
    x = torch.randn((counts[-1], mixture.width), device=device).to(dtype)
    ids, factors = chosen(mixture, counts[-1], device)
    whole = module(x, ids, factors)
    same = [n for n in counts if torch.equal(module(x[:n], ids[:n], factors[:n]), whole[:n])]
    report(f"the same bits for {same} of {list(counts)} rows", len(same) == len(counts))


def check_replaced(device: torch.device) -> None:
    """Whether experts of either order, with weights of either size, are replaced: only if they compute the same."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device=device).manual_seed(1)
    for name in ("qwen3_moe", "gpt_oss"):
        config: Any = CONFIGS[name]
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)
        modules = {"wide": model.model.layers[0].mlp.experts}
        modules["8 bits"] = quantize.Fp8Experts(model.model.layers[1].mlp.experts)
        if name == "gpt_oss":
            for inner in (config.intermediate_size, 32):  # one of a size that the kernels take, and one that is widened
                changed = copy.copy(config)
                changed.intermediate_size = inner
                stored = quantize.Mxfp4Experts(changed)
                for weight in stored.parameters():
                    weight.data.normal_() if weight.is_floating_point() else weight.data.random_(110, 126)
                modules[f"4 bits, {inner} wide"] = stored.to(device=device).requires_grad_(False)
        for kind, module in modules.items():
            report(
                f"experts of {name}, {kind}, are replaced", experts.experts_for(module, dtype, generator) is not None
            )


def check_routers(device: torch.device) -> None:
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (1, 5, 70)):
        if dtype != torch.float32 and device.type == "cpu":
            continue
        for number, top, width, routing, bias in (
            (128, 8, 256, Routing(expert_kernels.SOFTMAX, True), False),
            (12, 3, 96, Routing(expert_kernels.CHOSEN), True),
            (32, 4, 2880, Routing(expert_kernels.CHOSEN), True),
            (64, 6, 80, Routing(expert_kernels.SIGMOID, True, True, groups=8, kept=3, scale=2.5), False),
            (64, 6, 128, Routing(expert_kernels.SOFTMAX, False, groups=8, kept=3, best=1, scale=2.5), False),
        ):  # fmt: skip
            weight = torch.randn((number, width), device=device).to(dtype) * width**-0.5
            vectors = [torch.rand(number, device=device) if wanted else None for wanted in (bias, routing.corrected)]
            router = ExpertRouter(weight, *vectors, top, routing, torch.float32)
            x = torch.randn((count, width), device=device).to(dtype)
            _, factors, ids = router(x)
            wanted, ours = choose(x, weight, *vectors, top, routing), torch.zeros((count, number), device=device)
            ours.scatter_(1, ids.long(), factors)
            off = apart(ours, wanted)
            report(
                f"router {dtype} {number}, {top} of {width} {count} rows, {routing}: {off:.1e}", off < 2 * BOUND[dtype]
            )


def choose(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, top: int, routing: Routing
) -> Tensor:
    """The factors of all experts in float64: 0 where one is not chosen."""
    logits = x.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    scores = {
        expert_kernels.SOFTMAX: logits.softmax(-1), expert_kernels.CHOSEN: logits,
        expert_kernels.SIGMOID: logits.sigmoid(),
    }[routing.score]  # fmt: skip
    choice = scores if correction is None else scores + correction.double()
    if routing.groups > 1:
        grouped = choice.view(len(x), routing.groups, -1)
        kept = grouped.topk(routing.best, -1).values.sum(-1).topk(routing.kept, -1).indices
        mask = torch.zeros(grouped.shape[:2], device=x.device).scatter_(1, kept, 1.0)[:, :, None] > 0
        choice = grouped.masked_fill(~mask, float("-inf")).flatten(1)
    ids = choice.topk(top, -1).indices
    factors = scores.gather(1, ids)
    if routing.score == expert_kernels.CHOSEN:
        factors = factors.softmax(-1)
    elif routing.normalised:
        factors = factors / factors.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(1, ids, factors * routing.scale)


# -- tiles -------------------------------------------------------------------------------------------------------

FEW = tuple(
    ExpertsShape(*each)
    for each in (
        (64, 16, 64, 4, 5), (64, 16, 128, 4, 4), (64, 16, 128, 4, 3), (128, 16, 64, 4, 4), (128, 16, 128, 8, 3),
        (64, 16, 64, 4, 8), (128, 16, 64, 8, 6), (64, 16, 128, 4, 4, True), (128, 16, 64, 4, 5, True),
    )
)  # fmt: skip
SOME = tuple(
    ExpertsShape(columns, count, depth, warps, stages)
    for count in (32, 64)
    for columns, depth, warps, stages in ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4))
)
MANY = tuple(
    ExpertsShape(*each)
    for each in (
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3),
        (64, 256, 64, 8, 4), (64, 256, 64, 4, 3), (256, 128, 64, 8, 3), (128, 64, 128, 8, 3),
        (128, 128, 64, 8, 3, True), (128, 128, 64, 8, 4, True), (128, 256, 64, 8, 3, True), (256, 128, 64, 8, 3, True),
    )
)  # fmt: skip
CANDIDATES = {1: FEW, 8: FEW, 32: FEW, 128: (*FEW, *SOME), 256: (*FEW, *SOME), 640: (*FEW[:3], *SOME, *MANY[:2]),
              2048: (*SOME, *MANY), 8192: MANY}  # fmt: skip

PACKED = {
    16: ((64, 16, 64, 4, 6), (64, 16, 64, 4, 4), (64, 16, 64, 4, 8), (128, 16, 64, 4, 4), (128, 16, 64, 4, 6),
         (128, 16, 64, 8, 4), (128, 16, 64, 8, 6), (64, 16, 64, 4, 3)),
    32: ((64, 32, 64, 4, 4), (128, 32, 64, 4, 4), (128, 32, 64, 8, 4), (64, 32, 64, 4, 6)),
    64: ((64, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 64, 64, 4, 3), (64, 64, 64, 4, 6)),
    128: ((128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3)),
}  # fmt: skip
PACKED_ROWS = {
    1: (16,),
    8: (16,),
    32: (16,),
    128: (16, 32),
    256: (32, 64),
    640: (64, 128),
    2048: (64, 128),
    8192: (128,),
}

NARROW = {count: (ExpertsShape(64, 16, 256, 4, 3), ExpertsShape(128, 16, 128, 4, 4)) for count in (1, 8, 32, 128)}
NARROW |= {count: (ExpertsShape(64, 32, 128, 4, 4), ExpertsShape(128, 64, 128, 8, 3)) for count in (256, 640)}
NARROW |= {count: (ExpertsShape(128, 128, 128, 8, 2),) for count in (2048, 8192)}


def candidates(mixture: Mixture, count: int) -> tuple[ExpertsShape, ...]:
    if mixture.bits == 8:
        return tuple(shape._replace(bulk=False) for shape in (*CANDIDATES[count], *NARROW[count]))
    if mixture.bits == 4:
        return tuple(ExpertsShape(*each) for rows in PACKED_ROWS[count] for each in PACKED[rows])
    return CANDIDATES[count]


def replayed_us(calls: list[Any]) -> float:
    """Time of a call: all of them are captured in one graph."""
    with torch.inference_mode():
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(found)[2]


def trials(name: str, counts: list[int]) -> list[tuple[int, str, ExpertsShape]]:
    return [
        (count, part, shape)
        for count in counts
        for part in ("up", "down")
        for shape in candidates(MIXTURES[name], count)
    ]


def sweep(name: str, counts: list[int], times: dict[str, Any]) -> None:
    mixture, device = MIXTURES[name], torch.device("cuda")
    module = made(mixture, device, torch.bfloat16)
    for count in counts:
        _sweep_rows(name, count, module, times)


def _sweep_rows(name: str, count: int, module: GatedExperts, times: dict[str, Any]) -> None:
    mixture, device = MIXTURES[name], module.down.values.device
    read = mixture.top if count == 1 else mixture.experts * (1 - (1 - mixture.top / mixture.experts) ** count)
    calls, pairs = 8 if count <= 256 else 2, count * mixture.top
    sets = [chosen(mixture, count, device) for _ in range(calls)]
    collected = [experts.collected(ids, mixture.experts) for ids, _ in sets]
    x = torch.randn((count, mixture.width), device=device, dtype=torch.bfloat16)
    hidden = torch.randn((pairs, mixture.inner), device=device, dtype=torch.bfloat16)
    parts = torch.empty((pairs, mixture.width), device=device, dtype=torch.bfloat16)

    def up(number: int, shape: ExpertsShape) -> None:
        experts.launch(shape, x, module.gate_up, collected[number], hidden,
                       gate=(mixture.act, 1.702, 7.0))  # fmt: skip

    def down(number: int, shape: ExpertsShape) -> None:
        experts.launch(shape, hidden, module.down, collected[number], parts, factors=sets[number][1])

    for call, layer in ((down, module.down), (up, module.gate_up)):
        found = []
        for shape in candidates(mixture, count):
            try:
                us = replayed_us([partial(call, number, shape) for number in range(calls)])
                found.append((us, tuple(shape)))
            except Exception as error:
                print(f"  {tuple(shape)}: {str(error)[:70]}")
        found.sort()
        us, weights = found[0][0], layer.values.shape[1] * layer.columns
        bytes_read = read * sum(part.nbytes for part in layer if part is not None) / mixture.experts
        print(f"{name} {count} rows {call.__name__}: {us:.1f} us, {bytes_read / us / 1e6:.2f} TB/s, "
              f"{2 * pairs * weights / us / 1e6:.0f} TFLOP/s: "
              + "; ".join(f"{shape} {each:.1f}" for each, shape in found[:6]), flush=True)  # fmt: skip
        times[f"{name} {count} {call.__name__}"] = found
    weight = torch.randn((mixture.experts, mixture.width), device=device, dtype=torch.bfloat16) * 0.02
    router = ExpertRouter(weight, None, None, mixture.top, Routing(expert_kernels.SOFTMAX, True), torch.bfloat16)
    rest = {
        "collect": lambda: experts.collected(sets[0][0], mixture.experts),
        "combine": lambda: experts.combined(parts, count, mixture.top, None),
        "route": lambda: router(x),
        "logits by torch": lambda: torch.nn.functional.linear(x, weight),
    }
    others = ", ".join(f"{kind} {replayed_us([call] * 8):.1f}" for kind, call in rest.items())
    print(f"{name} {count} rows, us: {others}", flush=True)


def _compile(trial: tuple[str, int, str, ExpertsShape]) -> None:
    """Fill Triton's cache."""
    name, count, part, shape = trial
    mixture = MIXTURES[name]
    bf16, int32, gated = torch.bfloat16, torch.int32, part == "up"
    columns, inner = (mixture.inner, mixture.width) if gated else (mixture.width, mixture.inner)
    weight: Any = bf16
    if shape.bulk:
        example = torch.empty((4 * shape.columns, inner), device="cuda", dtype=bf16)
        weight = TensorDescriptor.from_tensor(example, [shape.columns, shape.depth])
    kind = {4: expert_kernels.MXFP4, 8: expert_kernels.NARROW, 16: expert_kernels.WIDE}[mixture.bits]
    weight = {4: torch.uint8, 8: quantize.FP8, 16: weight}[mixture.bits]
    scales = {4: int32, 8: torch.float32, 16: bf16}[mixture.bits]
    expert_kernels.product.warmup(
        bf16, weight, scales, bf16,
        bf16 if gated else torch.float32, int32, int32, int32, bf16, count, 1.702, 7.0,
        N=columns, K=inner, EXPERTS=mixture.experts, EXPERTS_P=mixture.experts, TOP=mixture.top if gated else 1,
        COLUMNS=shape.columns, DEPTH=shape.depth, ROWS=shape.rows, SINGLE=count == 1, GATED=gated,
        ACT=mixture.act if gated else 0, BIAS=mixture.bias, WEIGHTED=not gated, PRECISION="tf32",
        BULK=shape.bulk, KIND=kind, num_warps=shape.warps, num_stages=shape.stages, grid=(1,),
    )  # fmt: skip


def compile_ahead(names: list[str], counts: list[int]) -> None:
    seen = {(name, min(count, 2), part, shape) for name in names for count, part, shape in trials(name, counts)}
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile, trial) for trial in sorted(seen)]:
            if error := done.exception():
                print("compile:", str(error)[:200])


# -- a step ------------------------------------------------------------------------------------------------------


def steps(name: str, counts: list[int]) -> None:
    """The kernels of a decode step, from a replayed graph."""
    from penstock.workers.engines.native.build import assemble
    from penstock.workers.engines.native.model.loading import describe
    from penstock.workers.engines.native.model.options import NativeOptions
    from tests.gpu.beside import SHAPES, random_model
    from tests.gpu.fusions import step_ms
    from tests.gpu.native import ask, drive

    engine = assemble(
        describe(random_model(name)),
        NativeOptions(max_running=256, max_batched_tokens=8192, max_model_len=4096, warm=False, kv_blocks=6144),
    )
    executor: Any = engine.ahead
    for count in counts:
        drive(engine, ask(count, 512, 64, SHAPES[name][0], 40 + count))  # all decode together at the end
        print(f"{name} {count} rows: {step_ms(executor, count):.3f} ms a step", flush=True)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            executor.run_fixed(count)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
        each = [e for e in found.key_averages() if str(e.device_type).endswith("CUDA")]
        for e in sorted(each, key=lambda e: -e.self_device_time_total)[:14]:
            print(f"  {e.self_device_time_total / 5e3:8.3f} ms {e.count / 5:7.1f} x {e.key[:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "compile", "sweep", "steps"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs="+", choices=CHECKED, default=list(CHECKED))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if asked.what == "check":
        check(torch.device(asked.device), asked.shape)
        sys.exit(1 if WRONG else 0)
    times: dict[str, Any] = {}
    shapes = [name for name in asked.shape if name in MIXTURES]
    if asked.what == "compile":
        compile_ahead(shapes, asked.rows)
        return
    for name in shapes:
        try:
            sweep(name, asked.rows, times) if asked.what == "sweep" else steps(name, asked.rows)
        except Exception:
            traceback.print_exc(limit=-5)
        torch.cuda.empty_cache()
        if asked.json:
            asked.json.write_text(json.dumps(times) + "\n", encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
