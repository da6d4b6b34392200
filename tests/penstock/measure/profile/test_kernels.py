"""Shares of attention and dense layers, in made traces and in one of torch's own profiler."""

from pathlib import Path
from typing import Any

import pytest

from penstock.measure.profile.kernels import BadTrace, kind_of, own_times, read_trace, run, shares


def event(name: str, start: float, duration: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": tid}


def test_an_operator_does_not_count_what_it_calls() -> None:
    events = [
        event("aten::linear", 0, 100),
        event("aten::addmm", 10, 60),
        event("aten::copy_", 75, 5),
        event("aten::softmax", 20, 500, tid=2),
        event("aten::silu", 100, 10),
    ]
    assert [time for _, time in own_times(events)] == [35, 60, 5, 500, 10]


def test_kernels_count_alone_where_there_are_any() -> None:
    events = [
        event("aten::linear", 0, 1000),
        event("fmha_v2_context_bf16_128", 0, 30, "kernel"),
        event("kernel_mha_xqa_paged", 30, 20, "kernel"),
        event("nvjet_tst_128x64_gemm", 50, 40, "kernel"),
        event("ncclDevKernel_AllReduce", 90, 10, "kernel"),
    ]
    assert {each.kind: round(each.share, 3) for each in shares(events)} == {
        "dense": 0.4, "attention, context": 0.3, "attention, generation": 0.2, "communication": 0.1,
    }  # fmt: skip
    assert kind_of("void vectorized_elementwise_kernel") == "other"


def test_a_trace_of_torch_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, torch.no_grad():
        x = torch.randn(1, 4, 64, 32)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.nn.functional.linear(torch.randn(64, 128), torch.randn(256, 128))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = {each.kind: each for each in shares(read_trace(tmp_path / "trace.json"))}
    assert found["attention"].seconds > 0
    assert found["dense"].seconds > 0
    assert sum(each.share for each in found.values()) == pytest.approx(1)
    assert run([str(tmp_path / "trace.json")]) == 0
    assert "attention" in capsys.readouterr().out


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    for text in ("", "[1]", '{"traceEvents": 3}', "{}", "\x1f\x8b"):
        path.write_text(text, encoding="latin-1")
        assert run([str(path)]) == 1
        assert "penstock profile kernels: " in capsys.readouterr().err
    with pytest.raises(BadTrace, match="neither GPU kernels nor CPU operators"):
        shares([])
