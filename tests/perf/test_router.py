"""``penstock bench router``: the command line, its table and files."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.configs.flags import parse
from penstock.measure.sweep.compare import Interval
from tests.perf.router import BadBench, RouterBenchSettings, difference, fleet, run

FEW = ["--workload", "hot", "--requests", "40", "--workers", "2", "--seeds", "2", "--load", "0.5"]


def test_policies_are_compared_in_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    settings = parse(
        RouterBenchSettings, [*FEW, "--policies", "kv,round_robin", "--json", str(file)], prog="x", about=""
    )
    assert run(settings) == 0
    shown = capsys.readouterr().out
    assert "hot" in shown
    assert "round_robin" in shown
    found = json.loads(file.read_bytes())
    assert [each["policy"] for each in found["summaries"]] == ["kv", "round_robin"]
    assert len(found["runs"]) == 4


def test_a_trace_is_replayed_with_multipliers(tmp_path: Path) -> None:
    trace, file = tmp_path / "small.jsonl", tmp_path / "figures.json"
    row = {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}
    trace.write_text("".join(json.dumps(row | {"timestamp": n * 100}) + "\n" for n in range(20)))
    settings = RouterBenchSettings(
        trace=str(trace), load=(2.0,), seeds=1, workers=2, policies=("dynamo",), prefix_multiplier=2.0, json=str(file)
    )
    assert run(settings) == 0
    assert json.loads(file.read_bytes())["summaries"][0]["workload"] == "small"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (RouterBenchSettings(prefill=2), "--prefill and --decode go together"),
        (RouterBenchSettings(workers=2, slow_workers=3), "there are 2 workers"),
        (RouterBenchSettings(trace="/nowhere/x.jsonl"), "No such file"),
        (RouterBenchSettings(block_size=48, trace="one"), "cannot be cut into blocks of 48"),
    ],
)
def test_settings_that_do_not_fit_are_explained(
    settings: RouterBenchSettings, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if settings.trace == "one":
        path = tmp_path / "one.jsonl"
        path.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}\n')
        settings = msgspec.structs.replace(settings, trace=str(path))
    assert run(settings) == 1
    assert error in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    settings = RouterBenchSettings(
        workload=("hot",),
        requests=10,
        workers=2,
        seeds=1,
        load=(0.5,),
        policies=("random",),
        plot=str(tmp_path / "x.png"),
    )
    assert run(settings) == 1
    assert "pip install 'penstock[bench]'" in capsys.readouterr().err


def test_a_fleet_has_the_roles_ranks_and_speeds_of_its_flags() -> None:
    pairs = fleet(RouterBenchSettings(prefill=2, decode=1, blocks=100))
    assert [worker.role for worker in pairs.workers] == ["prefill", "prefill", "decode"]
    slow = fleet(RouterBenchSettings(workers=3, ranks=2, slow_workers=1, slow_decode=2))
    assert [worker.slowness for worker in slow.workers] == [2.0, 1.0, 1.0]
    assert [worker.decode_slowness for worker in slow.workers] == [2.0, 2.0, 1.0]
    assert len(slow.targets) == 6
    with pytest.raises(BadBench):
        fleet(RouterBenchSettings(decode=1))


def test_a_difference_is_a_percentage_with_its_interval() -> None:
    assert difference(Interval(0.12, 0.09, 0.15)) == "+12.0 ± 3.0 %"
    assert difference(Interval(0.12, -1.0, float("inf"))) == "+12.0 %"


@pytest.mark.parametrize("roles", [{"workers": 4}, {"prefill": 2, "decode": 2}])
def test_a_sweep_over_the_common_share_is_a_series_per_policy(roles: dict[str, int], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    settings = RouterBenchSettings(
        prefix_ratios=(0.1, 0.5, 0.9),
        policies=("kv", "round_robin"),
        load=(1.0,),
        seeds=1,
        requests=60,
        prompt_tokens=4000,
        output_tokens=20,
        prefixes=6,
        json=str(file),
        **roles,
    )
    assert run(settings) == 0
    (sweep,) = json.loads(file.read_bytes())["sweeps"]
    assert sweep["prefix_ratios"] == [0.1, 0.5, 0.9]
    kv, round_robin = (sweep["hit_rates"][name] for name in ("kv", "round_robin"))
    assert kv == sorted(kv)
    assert all(ours >= theirs for ours, theirs in zip(kv, round_robin, strict=True))
    assert kv[-1] > 0.6
    assert sweep["ttft_values"]["kv"][-1] < sweep["ttft_values"]["round_robin"][-1]
    assert len(sweep["throughput_values"]["kv"]) == 3
