"""Results of aiperf 0.13, in the form in which it wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.measure.sweep.convert import run
from penstock.measure.sweep.results import load
from tests.penstock.measure.sweep.samples import load_records


def aiperf_folder(folder: Path, *latencies_ms: float, concurrency: int = 4) -> Path:
    folder.mkdir()
    config = {
        "phases": [{"name": "profiling", "kind": "profiling", "type": "concurrency", "concurrency": concurrency}],
        "endpoint": {"urls": ["http://127.0.0.1:8000"], "type": "chat", "streaming": True},
        "models": {"items": [{"name": "tiny"}]},
        "datasets": [{"prompts": {"isl": {"mean": 300.0, "stddev": 5.0}, "osl": {"mean": 16.0}}}],
    }
    summary = {"input_config": config, "start_time": "2026-11-22T21:31:25.039295"}
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    lines = []
    for at, latency in enumerate(latencies_ms):
        metrics: dict[str, Any] = {
            "time_to_first_token": 81.5,
            "input_sequence_length": 306,
            "request_latency": latency,
            "inter_chunk_latency": [1.0, 5.0],
            "usage_prompt_tokens": 306,
            "usage_completion_tokens": 16,
            "usage_prompt_cache_read_tokens": 32,
            "inter_token_latency": 5.8,
        }
        metadata = {"request_start_ns": 1795383085060925818 + at * 10**8, "benchmark_phase": "profiling"}
        lines.append({"metadata": metadata, "metrics": {name: {"value": value} for name, value in metrics.items()}})
    lines.append({"metadata": metadata, "metrics": {}, "error": {"code": 500, "message": "broken"}})
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_of_aiperf_become_runs_of_a_level(tmp_path: Path) -> None:
    folders = [aiperf_folder(tmp_path / name, 100.0, 300.0) for name in ("one", "two")]
    assert run(["aiperf", *map(str, folders), "--name", "peer", "--out", str(tmp_path / "out"), "--gpus", "2"]) == 0
    result = load(tmp_path / "out/peer/c4")
    assert result is not None
    assert (result.generator, result.model, result.workload.isl, result.workload.isl_stddev) == (
        "aiperf",
        "tiny",
        300,
        5,
    )
    assert [each.number for each in result.runs] == [1, 2]
    figures = result.runs[1].figures
    assert (figures.requests, figures.failed, figures.errors) == (2, 1, {"broken": 1})
    assert figures.seconds == 0.4
    assert figures.latency_ms is not None
    assert figures.isl is not None
    assert (figures.latency_ms.mean, figures.isl.mean, figures.tokens_per_s_per_gpu) == (200.0, 306, 40.0)
    assert load_records(tmp_path / "out/peer/c4", 2)[0].gaps_ms == (1.0, 5.0)


def test_other_files_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["aiperf", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    for name in ("x/profile_export_aiperf.json", "x/profile_export.jsonl"):
        (tmp_path / name).write_text('{"input_config": {}}')
    assert run(["aiperf", str(tmp_path / "x")]) == 1
    assert "not of a form of aiperf that is known" in capsys.readouterr().err
