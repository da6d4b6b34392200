"""``penstock run`` stops what it started, whichever signal ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.kv_transfer.support import until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_neither_processes_nor_the_conversation(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "infra.cli", "run", "demo", "hello", "--", "--engine", "mock"]
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
