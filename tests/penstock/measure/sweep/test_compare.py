"""Faster, slower or within noise, from repeated runs."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from penstock.measure.sweep.compare import SLOWER, Interval, compare, paired, run, unpaired, verdict
from tests.penstock.measure.sweep.samples import result, write

NOISE = [100.0, 104.0, 97.0, 102.0, 99.0]


def verdicts(a: list[float], b: list[float], **more: int) -> dict[str, str]:
    found = compare([result("a", 4, a)], [result("b", 4, b, **more)])
    return {each.metric: each.verdict for each in found}


def test_ten_percent_beyond_the_noise_is_slower_in_every_metric() -> None:
    slower = [value * 1.1 for value in NOISE]
    assert set(verdicts(NOISE, slower).values()) == {"slower"}
    assert set(verdicts(slower, NOISE).values()) == {"faster"}


def test_the_same_noise_in_another_order_is_within_noise() -> None:
    assert set(verdicts(NOISE, NOISE[::-1]).values()) == {"within noise"}
    assert set(verdicts(NOISE, NOISE[::-1], seed=2).values()) == {"within noise"}


def test_a_single_run_shows_no_noise() -> None:
    assert set(verdicts([100.0], [200.0]).values()) == {"unknown"}


def test_runs_of_the_same_requests_are_compared_in_pairs() -> None:
    # Each run differs from the next by more than B from A, and B is slower in each.
    wide = [100.0, 150.0, 200.0, 250.0]
    slower = [value * 1.02 for value in wide]
    assert verdicts(wide, slower)["latency mean"] == "slower"
    assert verdicts(wide, slower, seed=2)["latency mean"] == "within noise"


def test_a_change_below_the_least_that_counts_is_noise() -> None:
    sure = Interval(0.01, 0.008, 0.012)
    assert verdict(sure, -1, 0.0) == "slower"
    assert verdict(sure, -1, 0.02) == "within noise"
    assert verdict(Interval(math.nan, math.nan, math.nan), 1, 0.0) == "unknown"


def test_unpaired_intervals_are_those_of_welch() -> None:
    # scipy.stats.ttest_ind(log b, log a, equal_var=False).confidence_interval() with 7 degrees of freedom.
    a, b = [100.0, 104.0, 97.0, 102.0, 99.0], [110.0, 112.0, 109.0, 115.0, 108.0]
    found = unpaired(b, a)
    assert found.mean == pytest.approx(0.1036, abs=2e-4)
    assert found.low < 0.07 < found.mean < 0.14 < found.high + 0.01
    assert unpaired(b, b).low < 0 < unpaired(b, b).high
    assert paired(b, a).mean == pytest.approx(found.mean)


def test_what_else_differs_is_said_before_any_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = result("a", 1, NOISE), result("b", 1, NOISE)
    workload = msgspec.structs.replace(other.workload, isl=one.workload.isl + 1)
    other = msgspec.structs.replace(other, fingerprint="fp_2", workload=workload)
    write(tmp_path, msgspec.structs.replace(one, fingerprint="fp_1"), other)
    assert run([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    isl = one.workload.isl
    assert capsys.readouterr().out.splitlines()[:2] == [
        "the revision or the build changed: fp_1 in A, fp_2 in B",
        f"isl differs: {isl} in A, {isl + 1} in B",
    ]


def test_the_command_prints_a_verdict_per_level_and_fails_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = [value * 1.1 for value in NOISE]
    write(tmp_path, result("a", 1, NOISE), result("a", 4, NOISE), result("b", 1, NOISE), result("b", 4, slower))
    write(tmp_path, result("b", 8, NOISE))
    a, b, file = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "differences.json"
    assert run([a, b, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "slower: 10" in out
    assert "not compared: c8" in out
    assert {each["verdict"] for each in json.loads(file.read_text()) if each["level"] == "concurrency 4"} == {"slower"}
    assert run([a, b, "--fail-if-slower"]) == SLOWER
    assert run([b, a, "--fail-if-slower"]) == 0
    assert run([str(tmp_path), a]) == 1
    assert "several endpoints" in capsys.readouterr().err
