"""Folders of LoRA adapters for tests, as PEFT writes them, and models with an adapter merged into their weights."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    targets: Iterable[str] = ALL,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """Write a random adapter for a model's linear layers with these names.

    Args:
        strength: how much it changes outputs, next to the model's own.
        config: further fields of its adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_modules():
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in targets:
            down = torch.randn((rank, module.in_features), generator=generator) / math.sqrt(module.in_features)
            up = torch.randn((module.out_features, rank), generator=generator)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            up *= strength * module.weight.std() * math.sqrt(module.in_features) / (scale * math.sqrt(rank))
            tensors[f"base_model.model.{path}.lora_A.weight"] = down
            tensors[f"base_model.model.{path}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted(targets),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described | config))
    return folder


def merged(model: Path, adapter: Path | None) -> Any:
    """The model with ``W + scale * B @ A`` in place of ``W``, in float32, computed by hand."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is None:
        return loaded
    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                path = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                loaded.get_submodule(path).weight += scale * (up @ down)
    return loaded


def other_weights(model: Path, folder: Path, *, seed: int = 1, noise: float = 0.05) -> Path:
    """A copy of a model's folder in ``folder``: the same sizes and tokenizer, other weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        weights[name] = tensor + (torch.randn(tensor.shape, generator=generator) * noise).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy(model: Any, prompt: Iterable[int], count: int) -> list[int]:
    """``count`` tokens behind the prompt, each from a forward pass over everything before it."""
    tokens = list(prompt)
    begin = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[begin:]
