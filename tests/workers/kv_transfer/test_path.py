"""Which way to go, and where this process lies."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.transport_protocol import RDMA, SHARED, allowed, has_rdma, host_identity, path_between

HOSTS = ("", "a", "b")
ENDPOINTS = [Endpoint(f"{host}{rdma}", "nixl", host=host, rdma=rdma) for host in HOSTS for rdma in (False, True)]


@pytest.mark.parametrize(("a", "b"), list(itertools.product(ENDPOINTS, ENDPOINTS)), ids=lambda each: each.agent)
def test_one_reads_where_memory_or_rdma_is_shared_and_writes_elsewhere(a: Endpoint, b: Endpoint) -> None:
    shared = (a.host == b.host != "") or (a.rdma and b.rdma)
    assert path_between(a, b) == path_between(b, a) == ("read" if shared else "write")


@pytest.mark.parametrize(
    ("value", "shared", "rdma"),
    [
        ("", True, True), ("all", True, True), ("tcp", False, False), ("cma,tcp", True, False),
        ("sm,self", True, False),
        ("rc_x,cuda_copy", False, True), ("^cma", False, True), ("^rc", True, False), ("ud:aux,tcp", False, True),
    ],
)  # fmt: skip
def test_the_transports_that_ucx_is_given_are_understood(value: str, shared: bool, rdma: bool) -> None:
    assert (allowed({"UCX_TLS": value}, SHARED), allowed({"UCX_TLS": value}, RDMA)) == (shared, rdma)


def test_the_same_place_has_the_same_identity_and_no_way_to_copy_has_none() -> None:
    here = host_identity({})
    if here:  # a sandbox may forbid copying between processes
        assert here == host_identity({"UCX_TLS": "cma"})
        assert here.count("/") == 2
    assert host_identity({"UCX_TLS": "tcp"}) == ""


def test_another_pid_namespace_is_another_place() -> None:
    """Containers on one host cannot copy from each other: reads would silently go over TCP."""
    code = "from penstock.workers.kv_transfer.transport_protocol import host_identity; print(host_identity({}))"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    if os.geteuid() or not shutil.which("unshare") or not host_identity({}):
        pytest.skip("needs root, `unshare`, and a sandbox that lets processes copy from each other")
    there = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if there.returncode:
        pytest.skip(f"no PID namespaces here: {there.stderr.strip()}")
    assert there.stdout.strip() not in ("", host_identity({}))


def test_only_an_active_port_is_rdma(tmp_path: Path) -> None:
    assert not has_rdma({}, tmp_path)
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert not has_rdma({}, tmp_path)
    state.write_text("4: ACTIVE\n")
    assert has_rdma({}, tmp_path)
    assert not has_rdma({"UCX_TLS": "tcp"}, tmp_path)
