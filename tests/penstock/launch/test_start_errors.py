"""``penstock up`` and ``penstock nats`` where they cannot start: one line with the cause and the fix, no traceback."""

import ctypes
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_PR_CAPBSET_DROP = 24


def unprivileged() -> None:
    """Run before exec: root, too, then obeys permissions and reserved ports."""
    if os.geteuid() == 0:
        prctl = ctypes.CDLL(None).prctl
        for capability in range(64):
            prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def refused(command: str, *flags: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit status and the only line on stderr."""
    run = subprocess.run(
        [sys.executable, "-m", "penstock", command, *flags],
        capture_output=True, text=True, timeout=60, check=False, preexec_fn=unprivileged, cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    lines = [line for line in run.stderr.splitlines() if not line.startswith("Fetching ")]
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith(f"penstock {command}: ")
    assert "in use" not in lines[0] or "port" in lines[0]
    return run.returncode, lines[0]


COMMANDS = pytest.mark.parametrize("command", ["up", "nats"])


@COMMANDS
def test_a_folder_without_write_permission(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o555)
    for path in (folder, folder / "new"):
        status, line = refused(command, "--data-dir", str(path))
        assert status == 2
        assert f"--data-dir {path}" in line
        assert "not writable for you; change its permissions, or name another folder" in line


@COMMANDS
def test_a_file_as_the_data_folder(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refused(command, "--data-dir", str(file)) == (
        2,
        f"penstock {command}: --data-dir {file}: it is a file; name a folder",
    )
    status, line = refused(command, "--data-dir", str(file / "below"))
    assert status == 2
    assert f"{file} is a file; name a folder" in line


@COMMANDS
def test_another_user_s_folder(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        owner = "nobody"
    else:
        folder, owner = Path("/root"), "root"
    status, line = refused(command, "--data-dir", str(folder))
    assert status == 2
    assert f"belongs to user {owner}" in line
    assert f"run as {owner}, or name another folder" in line


@COMMANDS
def test_another_user_s_file_in_the_folder(tmp_path: Path, command: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    lock = tmp_path / f"{command}.lock"
    lock.touch(mode=0o600)
    os.chown(lock, pwd.getpwnam("nobody").pw_uid, -1)
    status, line = refused(command, "--data-dir", str(tmp_path))
    assert status == 2
    assert f"{lock} belongs to user nobody" in line


@pytest.mark.parametrize(
    ("command", "flag"), [("up", "--http-port"), ("nats", "--nats-port"), ("up", "--metrics-port")]
)
def test_a_privileged_port(tmp_path: Path, command: str, flag: str) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first <= 1:
        pytest.skip("no port is reserved here")
    flags = {"--http-port": "0", "--data-dir": str(tmp_path)} if command == "up" else {"--data-dir": str(tmp_path)}
    flags[flag] = "1"
    status, line = refused(command, *(word for pair in flags.items() for word in pair))
    assert status == 2
    assert (
        line == f"penstock {command}: {flag} 1: ports below {first} are reserved for root; choose one from {first} on"
    )


@pytest.mark.parametrize(("command", "flag"), [("up", "--http-port"), ("nats", "--nats-port")])
def test_a_port_in_use(tmp_path: Path, command: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, line = refused(command, "--data-dir", str(tmp_path), flag, str(port))
    assert status == 1
    assert line.endswith(f"{flag}: port {port} is in use on 127.0.0.1; choose another, or 0 for any free one")


def test_an_unknown_host(tmp_path: Path) -> None:
    status, line = refused("up", "--data-dir", str(tmp_path), "--http-host", "no-such-host.invalid")
    assert status == 2
    assert "--http-host no-such-host.invalid: unknown host; use an address of this machine" in line


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--model", "no/such/folder"),
            "model 'no/such/folder' is not a directory; name a directory",
        ),
        (("--speculative-model", "no/such/folder"), "--speculative-model: model 'no/such/folder' is not a directory"),
        (("--model", "{empty}"), "{empty}/config.json is missing; is {empty} a model directory?"),
        (
            ("--engine", "trtllm", "--gpus", "none"),
            "--engine trtllm needs tensorrt_llm: pip install 'penstock[trtllm]'",
        ),
    ],
)
def test_an_engine_or_a_model_that_is_missing_is_found_before_anything_is_made(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    status, line = refused("up", "--data-dir", str(tmp_path / "data"), *(each.format(empty=empty) for each in flags))
    assert status == 2
    assert reason.format(empty=empty) in line
    assert not (tmp_path / "data").exists()


def test_a_model_that_the_hub_cannot_give_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    status, line = refused("up", "--model", "nobody/nothing", "--data-dir", str(tmp_path / "data"))
    assert status == 2
    assert "the Hugging Face hub was not reached, and its cache here has no copy" in line
    assert not (tmp_path / "data").exists()
