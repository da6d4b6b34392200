"""The weighted mean of two models of one shape:
``python -m tests.demo_model.average OLD NEW OUT --share 0.8``.

A fine-tuned model forgets a little; its mean with the model that it started from keeps more of both.
"""

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

FILE = "model.safetensors"


def average(old: Path, new: Path, out: Path, share: float) -> None:
    """Write ``new`` to ``out``, its weights averaged with those of ``old``.

    Args:
        share: of ``new`` in the mean, 0 to 1.

    Raises:
        ValueError: the models have different weights.
    """
    one, other = load_file(old / FILE), load_file(new / FILE)
    if {name: weight.shape for name, weight in one.items()} != {name: weight.shape for name, weight in other.items()}:
        raise ValueError(f"{old} and {new} have different weights")
    mean = {name: ((1 - share) * one[name].float() + share * other[name].float()).to(one[name].dtype) for name in one}
    shutil.copytree(new, out, dirs_exist_ok=True)
    save_file(mean, out / FILE, metadata={"format": "pt"})
    (out / FILE).chmod(0o644)  # safetensors writes for the owner only


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.8, help="of NEW")
    options = parser.parse_args()
    average(options.old, options.new, options.out, options.share)
