"""The benchmark of the transport measures what it says, and its bytes are right."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.measure.handoff import (
    MAX_POOL_BYTES,
    HandoffBenchSettings,
    across,
    host_and_port,
    measure,
    rdma_bytes,
    rdma_line,
    report,
)
from penstock.workers.kv_transfer.transport_protocol import TransportUnavailable

with_nixl = pytest.mark.skipif(
    not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed (pip install nixl-cu12)"
)
COMMAND = [sys.executable, "-m", "penstock", "bench", "handoff"]


@pytest.fixture(params=["all", "tcp"])
def transports(request: pytest.FixtureRequest) -> str:
    """What UCX may use: memory of the other process, or what hosts without RDMA have."""
    return str(request.param)


@pytest.fixture
def owner(transports: str) -> Iterator[str]:
    """The address of a waiting host, which is another address of this machine."""
    environ = {**os.environ, "UCX_TLS": transports}
    with subprocess.Popen(
        [*COMMAND, "--listen", "127.0.0.2:0"],
        env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        first = process.stdout.readline()
        try:
            found = re.match(r"waiting on (127\.0\.0\.2:\d+);", first)
            assert found, first
            yield found[1]
        finally:
            process.terminate()


@with_nixl
def test_between_two_addresses_blocks_are_read_or_written_as_handoffs_are(
    owner: str, transports: str, tmp_path: Path
) -> None:
    with socket.create_connection(host_and_port(owner)) as stranger:  # does not stop the next client
        stranger.sendall(b"GET / HTTP/1.1\r\n")
    out = tmp_path / "figures.json"
    small = ["--block-bytes", "16384", "--blocks", "12", "--rounds", "3"]
    run = subprocess.run(
        [*COMMAND, "--peer", owner, *small, "--json", str(out)],
        env={**os.environ, "UCX_TLS": transports}, text=True, capture_output=True, timeout=90,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    figures = json.loads(out.read_bytes())["figures"]
    # Without RDMA and without the other one's memory, the owner of the bytes pushes them.
    assert [each["op"] for each in figures] == ["WRITE" if transports == "tcp" else "READ"] * 2
    assert run.stdout.splitlines()[-1].startswith("RDMA: ")


@with_nixl
def test_a_pool_that_is_too_large_is_refused_by_its_owner(owner: str) -> None:
    blocks = MAX_POOL_BYTES // 64 + 1
    refused = f"{blocks} blocks of 64 bytes: at least 1 of 64, at most 8 GiB"
    with pytest.raises(ValueError, match=refused), across(owner, 64, blocks):
        pass


def test_a_host_that_does_not_wait_is_named() -> None:
    refused = r"--peer 127.0.0.2:9 cannot be reached: Connection refused"
    with pytest.raises(TransportUnavailable, match=refused), across("127.0.0.2:9", 64, 1):
        pass


@pytest.mark.parametrize("address", ["", "10.0.0.1", ":5600", "host:port", "host:70000"])
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT, as in"):
        host_and_port(address)


def test_addresses_of_both_families_are_understood() -> None:
    assert host_and_port("[::1]:5600") == ("::1", 5600)
    assert host_and_port("gpu-1:5600") == ("gpu-1", 5600)


def test_what_rdma_ports_carried_is_told_from_their_counters(tmp_path: Path) -> None:
    assert rdma_bytes(tmp_path) is None
    for device, words in (("mlx5_0", "1000\n"), ("mlx5_1", "N/A (no PMA)\n")):
        counters = tmp_path / device / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        for name in ("port_rcv_data", "port_xmit_data"):
            (counters / name).write_text(words)
    assert rdma_bytes(tmp_path) == 8000
    assert (
        rdma_line(8000, 2_000_008_000, 2_000_000_000) == "RDMA: 2.00 GB through this host's ports, of 2.00 GB of blocks"
    )
    assert "no ports that count" in rdma_line(None, None, 1)


@with_nixl
def test_both_orders_are_measured_and_the_ratios_are_of_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measure(block_bytes=16384, blocks=12, rounds=3)
    assert [(each.order, each.blocks, each.block_bytes) for each in figures] == [
        ("run", 12, 16384),
        ("scattered", 12, 16384),
    ]
    for each in figures:
        assert each.ratio == pytest.approx(each.bare_ms / each.ours_ms)
        assert each.checked_ratio == pytest.approx(each.bare_ms / each.checked_ms)
        assert each.bare_mb_per_s == pytest.approx(12 * 16384 / 1e3 / each.bare_ms)
    report(figures)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_default_is_a_prompt_of_4000_tokens() -> None:
    assert HandoffBenchSettings().blocks * 32 == 4000
    assert HandoffBenchSettings().block_bytes[0] == 8 * 2 * 32 * 2 * 64 * 4
