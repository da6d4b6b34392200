"""The state of a training run in files of less than 16 MiB each.

A weight is kept as two bfloat16 numbers, itself and what rounding lost; the optimizer's moments as one each.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    named = {name: weight.detach().float() for name, weight in model.named_parameters()}
    high = {name: weight.bfloat16() for name, weight in named.items()}
    _write(directory, "weights", high)
    _write(directory, "rest", {name: (named[name] - high[name].float()).bfloat16() for name in named})
    for moment in _MOMENTS:
        found = {name: optimizer.state[weight].get(moment) for name, weight in model.named_parameters()}
        _write(directory, moment, {name: value.bfloat16() for name, value in found.items() if value is not None})
    (directory / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Fill model and optimizer; returns the state that was saved."""
    high, rest = (load_file(directory / f"{part}.safetensors") for part in ("weights", "rest"))
    state: dict[str, Any] = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(high[name].float() + rest[name].float())
    if optimizer is not None and state["step"]:
        moments = {moment: load_file(directory / f"{moment}.safetensors") for moment in _MOMENTS}
        for name, weight in model.named_parameters():
            values = {key: found[name].float().to(weight.device) for key, found in moments.items()}
            # a fused AdamW counts on the device
            optimizer.state[weight] = {"step": torch.tensor(float(state["step"]), device=weight.device), **values}
    return state


def _write(directory: Path, part: str, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, directory / f"{part}.safetensors")
