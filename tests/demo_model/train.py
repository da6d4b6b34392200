"""Trains the demo model: ``python -m tests.demo_model.train --work DIR``. The same command resumes from the
last save.

The tokenizer is the bundled one, unless ``--new-tokenizer`` is given: models that share it can draft for each other.

``--smoke`` trains a much smaller model for a few steps on a CPU.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from penstock.infra.model import modeldir
from tests.demo_model import checkpoint
from tests.demo_model.batches import LONGEST, SHORT, Batch, Batches
from tests.demo_model.export import TOKENIZER
from tests.demo_model.model import DRAFT, SMOKE, VISION, Demo, Parts, Shape, places_of
from tests.demo_model.tokenizer import VOCAB, write_tokenizer

WARM_UP = 300
BUNDLED = modeldir.MODELS / "demo"
_SHOW_STEPS = 100


def rate(step: int, steps: int, peak: float) -> float:
    """Learning rate: a linear warm-up, then a cosine decay to 0."""
    warm_up = min(WARM_UP, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def optimizer_of(model: Demo, *, fused: bool) -> torch.optim.AdamW:
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=fused)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Parts, Tensor, Tensor]:
    """Tokens, weights, positions, the two parts of the batch, pictures and the positions of their placeholders."""
    tokens, weights, short, long, pictures, spots = (
        torch.from_numpy(part).to(device, non_blocking=True)
        for part in (batch.tokens, batch.weights, batch.short, batch.long, batch.pictures, batch.spots)
    )
    first, last = (
        int(batch.short[-1]),
        int(batch.long[-1]),
    )  # from the arrays: reading a tensor would wait for the device
    parts = ((first, short, SHORT), (last, long, LONGEST))
    return tokens.long(), weights, places_of(parts), parts, pictures, spots


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train until the last step, or until the time is over; returns the last state."""
    work: Path = options.work
    if not (work / "tokenizer.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        if options.new_tokenizer:
            write_tokenizer(work, options.seed)
        else:
            for name in TOKENIZER:
                shutil.copyfile(BUNDLED / name, work / name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    shape = Shape(VOCAB, **(DRAFT if options.draft else SMOKE if options.smoke else VISION))
    model = Demo(shape).to(device)
    optimizer = optimizer_of(model, fused=device.type == "cuda")
    state: dict[str, Any] = {"step": 0, "steps": options.steps, "shape": asdict(shape), "seconds": 0.0, "losses": []}
    if (work / "state.json").exists():
        state |= checkpoint.load(work, model, optimizer)
        if state["steps"] != options.steps:
            print(f"note: --steps changes from {state['steps']} to {options.steps}")
            state["steps"] = options.steps
    elif options.start is not None:
        weights = starting_weights(options.start, list(model.state_dict()))
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    batches: Any = Batches(
        str(work / "tokenizer.json"),
        options.seed,
        options.batch_tokens,
        options.steps,
        pictures=shape.vision_hidden > 0,
    )
    data = Subset(batches, range(state["step"], options.steps))
    loader = DataLoader(
        data, batch_size=None, num_workers=options.loaders, prefetch_factor=4 if options.loaders else None
    )
    _steps(model, optimizer, loader, state, options, device)
    checkpoint.save(work, model, optimizer, state)
    return state


def starting_weights(start: Path, names: list[str]) -> dict[str, Tensor]:
    """Of a checkpoint, or of an exported model: one with a vision tower, if the model to train has it."""
    if (start / "state.json").exists():
        return checkpoint.weights_of(start)
    from tests.demo_model.export_vision import exported_weights

    return exported_weights(start, names)


def _steps(model: Demo, optimizer: torch.optim.Optimizer, loader: Any, state: dict[str, Any],
           options: argparse.Namespace, device: torch.device) -> None:  # fmt: skip
    compute = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    begin, before, recent = time.monotonic(), state["seconds"], torch.zeros((), device=device)
    saved, shown = begin, 0
    columns = (TextColumn("loss {task.fields[loss]:.4f}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=state["steps"], completed=state["step"], loss=math.nan)
        for batch in loader:
            step = state["step"]
            for group in optimizer.param_groups:
                group["lr"] = rate(step, state["steps"], options.rate)
            inputs = on_device(batch, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = compute(*inputs)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent += loss.detach()
            shown += 1
            state["step"] = step + 1
            now = time.monotonic()
            state["seconds"] = round(before + now - begin, 1)
            if shown == _SHOW_STEPS or state["step"] == state["steps"]:
                mean = float(recent) / shown
                state["losses"].append([state["step"], round(mean, 4)])
                progress.update(task, completed=state["step"], loss=mean)
                if not progress.console.is_terminal and state["step"] % (10 * _SHOW_STEPS) == 0:
                    print(f"step {state['step']} loss {mean:.4f} seconds {state['seconds']:.0f}", flush=True)
                recent.zero_()
                shown = 0
            if now - begin > 60 * options.minutes:
                break
            if now - saved > 60 * options.save_minutes:
                checkpoint.save(options.work, model, optimizer, state)
                saved = time.monotonic()


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="directory of tokenizer and checkpoint")
    parser.add_argument("--start", type=Path, help="another --work, or an exported model, whose weights to start from")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop and save after this time")
    parser.add_argument("--save-minutes", type=float, default=2.0, help="time between saves")
    parser.add_argument("--new-tokenizer", action="store_true", help="train a tokenizer instead of the bundled one")
    parser.add_argument("--loaders", type=int, default=0, help="processes that generate data")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a much smaller model, for a test on a CPU")
    parser.add_argument("--draft", action="store_true", help="the draft model: no vision tower, under 2 MB")
    return parser.parse_args(argv)


if __name__ == "__main__":
    final = run(options_of())
    print(json.dumps({key: final[key] for key in ("step", "steps", "seconds")} | {"loss": final["losses"][-1:]}))
