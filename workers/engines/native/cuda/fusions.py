"""Switches for measuring what fused kernels and dependent launches gain; both are on."""

import functools
from dataclasses import dataclass

import torch

MOST_ROWS = 64  # of kernels that are launched as dependents: with more, they take too long to gain by it


@dataclass(slots=True)
class Fusions:
    """
    Attributes:
        products: norms and activations are computed within the products of a single row.
        dependent: kernels other than products start while the one before them ends (programmatic dependent launch).
    """

    products: bool = True
    dependent: bool = True


FUSIONS = Fusions()


def dependent(device: torch.device, rows: int) -> bool:
    """Whether a kernel is launched as a dependent of the one before it."""
    return rows <= MOST_ROWS and FUSIONS.dependent and device.type == "cuda" and _capable(device.index or 0)


@functools.cache
def _capable(index: int) -> bool:
    """From Hopper on."""
    return torch.cuda.get_device_capability(index) >= (9, 0)
