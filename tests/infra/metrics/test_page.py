"""A metrics port that is taken is said in one line, before anything is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.metrics.scope import PortTaken, check_port
from penstock.infra.process.sockets import bind

ROOT = Path(__file__).parents[3]


def test_a_port_that_is_free_may_be_used_and_0_needs_none() -> None:
    with bind("127.0.0.1", 0) as held:
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(PortTaken, match="choose another --metrics-port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


@pytest.mark.parametrize(
    "argv", [["router"], ["worker", "--engine", "mock"], ["worker", "--engine", "native", "--role", "embed"]]
)
def test_a_taken_port_is_one_line(argv: list[str], tmp_path: Path) -> None:
    model = () if argv[0] == "router" else ("--model", str(ROOT / "configs" / "models" / "tiny"))
    with bind("127.0.0.1", 0) as held:
        held.listen()
        port = str(held.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *argv, *model, "--metrics-port", port, "--log-format", "json"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PENSTOCK_NATS_URL": "nats://127.0.0.1:1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert ended.returncode == 69
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert f"cannot serve metrics on 127.0.0.1:{port}" in line
