"""A network cable that is pulled: two workers in namespaces of their own, joined by a pair of virtual interfaces."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.workers.kv_transfer.support import Start, Worker, needs_nixl, workers


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


def can_make_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"t{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=10, check=False).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], timeout=10, check=False).returncode == 0


pytestmark = [
    needs_nixl,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, `ip` and the right to make network namespaces"),
]


class Cable:
    """Joins the namespaces ``a`` and ``b``; their interfaces have the namespace's name."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.ends = (f"pa{tag}", f"pb{tag}")
        for end in self.ends:
            ip("netns", "add", end)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for number, end in enumerate(self.ends, 1):
            ip("link", "set", end, "netns", end)
            ip("-n", end, "addr", "add", f"10.213.7.{number}/24", "dev", end)
            ip("-n", end, "link", "set", "lo", "up")
            ip("-n", end, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.ends[0], "link", "set", self.ends[0], "down")

    def mend(self) -> None:
        ip("-n", self.ends[0], "link", "set", self.ends[0], "up")

    def remove(self) -> None:
        for end in self.ends:
            ip("netns", "del", end)


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.remove()


@pytest.fixture
def start() -> Iterator[Start]:
    with workers(f"link-{secrets.token_hex(3)}") as start:
        yield start


def test_a_cut_link_ends_a_write_and_a_mended_one_takes_the_next(cable: Cable, start: Start) -> None:
    def worker(end: str) -> Worker:
        environ = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": end, "IN_NAMESPACE": end}
        return start(name=end, environ=environ, blocks=64, block_bytes=1 << 20)

    sender, receiver = worker(cable.ends[0]), worker(cable.ends[1])
    assert sender.ask("write", receiver.endpoint, [1], [2], 5.0) == 1 << 20
    assert receiver.ask("values", [2]) == [[2]]
    cable.cut()
    cause, settled_s = sender.ask("fails", receiver.endpoint, list(range(64)), 0.5)
    assert cause == "timeout"
    assert 1.0 < settled_s < 8.0  # UCX_TCP_USER_TIMEOUT, not the 90 s and more of a kernel's own patience
    assert sender.ask("stats").quarantined_blocks == 0
    cable.mend()
    assert sender.ask("write", receiver.endpoint, [5], [6], 5.0) == 1 << 20
    assert receiver.ask("values", [6]) == [[6]]
    assert receiver.ask("write", sender.endpoint, [7], [8], 5.0) == 1 << 20
