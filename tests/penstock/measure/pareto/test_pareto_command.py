"""``penstock bench pareto`` on result trees with known figures."""

import json
from pathlib import Path

import pytest

from penstock.measure.pareto.pareto_command import run
from penstock.measure.pareto.records import FILE, BadDeployment, parse_deployment
from tests.penstock.measure.sweep.samples import result, write

pytest.importorskip("matplotlib")
PRICES = "gpus: {big: {price_per_hour: 3.6, watts: 500}}\nenergy_price_per_kwh: 0.1\n"


def trees(out: Path, gpus: int = 1) -> None:
    for name, latency in (("slow", 200.0), ("fast", 100.0)):
        write(out, *(result(name, level, [latency], gpus=gpus) for level in (1, 2, 8, 64)))


def test_records_fronts_gains_costs_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees(tmp_path)
    (tmp_path / "prices.yaml").write_text(PRICES)
    told = {"kind": "split", "prefill_workers": 1, "decode_workers": 3, "settings": {"batch": 64}}
    (tmp_path / "fast" / FILE).write_text(json.dumps(told))
    args = [str(tmp_path), "--prices", str(tmp_path / "prices.yaml"), "--baseline", "slow"]
    assert run([*args, "--deployment", "fast:total_gpus=4,mtp=on"]) == 0
    page = json.loads((tmp_path / "plots/pareto.json").read_text())
    fast = [each for each in page["records"] if each["name"] == "fast"]
    assert {(each["kind"], each["total_gpus"], each["decode_workers"]) for each in fast} == {("split", 4, 3)}
    assert fast[0]["settings"] == {"batch": 64, "mtp": "on"}
    assert [each["concurrency"] for each in fast] == [1, 2, 8, 64]
    for each in page["records"]:
        per_gpu = each["output_tokens_per_s_per_gpu"]
        assert per_gpu * each["total_gpus"] == pytest.approx(each["output_tokens_per_s"])
        assert each["cost"]["hardware"] == pytest.approx(1000 / per_gpu)
    # The pace of these servers never changes: of each kind only the level with the most throughput is on the front.
    for kind in ("slow", "split"):
        found = [each for each in page["records"] if each["kind"] == kind]
        best = max(each["output_tokens_per_s_per_gpu"] for each in found)
        assert [each["output_tokens_per_s_per_gpu"] for each in found if each["on_front"]] == [best]
    # Twice as fast on four times the GPUs.
    assert page["gains"]["split"]["ratio"] == pytest.approx(0.5, rel=0.1)
    for name in ("pareto.png", "cost.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "split: 0.5" in said
    assert "USD per million output tokens" in said
    assert "split: 0.5" in (tmp_path / "plots/pareto.txt").read_text()


def test_what_is_missing_is_named_with_the_flag_that_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees(tmp_path, gpus=0)
    (tmp_path / "prices.yaml").write_text("gpus: {a: {price_per_hour: 1}, b: {price_per_hour: 2}}")
    assert run([str(tmp_path)]) == 1
    assert "--deployment fast:total_gpus=N" in capsys.readouterr().err
    (tmp_path / FILE).write_text('{"total_gpus": 2}')  # for both
    assert run([str(tmp_path), "--prices", "none.yaml"]) == 1
    assert "pareto: none.yaml: No such file or directory\n" in capsys.readouterr().err
    assert run([str(tmp_path), "--prices", str(tmp_path / "prices.yaml")]) == 1
    assert "--deployment fast:gpu=TYPE" in capsys.readouterr().err
    assert run([str(tmp_path), "--baseline", "none"]) == 1
    assert "there are fast, slow" in capsys.readouterr().err
    assert run([str(tmp_path), "--deployment", "other:gpu=a"]) == 1
    assert "no endpoint is called other" in capsys.readouterr().err
    (tmp_path / FILE).write_text('{"total_gpu": 2}')
    assert run([str(tmp_path)]) == 1
    assert "total_gpu" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["x", "x:", "x:gpu", "x:gpu=", ":gpu=a", "x:gpu=a,"])
def test_a_deployment_of_another_form_is_refused(flag: str) -> None:
    with pytest.raises(BadDeployment, match="NAME:FIELD=VALUE"):
        parse_deployment([flag])
