"""The figures of one point, from those of its load generators, and what is written of them."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.perf import scale
from tests.perf.broker import BrokerFigures
from tests.perf.scale import Figures, Point, Series, all_series, default_points, figures, main, write


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


def test_a_point_may_have_cells_or_several_deployments_on_one_broker_or_more() -> None:
    assert Point.parse("2:1:3") == Point(2, 1, 3, cells=1, deployments=1, brokers=1)
    assert Point.parse("4:4:8c4") == Point(4, 4, 8, cells=4)
    assert Point.parse("2:1:3x4") == Point(2, 1, 3, deployments=4, brokers=1)
    assert Point.parse("2:1:3x4/2").row == ("4 deployments on 2 brokers", "2", "1", "3")
    for malformed in ("2:1:3x", "2:1:3x0", "2:1:3/2"):
        with pytest.raises(ValueError, match="2:1:2x4"):
            Point.parse(malformed)


def test_a_deployment_is_loaded_as_often_as_asked_and_as_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "running", lambda *_: nullcontext())
    monkeypatch.setattr(scale, "read_state", lambda path: path)
    monkeypatch.setattr(scale, "_load", lambda *_: Figures(1000.0, 64_000.0, 5.0, 0, {}, {}, 0.2))
    series, args = Series("", 200, 64, (Point(1, 1, 2),)), scale._parser().parse_args(["--rounds", "3"])
    assert len(scale.measure(series.points[0], series, args, time.monotonic() + 3600)) == 3
    assert len(scale.measure(series.points[0], series, args, time.monotonic())) == 1


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_all_series_measure_each_point_once_and_grow_with_the_machine(cores: int) -> None:
    series = all_series(cores)
    points = [(each.words, each.tokens, point) for each in series for point in each.points]
    assert len(set(points)) == len(points)
    assert max(point.gateways for point in series[0].points) == max(4, cores // 4)


def test_a_folder_has_what_was_measured_so_far(tmp_path: Path) -> None:
    series = Series("short answers", 200, 64, (Point(1, 1, 2), Point(2, 1, 2)))
    found = Figures(1000.0, 64_000.0, 5.0, 0, {"router": 100.0}, {"router": 0.1}, 0.2)
    write(tmp_path / "out", [(series, Point(1, 1, 2), found), (series, Point(2, 1, 2), "left out")], [], 64)
    figures = json.loads((tmp_path / "out" / "scale.json").read_text())
    assert figures["points"][0]["requests_per_s"] == 1000.0
    assert figures["points"][1]["error"] == "left out"
    text = (tmp_path / "out" / "scale.txt").read_text()
    assert "64,000" in text
    assert "left out" in text
    write(tmp_path / "out", [], [BrokerFigures(2, 17_000.0, 119_000.0, 1.3, 76.0)], 64)
    assert "119,000" in (tmp_path / "out" / "scale.txt").read_text()
