"""Which NIXL is taken, and that loading it leaves the process as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.workers.kv_transfer.nixl import candidates, cuda_driver
from tests.workers.kv_transfer.support import needs_nixl

QUIET = """
import json, logging, os, signal, sys
raised = logging.raiseExceptions
from penstock.workers.kv_transfer.transport_thread import open_transport
transport = open_transport("nixl", "quiet", {})
handlers = logging.getLogger("nixl").handlers
print("FACTS" + json.dumps({
    "raised": raised == logging.raiseExceptions,
    "handlers": len(handlers),
    "torch": "torch" in sys.modules,
    "caught": int(next(l for l in open("/proc/self/status") if l.startswith("SigCgt")).split()[1], 16),
    "environ": {k: v for k, v in os.environ.items() if k.startswith(("UCX_", "NIXL_"))},
    "version": transport.endpoint.version,
}))
transport.close()
"""


def torch(cuda: str | None) -> Any:
    return {"torch": SimpleNamespace(version=SimpleNamespace(cuda=cuda))}


@pytest.mark.parametrize(
    ("loaded", "driver", "chosen"),
    [
        ({}, 0, ("nixl_cu12", "nixl_cu13")),
        ({}, 550, ("nixl_cu12", "nixl_cu13")),
        ({}, 580, ("nixl_cu13", "nixl_cu12")),
        (torch("13.0"), 580, ("nixl_cu13",)),
        (torch("12.8"), 580, ("nixl_cu12",)),
        (torch(None), 0, ("nixl_cu12", "nixl_cu13")),
        (torch("12.8") | {"nixl_cu13": ModuleType("nixl_cu13")}, 580, ("nixl_cu13",)),  # a second one could not load
    ],
)
def test_the_module_fits_what_is_loaded_and_what_the_driver_runs(
    loaded: dict[str, Any], driver: int, chosen: tuple[str, ...]
) -> None:
    assert candidates(loaded, driver) == chosen


def test_the_driver_is_read_from_what_the_kernel_module_says(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert cuda_driver(file) == 0
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    assert cuda_driver(file) == 580


def run(code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    own = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=own | environ, capture_output=True, text=True, timeout=60, check=False
    )


@needs_nixl
def test_opening_prints_nothing_and_leaves_logging_and_signals_alone() -> None:
    done = run(QUIET, UCX_TCP_USER_TIMEOUT="7s")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    facts = json.loads(line.removeprefix("FACTS"))
    assert facts["raised"]
    assert facts["handlers"] == 0
    assert not facts["torch"]
    assert facts["caught"] & 1 == 0  # SIGHUP ends the process, as it did
    assert facts["environ"]["UCX_TCP_USER_TIMEOUT"] == "7s"  # what was set stays
    assert facts["environ"]["UCX_TCP_CONN_NB"] == "y"
    assert facts["version"].startswith("1.")


@needs_nixl
def test_what_does_not_work_here_is_reported_when_it_is_opened() -> None:
    code = "from penstock.workers.kv_transfer.transport_thread import open_transport\nopen_transport('nixl', 'bad', {})"
    done = run(code, UCX_TLS="no_such_transport")
    assert done.returncode == 1
    assert "TransportUnavailable: NIXL 1." in done.stderr
    assert "making the agent" in done.stderr


def test_without_nixl_it_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "for name in ('nixl_cu12', 'nixl_cu13'): sys.modules[name] = None\n"
        "from penstock.workers.kv_transfer.transport_thread import open_transport\nopen_transport('auto', 'none', {})"
    )
    done = run(code)
    assert done.returncode == 1
    assert "TransportUnavailable" in done.stderr
    assert "pip install nixl-cu12" in done.stderr
