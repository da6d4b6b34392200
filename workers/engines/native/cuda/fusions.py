"""Switches to measure the gain of fused kernels and of dependent launches. Both are on."""

import functools
from dataclasses import dataclass

import torch

MAX_ROWS = 64  # of dependent launches: kernels over more rows take too long to gain from them


@dataclass(slots=True)
class Fusions:
    """Which optimisations are used.

    Attributes:
        products: norms and activations are computed within the products of a single row.
        dependent: kernels other than products start while the one before them ends (programmatic dependent launch).
    """

    products: bool = True
    dependent: bool = True


FUSIONS = Fusions()


def dependent(device: torch.device, rows: int) -> bool:
    """Whether a kernel is launched as a dependent of the one before it."""
    return rows <= MAX_ROWS and FUSIONS.dependent and device.type == "cuda" and _capable(device.index or 0)


@functools.cache
def _capable(index: int) -> bool:
    """Dependent launches exist from Hopper on."""
    return torch.cuda.get_device_capability(index) >= (9, 0)
