"""Checkpoints of GPT-OSS whose experts have weights of 4 bits, loaded as they are stored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import quantize
from penstock.workers.engines.native.model.loading import load
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.native.models import expected, mxfp4_blocks, prompt, request, run, save, tokens

LENGTHS = (1, 9, 33)
COUNT = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as ``save`` makes it, with the weights of its experts narrowed."""
    return narrow(save("gpt_oss", tmp_path_factory.mktemp("mxfp4")))


def narrow(folder: Path) -> Path:
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values
            continue
        blocks, scales = mxfp4_blocks(values.transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_values_are_those_of_transformers() -> None:
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(quantize.widened(blocks, scales, torch.float32), theirs.transpose(1, 2))


def test_narrowing_keeps_what_has_four_bits_and_comes_near_to_the_rest() -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 64)
    kept = quantize.widened(*mxfp4_blocks(weight), torch.float32)
    assert (kept - weight).norm() < 0.15 * weight.norm()
    assert torch.equal(quantize.widened(*mxfp4_blocks(kept), torch.float32), kept)


def test_answers_are_those_of_transformers_with_widened_weights(directory: Path) -> None:
    native = build(str(directory), NativeOptions(block_size=8, kv_blocks=64, device="cpu"))
    answers = tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS]))
    assert answers == {n: expected(directory, prompt(n), COUNT) for n in LENGTHS}


def test_weights_stay_as_they_are_stored(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    model: Any = load(str(directory), device=torch.device("cpu")).forward
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"):
            found = getattr(layer.mlp.experts, name)
            assert torch.equal(found, stored[f"model.layers.{number}.mlp.experts.{name}"])
