"""``penstock run`` stops what it started, whichever signal ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.chat import run_command
from penstock.infra.nats_server.datadir import Lock
from tests.workers.kv_transfer.support import until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_neither_processes_nor_the_conversation(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "penstock", "run", "demo", "hello", "--", "--engine", "mock"]
    folder = tmp_path / "temporary"
    folder.mkdir()
    run = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stderr=subprocess.DEVNULL)
    try:
        until(lambda: any(folder.glob("penstock-run-*/nats.pid")), "the broker", 60)
        broker = int(next(folder.glob("penstock-run-*/nats.pid")).read_text())
        run.send_signal(number)
        assert run.wait(30) == 128 + number
    finally:
        run.kill()
        run.wait()
    assert list(folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(broker, 0)


def test_the_next_run_deletes_what_a_killed_one_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, running, ending, new, other = (tmp_path / f"penstock-run-{name}" for name in "abcde")
    locks = {}
    for folder in (killed, running, ending, new):
        folder.mkdir()
        locks[folder] = Lock(folder / run_command.CLAIM)
        locks[folder].acquire("penstock run")
        (folder / "store").mkdir()
    deployment = Lock(ending / "up.lock")
    deployment.acquire("penstock up")
    other.mkdir()  # nobody has claimed it
    for folder in (killed, ending, new):
        locks[folder].release()
    for folder in (killed, running, ending, other):
        os.utime(folder, (1, 1))
    run_command.remove_left_behind()
    assert sorted(tmp_path.iterdir()) == [running, ending, new, other]
    deployment.release()
    run_command.remove_left_behind()
    assert not ending.exists()
    locks[running].release()
