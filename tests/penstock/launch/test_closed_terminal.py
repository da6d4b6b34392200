"""A deployment stops in order although nobody reads what it says."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline.support import ROOT


@pytest.mark.timeout(90)
def test_everything_ends_when_the_terminal_is_closed(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        argv = ["up", "--engine", "mock", "--http-port", "0", "--data-dir", "data"]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "TERM": "dumb"}
        os.execve(sys.executable, [sys.executable, "-m", "penstock", *argv], environ)
    said = b""
    while b"(ready after" not in said:
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP
    until = time.monotonic() + 30
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert ended[0] == pid
    assert not (tmp_path / "data" / "state.json").exists()


@pytest.mark.timeout(90)
def test_everything_ends_when_the_reader_of_the_output_has_ended_first(tmp_path: Path) -> None:
    """As after Ctrl-C in ``penstock up | tee log``, which ends ``tee`` at once."""
    argv = ["up", "--engine", "mock", "--http-port", "0", "--dashboard-port", "-1", "--data-dir", "data"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "penstock", *argv]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as up, up.stdout:  # type: ignore[union-attr]  # fmt: skip
        try:
            for line in up.stdout:  # type: ignore[union-attr]
                if b"(ready after" in line:
                    break
            up.stdout.close()  # type: ignore[union-attr]
            up.send_signal(signal.SIGINT)
            assert up.wait(30) == 0
        finally:
            up.kill()
    assert not (tmp_path / "data" / "state.json").exists()
