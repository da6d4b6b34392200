"""A deployment whose terminal is closed stops in order, although nobody can read what it says."""

import os
import pty
import select
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
