"""How the processes of a deployment are scheduled."""

import os
import subprocess
import sys

import pytest

from penstock.configs.up_settings import UpSettings
from penstock.infra.process import scheduling
from penstock.launch.groups import fleet_of
from penstock.launch.plan import BrokerUrl, plan

BATCH_PARENT = """
import os, subprocess, sys
from penstock.infra.process.scheduling import batch, ordinary

batch()
show = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
for preexec in (None, ordinary(None)):
    child = subprocess.run(show, capture_output=True, text=True, check=True, preexec_fn=preexec)
    print(os.sched_getscheduler(0), child.stdout.strip())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="batch processes are Linux's")
def test_children_of_a_batch_process_are_batch_processes_unless_made_ordinary() -> None:
    ran = subprocess.run([sys.executable, "-c", BATCH_PARENT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [
        str(each) for each in (os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
@pytest.mark.parametrize("few", [1, 10_000])
def test_timers_of_a_child_may_be_late_on_few_cores_only(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(scheduling, "FEW_CORES", few)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    show = ["cat", "/proc/self/timerslack_ns"]
    usual, child = (
        int(subprocess.run(show, capture_output=True, check=True, preexec_fn=preexec).stdout)
        for preexec in (None, scheduling.lax_timers(None))
    )
    assert child == (usual if few == 1 else scheduling.TIMER_SLACK_NS)


@pytest.mark.parametrize(
    ("engine", "gpus", "driving"), [("mock", None, []), ("native", ["0"], ["worker-0"]), ("vllm", None, ["worker-0"])]
)
def test_only_workers_on_gpus_are_scheduled_normally(engine: str, gpus: list[str] | None, driving: list[str]) -> None:
    up = UpSettings(engine=engine, model=("/models/a",), cells=1)  # type: ignore[arg-type]
    url: BrokerUrl = lambda user, cell: user  # noqa: E731
    children = plan(up, fleet_of(up), ports=[8000], url=url, sys_url=lambda cell: "", cores=2, gpus=gpus)
    assert [child.name for child in children if child.drives_gpu] == driving
