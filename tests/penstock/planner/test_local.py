"""Which workers of a `penstock up` come next; that they come and go is in tests/pipeline/test_planner.py."""

from pathlib import Path
from typing import Any

import pytest

from penstock.launch.state import Running
from penstock.planner.connectors import ConnectorFailed, LocalWorkers, joining

PROCESSES = [
    Running("worker-0", "worker", 1),
    Running("worker-1", "worker", drained=True),
    Running("worker-3", "worker", 3),
    Running("decode-1", "worker", drained=True),
    Running("demo-worker-7", "worker", drained=True),
]


def test_drained_workers_come_first_then_the_numbers_that_are_free() -> None:
    assert joining("worker", 4, PROCESSES) == ["worker-1", "worker-2", "worker-4", "worker-5"]
    assert joining("decode", 2, PROCESSES) == ["decode-1", "decode-0"]
    assert joining("demo-worker", 2, PROCESSES) == ["demo-worker-7", "demo-worker-0"]
    assert joining("prefill", 1, PROCESSES) == ["prefill-0"]
    assert joining("worker", 0, PROCESSES) == joining("worker", -2, PROCESSES) == []


async def test_a_folder_without_a_deployment_is_said(tmp_path: Path) -> None:
    nobody: Any = None
    workers = LocalWorkers(nobody, tmp_path, "demo")
    with pytest.raises(ConnectorFailed, match="no `penstock up` runs on"):
        await workers.counts()
