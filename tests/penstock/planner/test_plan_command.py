"""Flags of ``penstock plan``, and what it says of a deployment that it cannot plan."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.configs.flags import BadSettings
from penstock.configs.planner_settings import BadRules, PlannerSettings, rules_of
from penstock.measure.profile.data import save
from penstock.planner.connectors import Replicas
from penstock.planner.plan_command import connector_of, line, run, timings, without_infinite
from penstock.schemas.plans import Latency
from tests.penstock.planner.engines import engine
from tests.schemas.samples import SAMPLES

NOBODY: Any = None


def test_prefill_and_decode_may_have_a_profile_each(tmp_path: Path) -> None:
    save(tmp_path / "p", engine(prefill_ms=50).profile)
    save(tmp_path / "d", engine(prefill_ms=70).profile)
    both = timings((str(tmp_path / "p"), str(tmp_path / "d")), ("prefill", "decode"))
    assert [both[role].prefill_ms(1000) for role in ("prefill", "decode")] == [50, 70]  # type: ignore[index]
    one = timings((str(tmp_path / "p"),), ("prefill", "decode"))
    assert one["decode"].prefill_ms(1000) == 50
    with pytest.raises(BadSettings, match="aggregated; give one profile"):
        timings((str(tmp_path / "p"), str(tmp_path / "d")), ("aggregated",))


def test_mock_workers_need_no_folder() -> None:
    slow, fast = (timings((text,), ("aggregated",))["aggregated"].prefill_ms(1000) for text in ("mock", "mock:4"))
    assert slow == pytest.approx(4 * fast, rel=1e-3)
    for wrong in ("mock:x", "mock:0"):
        with pytest.raises(BadSettings, match=f"--profile {wrong}"):
            timings((wrong,), ("aggregated",))


def test_workloads_are_those_of_the_chart_unless_they_are_named() -> None:
    settings = PlannerSettings(
        connector="kubernetes",
        kubernetes_url="http://127.0.0.1:8001",
        kubernetes_workloads=("decode=leaderworkerset/big-decode",),
    )
    connector = connector_of(settings, NOBODY, "demo", ("prefill", "decode"))
    assert isinstance(connector, Replicas)
    assert list(connector._paths.values()) == [
        "/apis/apps/v1/namespaces/default/deployments/penstock-prefill/scale",
        "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets/big-decode/scale",
    ]
    with pytest.raises(BadSettings, match="roles here: aggregated"):
        connector_of(settings, NOBODY, "demo", ("aggregated",))


def test_local_workers_are_those_of_a_data_folder() -> None:
    with pytest.raises(BadSettings, match="needs the --data-dir"):
        connector_of(PlannerSettings(connector="local", nats_url="nats://h"), NOBODY, "demo", ("aggregated",))


def test_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(BadRules, match="--min-workers 5 is above --max-workers 2"):
        rules_of(PlannerSettings(min_workers=5, max_workers=2), ("aggregated",), "holt")


def test_a_folder_without_a_deployment_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PlannerSettings(data_dir=str(tmp_path))) == 1
    assert run(PlannerSettings(data_dir=str(tmp_path), history=True)) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(each.startswith("penstock plan: ") for each in said)


def test_a_decision_is_one_line() -> None:
    planned, _ = SAMPLES["planned"]
    assert line(planned) == (
        "1.50 requests/s (planned for 1.50), 7 waiting, TTFT p50 90 ms, ITL p50 9.0 ms, decode 3 → 5 (more load), "
        "failed: no GPU is free"
    )


def test_a_decision_names_the_limit_that_was_missed_and_why_nothing_was_done() -> None:
    planned, _ = SAMPLES["planned_of_a_missed_limit"]
    assert line(planned) == (
        "1.50 requests/s (planned for 1.50), TTFT p95 250 ms, ITL p95 31.5 above 25 ms, "
        "decode 2 (CPU starved: more workers would not help)"
    )

    def told(missed: int, *reasons: str) -> str:
        change = msgspec.structs.replace(planned.decision.changes["decode"], reasons=reasons, missed=missed)
        decision = msgspec.structs.replace(planned.decision, changes={"decode": change})
        return line(msgspec.structs.replace(planned, decision=decision)).partition("decode ")[2]

    assert told(1, "watching") == "2 (limit missed, 1 of 3 decisions)"
    assert told(3, "limit_missed", "gpu_budget") == "2 (limit missed for 3 decisions, at the GPU budget)"
    assert told(4, "maximum") == "2 (at the maximum)"
    assert told(4, "cooling_down") == "2 (cooling down after the last change)"
    assert told(4, "of_a_later_build") == "2 (of_a_later_build)"


def test_a_predicted_latency_that_is_infinite_is_left_out_of_json() -> None:
    planned, _ = SAMPLES["planned"]
    beyond = msgspec.structs.replace(planned.decision, predicted=Latency(math.inf, 9.0, 1.5))
    read = json.loads(without_infinite(msgspec.structs.replace(planned, decision=beyond)))
    assert read["decision"]["predicted"] == {"itl_ms": 9.0, "busy": 1.5}
    assert json.loads(without_infinite(planned)) == json.loads(msgspec.json.encode(planned))


def test_only_workers_of_this_machine_share_its_cores() -> None:
    remote = PlannerSettings(nats_url="nats://h")
    assert not connector_of(remote, NOBODY, "demo", ("aggregated",)).one_machine
    assert connector_of(PlannerSettings(), NOBODY, "demo", ("aggregated",)).one_machine
    local = PlannerSettings(connector="local")
    assert connector_of(local, NOBODY, "demo", ("aggregated",)).one_machine
    cluster = PlannerSettings(connector="kubernetes", kubernetes_url="http://127.0.0.1:8001")
    assert not connector_of(cluster, NOBODY, "demo", ("aggregated",)).one_machine
