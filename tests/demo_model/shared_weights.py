"""Keeps the text weights of the vision model once, in the text model's directory; and writes the whole model again.

``python -m tests.demo_model.shared_weights share VISION TEXT`` replaces the weights of VISION by an index.
Penstock's native engine reads that; ``... join VISION OUT`` writes a directory that any reader of the format
understands.
"""

import argparse
import os
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.infra.model.weight_files import INDEX, weight_files

WHOLE, OWN = "model.safetensors", "vision.safetensors"
HUB = "language_model."  # before the text model's names in LLaVA checkpoints
KEY_MAPPING = {r"^model\.(?!language_model|vision_tower|multi_modal_projector)": "model.language_model."}


def share(directory: Path, text: Path) -> None:
    """Replace the weights of a vision model by its own ones and an index that names ``text`` for the others.

    Raises:
        ValueError: the models' text weights differ.
    """
    whole, shared = load_file(directory / WHOLE), load_file(text / WHOLE)
    own = {name: weight for name, weight in whole.items() if not name.startswith(HUB)}
    theirs = {name.removeprefix(HUB): weight for name, weight in whole.items() if name.startswith(HUB)}
    if theirs.keys() != shared.keys() or not all(torch.equal(weight, shared[name]) for name, weight in theirs.items()):
        raise ValueError(f"{directory} and {text} have different text weights: export both from one checkpoint")
    place = os.path.relpath(text / WHOLE, directory)
    index = {
        "metadata": {
            "total_size": sum(weight.nbytes for weight in whole.values()),
            "key_mapping": KEY_MAPPING,
        },
        "weight_map": dict(sorted((dict.fromkeys(shared, place) | dict.fromkeys(own, OWN)).items())),
    }
    save_file(own, directory / OWN, metadata={"format": "pt"})
    (directory / OWN).chmod(0o644)
    (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
    (directory / WHOLE).unlink()


def joined(directory: Path) -> dict[str, Tensor]:
    """All weights of an exported model; the text weights of a vision model under the names of LLaVA checkpoints."""
    files = weight_files(directory)
    weights: dict[str, Tensor] = {}
    for file in files:
        prefix = HUB if len(files) > 1 and file.name != OWN else ""
        weights |= {prefix + name: weight for name, weight in load_file(file).items()}
    return weights


def join(directory: Path, out: Path) -> None:
    """Copy a model, its weights in one file."""
    weights = joined(directory)
    out.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        if file.name not in (INDEX, OWN, WHOLE):
            shutil.copyfile(file, out / file.name)
    save_file(weights, out / WHOLE, metadata={"format": "pt"})
    (out / WHOLE).chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["share", "join"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("other", type=Path, help="share: the text model; join: where to write")
    options = parser.parse_args()
    (share if options.action == "share" else join)(options.directory, options.other)
