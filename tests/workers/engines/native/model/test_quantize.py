"""Weights as fp8: half the memory, an error that is measured, and nothing replaced that must not be."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.infra.model import modeldir
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.loading import load
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.quantize import Fp8Experts, Fp8Linear, narrowed, quantize
from tests.workers.engines.native.models import CONFIGS, expected, prompt, request, run, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_keeps_its_range_and_loses_three_percent_at_most(dtype: torch.dtype) -> None:
    rows = (
        torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * torch.logspace(-4, 4, 32)[:, None]
    )
    values, scale = narrowed(rows.to(dtype))
    found = values.float() * scale
    error = (found - rows.float()).norm(dim=-1) / rows.float().norm(dim=-1)
    assert float(error.max()) < 0.04
    assert values.dtype.itemsize == 1
    assert not narrowed(torch.zeros(2, 16))[0].float().any()


def test_a_layer_with_a_bias_computes_what_its_widened_weight_would() -> None:
    linear = nn.Linear(32, 48)
    x = torch.randn(2, 3, 32)
    narrow = Fp8Linear(linear)
    wide = nn.functional.linear(x, narrow.weight.float() * narrow.scale, linear.bias)
    torch.testing.assert_close(narrow(x), wide)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # gate before up, and in turns with biases
def test_experts_compute_what_their_widened_weights_would(name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)
    wide = model.model.layers[0].mlp.experts
    before = copy.deepcopy(wide)
    count, width = wide.num_experts, CONFIGS[name].hidden_size
    narrow = Fp8Experts(wide)
    for part in ("gate_up", "down"):
        rows = getattr(narrow, part).float() * getattr(narrow, f"{part}_scale")
        kept = getattr(before, f"{part}_proj").data
        kept.copy_(rows.transpose(1, 2) if name == "gpt_oss" else rows)
    x, ids = torch.randn(7, width), torch.stack([torch.randperm(count)[:2] for _ in range(7)])
    factors = torch.rand(7, 2)
    torch.testing.assert_close(narrow(x, ids, factors), before(x, ids, factors))


def test_output_embeddings_routers_and_odd_sizes_stay(model_dir: Callable[[str], Path]) -> None:
    model = load(str(model_dir("qwen3_moe")), device=torch.device("cpu")).forward
    count = quantize(model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert count == 3 * (4 + 1)  # the attention's and all experts, in each layer
    assert kinds["model.layers.0.mlp.experts"] == "Fp8Experts"
    assert kinds["lm_head"] == "OutputLayer"
    assert kinds["model.layers.0.self_attn.q_proj"] == "Fp8Linear"
    assert quantize(nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 16))) == 0


def test_logits_of_the_demo_model_differ_by_a_few_percent_and_keep_their_best_tokens() -> None:
    """Relative error of the logits, and tokens that stay the best."""
    found = {}
    text = modeldir.load(modeldir.DEMO, name="demo").tokenizer.encode("Spell the word house. Then add 12 and 30.").ids
    words = torch.tensor([text])
    for dtype in ("float32", "bfloat16"):
        found[dtype] = load(str(modeldir.DEMO), device=torch.device("cpu"), dtype=dtype).forward
    narrow = load(str(modeldir.DEMO), device=torch.device("cpu"), dtype="bfloat16").forward
    quantize(narrow)
    with torch.inference_mode():
        for model in (*found.values(), narrow):
            model.set_attn_implementation("eager")
        exact, half, eighth = (m(input_ids=words).logits[0].float() for m in (*found.values(), narrow))
    errors = [float((each - exact).norm() / exact.norm()) for each in (half, eighth)]
    assert errors[0] < 0.02
    assert errors[1] < 0.1
    assert (exact.argmax(-1) == eighth.argmax(-1)).float().mean() > 0.9


def test_an_engine_with_fp8_weights_answers_as_transformers_with_the_widened_ones(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    wide = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype="float32")
    for name, module in wide.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            values, scale = narrowed(module.weight.data)
            module.weight.data = values.float() * scale
    wide.save_pretrained(tmp_path)
    native = build(str(model_dir("llama")), NativeOptions(device="cpu", kv_blocks=40, quantization="fp8"))
    found = tokens(run(native, [request(n, prompt(n), 20) for n in (5, 20, 40)]))
    assert found == {n: expected(tmp_path, prompt(n), 20) for n in (5, 20, 40)}
