"""Masks of a step's constrained sequences, as kernels take them."""

from concurrent.futures import Future

import torch

from penstock.workers.engines.native.model.masks import PendingMasks

CPU = torch.device("cpu")


def pending(rows: list[int], words: list[list[int]], *, every: bool = False) -> PendingMasks:
    computed: Future[bytearray] = Future()
    computed.set_result(bytearray(torch.tensor(words, dtype=torch.int32).numpy().tobytes()))
    return PendingMasks(rows, every, computed)


def test_rows_without_a_mask_have_no_number() -> None:
    numbers, masks = pending([1, 3], [[5, 6], [7, 8]]).by_row(5, CPU)
    assert numbers.tolist() == [-1, 0, -1, 1, -1]
    assert masks.tolist() == [[5, 6], [7, 8]]


def test_a_mask_of_every_row() -> None:
    numbers, masks = pending([0, 1], [[1], [2]], every=True).by_row(2, CPU)
    assert (numbers.tolist(), masks.tolist()) == ([0, 1], [[1], [2]])
