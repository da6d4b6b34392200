"""Checksums of many messages at once are those of one at a time."""

import random
import subprocess
import sys

import pytest

from penstock.log_tools.sources.highway_hash import highway_hash_64
from penstock.log_tools.sources.many_checksums import many_checksums


@pytest.mark.parametrize("sizes", [[], [0], [32], list(range(100)), [5000, 1, 64, 0, 31, 63, 700]])
def test_each_message_gets_its_own_checksum_in_its_own_place(sizes: list[int]) -> None:
    rng = random.Random(len(sizes))
    messages = [rng.randbytes(size) for size in sizes]
    keys = [rng.randbytes(32) for _ in sizes]
    assert many_checksums(keys, messages) == [highway_hash_64(*pair) for pair in zip(keys, messages, strict=True)]


def test_the_log_is_read_without_numpy() -> None:
    modules = "penstock.log_tools.requests.list_requests, penstock.log_tools.export.import_log"
    code = f"import sys; sys.modules['numpy'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
