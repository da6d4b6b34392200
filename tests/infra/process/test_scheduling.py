"""How the processes of a deployment are scheduled."""

import os
import subprocess
import sys
from pathlib import Path

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


def waiting(folder: Path, thread: str, seconds: float) -> None:
    (folder / thread).mkdir(exist_ok=True)
    (folder / thread / "schedstat").write_text(f"9 {round(seconds * 1e9)} 3\n")


def test_waits_for_a_core_are_those_of_the_thread_that_waited_longest(tmp_path: Path) -> None:
    waits = scheduling.CoreWaits(tmp_path)
    waiting(tmp_path, "1", 100.0)
    waiting(tmp_path, "2", 0.0)
    waits.look(1000.0)
    assert waits.percent == 0, "what came before the first look does not count"
    waiting(tmp_path, "1", 101.0)
    waiting(tmp_path, "2", 4.0)
    waiting(tmp_path, "3", 50.0)  # new
    waits.look(1009.0)
    assert waits.percent == 0, "the span is not over"
    waits.look(1010.0)
    assert waits.percent == 40
    (tmp_path / "2" / "schedstat").unlink()  # it has ended
    (tmp_path / "3" / "schedstat").write_text("")
    waits.look(1020.0)
    assert waits.percent == 0


def test_where_the_system_counts_no_waits_there_are_none(tmp_path: Path) -> None:
    waits = scheduling.CoreWaits(tmp_path / "missing")
    waits.look(0.0)
    waits.look(100.0)
    assert waits.percent == 0


STARVED = """
import os, subprocess, sys, time
from penstock.infra.process.scheduling import CoreWaits

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
try:
    waits = CoreWaits()
    waits.look(0.0)
    began, until = time.monotonic(), time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    waits.look(time.monotonic() - began + 10.0)
    print(waits.percent, 100 * (time.monotonic() - began - 0.3) / (time.monotonic() - began + 10.0))
finally:
    for other in others:
        other.kill()
        other.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts waits")
def test_a_process_that_shares_a_core_with_three_others_waits_for_it() -> None:
    ran = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=True)
    percent, expected = map(float, ran.stdout.split())
    assert percent == pytest.approx(expected, abs=2)
    assert percent > 0
