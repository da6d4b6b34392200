"""A deployment for one measurement: started, awaited, and stopped behind it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

READY_S = 60.0
STOP_S = 20.0


@contextlib.contextmanager
def running(base: Path, *arguments: str) -> Iterator[None]:
    """`penstock up` with these arguments; its data is in ``base``/data, its log ``base``/up.log.

    Raises:
        RuntimeError: it was not ready in time; the text has the end of its log.
    """
    log = base / "up.log"
    up = penstock(
        "up", "--http-port=0", f"--data-dir={base}/data", "--log-format=json", "--dashboard-port=-1", *arguments,
        log=log,
    )  # fmt: skip
    try:
        _wait_until_ready(up, log)
        yield
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()


def _wait_until_ready(up: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and up.poll() is None:
        if b'"event": "ready"' in log.read_bytes() or b'"event":"ready"' in log.read_bytes():
            return
        time.sleep(0.1)
    raise RuntimeError(f"the deployment was not ready within {READY_S:g} s: {end_of(log)}")


def penstock(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start one of our commands, with its output in ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip


def end_of(log: Path) -> str:
    """The last lines of a log, in one."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])
