"""The messages of requests through a real broker, without anything else."""

import pytest

from tests.perf.floor import ROLES, measure


@pytest.mark.parametrize(("connections", "by_sequence"), [(1, False), (4, True)])
def test_each_request_is_answered_in_two_parts(connections: int, by_sequence: bool) -> None:
    found = measure(20, connections=connections, by_sequence=by_sequence)
    assert len(found.first_s) == 20
    assert all(0 < first <= end for first, end in zip(found.first_s, found.end_s, strict=True))
    assert set(found.cpu_us) == {"broker", *ROLES}
