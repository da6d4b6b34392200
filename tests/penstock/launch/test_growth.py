"""Workers that are added to a running deployment have the settings of their group, and GPUs of their own."""

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.launch.groups import PlanError, WorkerFleet, WorkerGroup, fleet_of
from penstock.launch.plan import PlannedProcess, further, plan


def url(role: str, cell: int) -> str:
    return f"nats://{role}@h"


def deployment(up: UpSettings, gpus: tuple[str, ...] | None = None) -> tuple[WorkerFleet, list[PlannedProcess]]:
    fleet = fleet_of(up)
    return fleet, plan(up, fleet, ports=[8000], url=url, sys_url=lambda cell: "", cores=4, gpus=gpus)


def test_a_further_worker_is_as_the_deployment_would_have_started_it() -> None:
    up = UpSettings(gateways=1, cells=1, engine="mock", prefill=1, decode=2, mock_speedup=3.0)
    fleet, children = deployment(up)
    larger = UpSettings(gateways=1, cells=1, engine="mock", prefill=1, decode=4, mock_speedup=3.0)
    expected = {child.name: child for child in deployment(larger)[1]}
    added = further(up, fleet, ["decode-2", "decode-3"], children, url=url, cores=4)
    assert added == [expected["decode-2"], expected["decode-3"]]
    assert isinstance(added[0].settings, WorkerSettings)
    assert added[0].settings.mock_speedup == 3.0


def test_metrics_ports_are_dealt_out_in_order() -> None:
    up = UpSettings(gateways=1, cells=1, engine="mock")
    fleet, children = deployment(up)
    added = further(up, fleet, ["worker-1", "worker-2"], children, url=url, cores=4, metrics_ports=[9100, 9101])
    assert [child.metrics_port for child in added] == [9100, 9101]


def test_a_role_without_workers_is_refused() -> None:
    up = UpSettings(gateways=1, cells=1, engine="mock")
    fleet, children = deployment(up)
    with pytest.raises(PlanError, match=r"'decode-0' can be added: this deployment has worker-N"):
        further(up, fleet, ["decode-0"], children, url=url, cores=4)


def test_gpus_that_are_in_use_are_not_given_again() -> None:
    group = WorkerGroup("aggregated", 1, {"role": "aggregated", "engine": "trtllm", "model": "m"}, gpus=2, alone=True)
    fleet, up = WorkerFleet((group,), "trtllm", "m", 32), UpSettings(cells=1, engine="trtllm")
    there = [PlannedProcess("worker-0", "worker", WorkerSettings(), ("0", "1"))]
    (added,) = further(up, fleet, ["worker-1"], there, url=url, cores=4, gpus=("0", "1", "2", "3"))
    assert added.gpus == ("2", "3")
    with pytest.raises(PlanError, match="worker-2 needs 2 GPUs, 0 of 4 are free"):
        further(up, fleet, ["worker-2"], [*there, added], url=url, cores=4, gpus=("0", "1", "2", "3"))


def test_engines_that_share_gpus_take_turns_when_none_is_free() -> None:
    group = WorkerGroup("aggregated", 2, {"role": "aggregated", "engine": "native", "model": "m"}, gpus=1)
    there = [PlannedProcess(f"worker-{n}", "worker", WorkerSettings(), (str(n),)) for n in range(2)]
    added = further(
        UpSettings(cells=1), WorkerFleet((group,), "native", "m", 32), ["worker-2", "worker-3"], there,
        url=url, cores=4,
        gpus=("0", "1"),
    )  # fmt: skip
    assert [child.gpus for child in added] == [("0",), ("1",)]
