"""Copies to files and between tensors, as far as a CPU goes; ``tests.gpu.weights`` compares what a GPU has."""

import os
from pathlib import Path

import pytest
import torch

from penstock.workers.engines.native import host_copies


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000])
def test_a_tensor_is_written_where_it_belongs(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 64)
    tensor = torch.arange(size, dtype=torch.int16)
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.write(b"header")
        opened.flush()
        host_copies.write(opened.fileno(), 6, tensor)
    assert file.read_bytes() == b"header" + tensor.numpy().tobytes()


def test_a_file_that_cannot_take_it_says_so(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        host_copies.write(descriptor, 0, torch.zeros(100))
    os.close(descriptor)


def test_tensors_of_other_layouts_and_types_are_copied_as_torch_does() -> None:
    whole = torch.zeros(4, 6)
    of = torch.arange(8, dtype=torch.float64).view(4, 2)
    host_copies.copy([(whole[:, 1:3], of), (whole[:, 5], torch.ones(4)), (torch.empty(0), torch.empty(0))])
    assert torch.equal(whole[:, 1:3], of.float())
    assert (whole.sum(), whole[:, 5].sum()) == (of.sum() + 4, 4)
