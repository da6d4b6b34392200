"""An engine's processes end with the worker, however that ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.workers.engines.external.runtime import ProcessGuard, children
from tests.pipeline.support import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")

WORKER = """
import subprocess, sys, time
from penstock.workers.engines.external.runtime import ProcessGuard, children
before = children()
engine = subprocess.Popen(["sleep", "600"])
assert children() - before == {engine.pid}
guard = ProcessGuard(children() - before)
if sys.argv[1] == "closed":
    guard.close()
print(engine.pid, flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("state", ["guarded", "closed"])
def test_after_a_kill_of_the_worker_its_engine_ends_unless_it_was_left_to_itself(state: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, state], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert worker.stdout is not None
    with worker.stdout:
        engine = int(worker.stdout.readline())
    assert runs(engine)
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + (10 if state == "guarded" else 0.3)
    while runs(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert runs(engine) == (state == "closed")
    if state == "closed":
        os.kill(engine, signal.SIGKILL)


def test_without_processes_there_is_nothing_to_guard() -> None:
    before = children()
    guard = ProcessGuard(())
    assert children() == before
    guard.close()
    guard.close()
