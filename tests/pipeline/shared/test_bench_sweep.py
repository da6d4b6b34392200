"""``penstock bench sweep`` on a real deployment with mock workers."""

import subprocess
import sys
from pathlib import Path

from penstock.measure.sweep.results import LevelResult, read_series
from tests.pipeline.support import Deployment

LOAD = ("--isl", "300", "--osl", "16", "--requests", "12", "--warm-up", "4", "--gpus", "2")


def sweep(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "bench", "sweep", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def results(out: Path) -> tuple[LevelResult, ...]:
    (series,) = read_series([out])
    return series.results


def test_lengths_are_exact_and_the_workers_figures_are_read(fast: Deployment, tmp_path: Path) -> None:
    state = fast.data_dir / "state.json"
    run = sweep(
        "--endpoint", f"ours={state}", "--concurrency", "1,3", "--out", str(tmp_path), "--scrape-s", "0.2", *LOAD
    )
    assert run.returncode == 0, run.stderr
    assert "300" in run.stdout
    for result in results(tmp_path):
        (only,) = result.runs
        figures, server = only.figures, only.server
        assert (figures.requests, figures.failed, figures.tokens_counted) == (12, 0, "usage")
        assert figures.isl is not None
        assert figures.isl_asked is not None
        assert (figures.isl.mean, figures.isl.stddev) == (figures.isl_asked.mean, figures.isl_asked.stddev)
        assert figures.osl is not None
        assert (figures.osl.min, figures.osl.max) == (16, 16)
        assert figures.tokens_per_s_per_gpu == figures.output_tokens_per_s / 2
        assert figures.ttft_ms is not None
        assert server.pages == 4  # gateway, router, two workers
        assert server.running is not None
        assert server.gpu_memory_bytes is None


def test_a_common_prefix_shows_in_the_hit_rate(fast: Deployment, tmp_path: Path) -> None:
    state = fast.data_dir / "state.json"
    shared = ("--shared-prefix", "0.8", "--api", "completions", "--concurrency", "2", "--seed", "7")
    run = sweep("--endpoint", f"ours={state}", "--out", str(tmp_path), *shared, *LOAD)
    assert run.returncode == 0, run.stderr
    (result,) = results(tmp_path)
    assert result.runs[0].figures.cached_share is not None
    assert 0.5 < result.runs[0].figures.cached_share <= 0.85
