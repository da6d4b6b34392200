"""Depths read as a mapping, compared with what they were made of."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state.depths import Depths, TargetBits, bits_of

DEPTHS = st.dictionaries(st.integers(0, 90), st.integers(1, 50), max_size=12)


@given(DEPTHS)
def test_depths_are_a_mapping_of_the_targets_of_their_masks(depths: dict[int, int]) -> None:
    bits = TargetBits()
    for number in depths:
        bits.put(1 << number, (f"w{number}", 0))
    numbers = [*set(depths.values())]
    masks = [sum(1 << number for number in depths if depths[number] == each) for each in numbers]
    found = Depths((masks, numbers), bits)
    assert bool(found) == bool(depths)
    assert found == {(f"w{number}", 0): depth for number, depth in depths.items()}
    assert found.get(("nobody", 0), 7) == 7


@given(st.integers(0, 1 << 80))
def test_the_bits_of_a_mask_are_all_of_it_lowest_first(mask: int) -> None:
    bits = bits_of(mask)
    assert sum(bits) == mask
    assert bits == sorted(bits)
    assert all(bit.bit_count() == 1 for bit in bits)


def test_a_change_of_targets_changes_the_version() -> None:
    bits = TargetBits()
    bits.put(1, ("w", 0))
    before = bits.version
    bits.remove(1)
    assert bits.version != before
    assert bits.targets == {}
