"""The figures of one point, from those of its load generators."""

from typing import Any

import pytest

from infra.bench.scale import Point, default_points, figures, main


def stage(rate: float, cpu: dict[str, float]) -> dict[str, Any]:
    return {
        "requests_per_s": rate,
        "tokens_per_s": 64 * rate,
        "ttft_p50_ms": rate / 100,
        "failed": 0,
        "cpu_us_per_token": cpu,
        "own_cpu_share": rate / 10_000,
    }


def test_cpu_of_all_processes_is_divided_by_the_requests_of_all_generators() -> None:
    """The first generator measured the processes while both loaded them."""
    roles = {"worker-1": "worker", "worker-2": "worker", "router-1": "router"}
    found = figures([stage(1000, {"worker-1": 5.0, "worker-2": 2.5, "router-1": 1.25}), stage(3000, {})], roles)
    assert found.requests_per_s == 4000
    assert found.tokens_per_s == 256_000
    assert found.busiest["worker"] == pytest.approx(0.32)  # 5 µs for each of 64,000 tokens a second
    assert found.cpu_us["worker"] == pytest.approx((0.32 + 0.16) / 4000 * 1e6)
    assert found.cpu_us["router"] == pytest.approx(0.08 / 4000 * 1e6)
    assert found.generator_share == pytest.approx(0.3)


def test_gateways_are_added_before_workers_and_no_point_is_measured_twice() -> None:
    points = default_points([1, 2, 4, 8], [2, 4, 8, 16], 2)
    assert points[:4] == [Point(1, 2, 2), Point(2, 2, 2), Point(4, 2, 2), Point(8, 2, 2)]
    assert points[4:] == [Point(4, 2, 4), Point(4, 2, 8), Point(4, 2, 16)]


def test_a_malformed_point_is_refused_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--points", "4:1"]) == 2
    assert "4:1:8" in capsys.readouterr().err
