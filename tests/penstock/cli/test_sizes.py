import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.figures import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("2k", 2000)],
)
def test_sizes_are_read_with_and_without_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 XB", "1e9", "4GiBs"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 512MiB"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_shown_size_is_read_as_about_the_same_size(size: int) -> None:
    assert parse_size(show_size(size)) == pytest.approx(size, rel=0.06, abs=1)
