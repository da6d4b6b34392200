"""The messages of requests through a real broker, without anything else."""

from tests.perf.floor import ROLES, measure


def test_each_request_is_answered_in_two_parts() -> None:
    found = measure(20)
    assert len(found.first_s) == 20
    assert all(0 < first <= end for first, end in zip(found.first_s, found.end_s, strict=True))
    assert set(found.cpu_us) == {"broker", *ROLES}
