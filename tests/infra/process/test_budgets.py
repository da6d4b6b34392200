"""How many threads an engine takes on a machine that others use too."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.process.budgets import (
    PASSIVE_WAIT,
    _cgroup_free_bytes,
    cgroup_cpu,
    cgroup_folders,
    thread_count,
    usable_cores,
    wait_passively,
)


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


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_lowest_limit_of_all_control_groups_above_a_unit_holds(tmp_path: Path) -> None:
    """Version 2, as of a systemd unit with CPUQuota= and MemoryMax= in a slice that has limits, too."""
    own, top = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/serving.slice/penstock-worker.service\n")
    unit = top / "serving.slice" / "penstock-worker.service"
    put(top, cpu__stat="usage_usec 9000000\n")  # the root has no limits
    put(unit, cpu__max="400000 100000\n", cpu__stat="usage_usec 2500000\nuser_usec 1\n")
    put(unit, memory__max="max\n", memory__current="700\n", memory__stat="anon 500\n")
    put(unit.parent, cpu__max="max 100000\n", memory__max="1000\n", memory__current="900\n")
    put(unit.parent, memory__stat="anon 300\nactive_file 400\ninactive_file 200\n")
    folders = list(cgroup_folders("cpu", own, top))
    assert folders == [unit, unit.parent, top]
    assert cgroup_cpu(folders) == (4.0, 2.5)
    assert _cgroup_free_bytes(folders) == 700  # pages of files are dropped for others
    put(unit.parent, cpu__max="150000 100000\n")
    assert cgroup_cpu(folders) == (1.5, None)


def test_limits_of_version_1_are_read_where_the_host_s_path_is_not_mounted(tmp_path: Path) -> None:
    own, top = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("12:memory:/docker/1f\n3:cpuacct,cpu:/docker/1f\n1:name=systemd:/x\n0::/../outside\n")
    put(top / "cpu", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 0\n")
    put(top / "cpuacct", cpuacct__usage="1500000000\n")
    put(top / "memory", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="600\n", memory__stat="cache 1\n")
    assert cgroup_cpu(cgroup_folders("cpu", own, top)) == (0.5, 1.5)
    assert _cgroup_free_bytes(cgroup_folders("memory", own, top)) == 400
    put(top / "cpu", cpu__cfs_quota_us="-1\n")
    assert cgroup_cpu(cgroup_folders("cpu", own, top)) == (math.inf, None)


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
