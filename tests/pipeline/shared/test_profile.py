"""``penstock profile endpoint`` on a real deployment with a mock worker that takes a GPU's step times."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.measure.profile.data import load
from tests.pipeline.support import Deployment

GRID = ("--granularity", "2", "--max-context", "1500", "--osl", "24", "--max-concurrency", "4", "--requests", "1")


def profile(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "profile", "endpoint", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_profile_has_every_point_of_its_grid_and_is_not_measured_twice(slow: Deployment, tmp_path: Path) -> None:
    argv = ("--endpoint", str(slow.data_dir / "state.json"), "--out", str(tmp_path), *GRID)
    run = profile(*argv, "--mode", "prefill")
    assert run.returncode == 0, run.stderr
    run = profile(*argv)
    assert run.returncode == 0, run.stderr
    assert "prefill " not in run.stdout  # these points were there
    found = load(tmp_path)
    assert found.setup.max_batch == 4
    assert found.decode.max_kv_tokens == found.setup.max_kv_tokens > 100_000
    assert found.prefill.prefill_isl == (100, 988)
    # At a quarter of the speed, by the mock engine's formula; a loaded machine is only ever slower.
    assert found.prefill.prefill_ttft[0] > 4 * 18
    assert found.prefill.prefill_ttft[1] > 4 * 31
    assert found.prefill.prefill_thpt_per_gpu[0] == pytest.approx(1e5 / found.prefill.prefill_ttft[0], rel=1e-3)
    assert found.decode.decode_isl == (100, 100, 1476, 1476)
    assert found.decode.decode_concurrency == (1, 4, 1, 4)
    assert all(itl > 4 * 5.5 for itl in found.decode.z_itl)
