"""Checksums of many messages at once are those of one at a time."""

import random

import pytest

from penstock.log.sources.checksums import checksums, highway_hash_64


@pytest.mark.parametrize("sizes", [[], [0], [32], list(range(100)), [5000, 1, 64, 0, 31, 63, 700]])
def test_each_message_gets_its_own_checksum_in_its_own_place(sizes: list[int]) -> None:
    rng = random.Random(len(sizes))
    messages = [rng.randbytes(size) for size in sizes]
    keys = [rng.randbytes(32) for _ in sizes]
    assert checksums(keys, messages) == [highway_hash_64(*pair) for pair in zip(keys, messages, strict=True)]
