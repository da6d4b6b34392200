"""How the keys of decode rows are divided among programs, and the kernels that do it, by Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("triton") is None:
    pytest.skip("torch's CPU build comes without Triton", allow_module_level=True)

from penstock.workers.engines.native.cuda.paged import MOST_ITEMS, division, num_splits

KV_HEADS = st.sampled_from((1, 2, 4, 8, 16, 32))


def divided(tiles: list[int], kv_heads: int) -> tuple[int, list[int]]:
    """The tiles of an item, and the items of each row, as ``attend.divide`` computes them."""
    found = division(len(tiles), kv_heads)
    size = max(-(-sum(tiles) // found.target), -(-max(tiles) // found.splits), 1)
    return size, [max(-(-each // size), 1) for each in tiles]


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=512), KV_HEADS)
def test_all_items_have_a_program_and_a_row_has_no_more_than_are_combined(tiles: list[int], kv_heads: int) -> None:
    found = division(len(tiles), kv_heads)
    _, items = divided(tiles, kv_heads)
    assert sum(items) <= found.most
    assert max(items) <= found.splits <= MOST_ITEMS


@given(st.integers(2, 512), st.integers(1, 4096), KV_HEADS)
def test_rows_of_one_length_are_divided_as_by_a_fixed_number_of_splits(rows: int, tiles: int, kv_heads: int) -> None:
    _, items = divided([tiles] * rows, kv_heads)
    assert len(set(items)) == 1
    assert items[0] <= max(2 * num_splits(rows, kv_heads), 2)


def test_a_long_row_among_short_ones_is_divided() -> None:
    size, items = divided([9] * 63 + [500], kv_heads=8)
    assert items[:63] == [1] * 63
    assert items[63] == -(-500 // size) > 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("check", "said", "times"), [("uneven", "decodes of", 6), ("head", "rounded", 4), ("cutoff", "kept", 6)]
)
def test_uneven_rows_logits_in_float32_and_draws_are_as_the_reference_computes_them(
    check: str, said: str, times: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernels", check, "--device", "cpu"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(said) == times, done.stdout + done.stderr
    assert "WRONG" not in done.stdout, done.stdout
