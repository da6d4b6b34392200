"""Checkpoints of a training run, in files of less than 16 MiB each.

A weight is stored as two bfloat16 numbers, its value and the rounding error; each moment of the optimizer as one. Each
save writes new files, named by their step. ``state.json`` names the valid step and is replaced last, so an interrupted
save leaves the previous one intact.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OLD_NAMES = {"eyes": "vision_hidden", "eye_layers": "vision_layers", "eye_heads": "vision_heads"}  # of the shape


def save(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    step: int = state["step"]
    named = {name: weight.detach().float() for name, weight in model.named_parameters()}
    high = {name: weight.bfloat16() for name, weight in named.items()}
    _write(directory, "weights", step, high)
    _write(directory, "rest", step, {name: (named[name] - high[name].float()).bfloat16() for name in named})
    for moment in _MOMENTS:
        states = {name: optimizer.state[weight].get(moment) for name, weight in model.named_parameters()}
        _write(directory, moment, step, {name: value.bfloat16() for name, value in states.items() if value is not None})
    new = directory / "state.json.new"
    new.write_text(json.dumps(state) + "\n", encoding="utf-8")
    new.replace(directory / "state.json")
    for file in directory.glob("*.safetensors*"):
        if not file.name.endswith(f"-{step}.safetensors"):
            file.unlink()


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Load the last save into model and optimizer; returns its state."""
    state = state_of(directory)
    high, rest = weights_of(directory), load_file(_file(directory, "rest", state["step"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(high[name].float() + rest[name].float())
    if optimizer is not None and state["step"]:
        moments = {moment: load_file(_file(directory, moment, state["step"])) for moment in _MOMENTS}
        for name, weight in model.named_parameters():
            values = {key: saved[name].float().to(weight.device) for key, saved in moments.items()}
            # a fused AdamW keeps its step count on the device
            optimizer.state[weight] = {"step": torch.tensor(float(state["step"]), device=weight.device), **values}
    return state


def state_of(directory: Path) -> dict[str, Any]:
    """The last saved state, without weights."""
    state: dict[str, Any] = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    if "shape" in state:
        state["shape"] = {_OLD_NAMES.get(name, name): value for name, value in state["shape"].items()}
    return state


def weights_of(directory: Path) -> dict[str, Tensor]:
    """The last saved weights, in bfloat16."""
    return load_file(_file(directory, "weights", state_of(directory)["step"]))


def _file(directory: Path, part: str, step: int) -> Path:
    return directory / f"{part}-{step}.safetensors"


def _write(directory: Path, part: str, step: int, tensors: dict[str, Tensor]) -> None:
    file = _file(directory, part, step)
    new = file.with_name(f"{file.name}.new")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, new)
    new.replace(file)
