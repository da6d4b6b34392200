"""Plots and summary of result trees."""

import json
from pathlib import Path

import pytest

from penstock.measure.sweep.plot import run
from penstock.measure.sweep.results import read_series, values_of
from tests.penstock.measure.sweep.samples import result, write

pytest.importorskip("matplotlib")


def test_every_plot_and_summary_of_several_endpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, latency in (("fast", 100.0), ("slow", 200.0)):
        write(tmp_path, *(result(name, level, [latency, latency * 1.1]) for level in (1, 2, 5, 10, 50, 100)))
    assert run([str(tmp_path)]) == 0
    assert "Knee at concurrency 10" in capsys.readouterr().out
    plots = tmp_path / "plots"
    names = {path.stem for path in plots.glob("*.png")}
    assert names >= {
        "p50_inter_token_latency_vs_concurrency",
        "avg_inter_token_latency_vs_concurrency",
        "request_throughput_vs_concurrency",
        "avg_time_to_first_token_vs_concurrency",
        "efficiency_tok_s_gpu_vs_user",
    }
    assert all((plots / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    assert "fast: m at http://h:1" in (plots / "summary.txt").read_text()
    summary = json.loads((plots / "summary.json").read_text())
    fast, slow = read_series([tmp_path])
    assert [each["name"] for each in summary] == ["fast", "slow"]
    assert summary[0]["figures"]["ttft_ms.p99"] == [values_of(each, "ttft_ms", "p99") for each in fast.results]
    assert summary[1]["levels"] == [each.level.value for each in slow.results]
    # The faster one is faster in every figure that the plots show.
    for mine, other in zip(*(each["figures"]["output_tokens_per_s"] for each in summary), strict=True):
        assert min(mine) > max(other)


def test_a_folder_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(tmp_path)]) == 1
    assert "no results of `penstock bench sweep`" in capsys.readouterr().err
    (tmp_path / "a/c1").mkdir(parents=True)
    (tmp_path / "a/c1/result.json").write_text("{")
    assert run([str(tmp_path)]) == 1
    assert "result.json" in capsys.readouterr().err


def test_equal_names_in_two_trees_are_told_apart(tmp_path: Path) -> None:
    for tree in ("before", "after"):
        write(tmp_path / tree, result("x", 1, [100.0]))
    assert [each.name for each in read_series([tmp_path / "before", tmp_path / "after"])] == ["before/x", "after/x"]
