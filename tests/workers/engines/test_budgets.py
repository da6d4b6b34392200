"""How many threads an engine takes on a machine that others use too."""

import math
import subprocess
import sys

import pytest

from penstock.workers.engines.budgets import PASSIVE_WAIT, thread_count, usable_cores, wait_passively


@pytest.mark.parametrize(
    ("cores", "allowed", "quota", "load", "threads"),
    [
        (8, 8, math.inf, 0.1, 8),
        (2, 2, math.inf, 2.0, 1),
        (8, 8, math.inf, 3.0, 5),
        (8, 4, math.inf, 0.0, 4),
        (64, 64, 2.5, 10.0, 2),
        (64, 64, 0.5, 0.0, 1),
        (64, 8, math.inf, 30.0, 8),
        (2, 2, math.inf, 9.0, 1),
    ],
)
def test_the_thread_count_leaves_out_cores_that_are_limited_or_busy(
    cores: int, allowed: int, quota: float, load: float, threads: int
) -> None:
    assert thread_count(cores, allowed=allowed, quota=quota, load=load) == threads


def test_this_machine_offers_at_least_one_core() -> None:
    assert usable_cores() >= 1


def test_wait_settings_of_the_user_win() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    wait_passively(environ)
    assert environ == PASSIVE_WAIT | {"OMP_WAIT_POLICY": "ACTIVE"}


def test_torch_is_imported_after_the_wait_policy_is_set() -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from penstock.configs.settings import WorkerSettings\n"
        "from penstock.infra.model.modeldir import TINY\n"
        "from penstock.workers.engines import native\n"
        "import penstock.workers.run_worker\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    native.from_settings(WorkerSettings(logits_processor=('wrong',)), TINY)\n"
        "except ValueError as error:\n"
        "    assert 'wrong' in str(error)\n"
        "assert 'torch' in sys.modules\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE', os.environ\n"
    )
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
