"""The scripts of engines of several pods: the leader starts a rank per GPU, the others let it in without root."""

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.deploy.kubernetes import CHART
from penstock.infra.process.child import die_with_parent
from tests.pipeline.support import free_port, until

FILES = CHART / "files"
SCRIPTS = ("lead.sh", "follow.sh")


def lead(tmp_path: Path, size: int) -> subprocess.CompletedProcess[str]:
    """The leader's script with an mpirun that tells its arguments."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ssh-privatekey").write_text("key")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    mpirun.chmod(0o755)
    return subprocess.run(
        ["bash", FILES / "lead.sh", "4", "penstock", "worker", "--model", "a b"],
        capture_output=True, text=True, check=False, timeout=60,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "WAIT_S": "0",
            "SSH_PORT": "2222", "SSH_KEYS": str(tmp_path / "keys"),
            "LWS_LEADER_ADDRESS": "llama4-decode-0.llama4-decode.inference.invalid", "LWS_GROUP_SIZE": str(size),
        },
    )  # fmt: skip


def test_the_leader_starts_a_rank_per_gpu_of_every_pod_and_the_first_is_the_worker(tmp_path: Path) -> None:
    run = lead(tmp_path, 1)
    assert run.returncode == 0, run.stderr
    argv = run.stdout.splitlines()
    assert argv[argv.index("-np") + 1] == "4"
    assert argv[argv.index("--host") + 1] == "localhost:4"
    assert argv[argv.index("trtllm-llmapi-launch") :] == [
        "trtllm-llmapi-launch", "penstock", "worker", "--model", "a b",
    ]  # fmt: skip
    assert (tmp_path / ".ssh" / "penstock").stat().st_mode & 0o777 == 0o600


def test_the_leader_waits_for_the_others_only_so_long(tmp_path: Path) -> None:
    run = lead(tmp_path, 2)
    assert run.returncode == 69
    assert "no SSH server on llama4-decode-0-1.llama4-decode.inference" in run.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_sound_bash(name: str) -> None:
    run = subprocess.run(["bash", "-n", FILES / name], text=True, capture_output=True, check=False)
    assert run.stderr == ""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own may not be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


async def test_a_follower_lets_the_leader_s_key_in_without_root(open_folder: Path) -> None:
    if not os.access("/usr/sbin/sshd", os.X_OK) or shutil.which("ssh") is None:
        pytest.skip("OpenSSH is not installed")
    somebody = next((each for each in pwd.getpwall() if each.pw_uid and each.pw_shell.endswith("sh")), None)
    if os.getuid() != 0 or somebody is None:
        pytest.skip("only root can become somebody else, and there must be one with a shell")
    keys, home, log = (open_folder / name for name in ("keys", "home", "log"))
    key = keys / "ssh-privatekey"
    for folder in (keys, home):
        folder.mkdir()
        os.chown(folder, somebody.pw_uid, somebody.pw_gid)
    # Its owner is root, so that ssh reads it here. A Secret in a pod is readable by the group.
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)  # noqa: ASYNC221
    key.with_name("ssh-privatekey.pub").rename(keys / "ssh-publickey")
    port = free_port()
    (open_folder / "penstock").write_text(f'#!/bin/sh\necho "$@" > {home}/asked\n')
    (open_folder / "penstock").chmod(0o755)
    environ = {
        "PATH": f"{open_folder}:{os.environ['PATH']}", "HOME": str(home), "SSH_PORT": str(port), "SSH_KEYS": str(keys),
        "PROMETHEUS_MULTIPROC_DIR": "/tmp/metrics", "METRICS_PORT": "9191",
    }  # fmt: skip
    with log.open("wb") as output:
        server = subprocess.Popen(  # noqa: ASYNC220
            ["bash", FILES / "follow.sh"], env=environ, user=somebody.pw_uid, group=somebody.pw_gid, extra_groups=[],
            stdout=output, stderr=output, preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        await until(lambda: asyncio.to_thread(lambda: "Server listening" in log.read_text()), "sshd listens")
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes", "ConnectTimeout=10")
        ssh = ["ssh", *(word for option in options for word in ("-o", option)), "-i", str(key), "-p", str(port)]
        told = subprocess.run(  # noqa: ASYNC221
            [*ssh, f"{somebody.pw_name}@127.0.0.1", "id", "-u"], capture_output=True, text=True, check=False, timeout=30
        )
        assert told.stdout.strip() == str(somebody.pw_uid), told.stderr + log.read_text()
        assert (home / "asked").read_text() == "rank-metrics --metrics-host=:: --metrics-port=9191\n"
    finally:
        server.terminate()
        server.wait(30)
