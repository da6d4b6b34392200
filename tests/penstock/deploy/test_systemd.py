"""Units of systemd, and the files of variables that they read."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.configs.flags import read
from penstock.configs.settings import WorkerSettings
from penstock.deploy.systemd import GRACE_S, USER_ROLES, run
from penstock.workers.session.process import GRACE_S as WORKER_GRACE_S
from tests.infra.nats_server.test_several_machines import UNITS, UPGRADE

FLAGS = {
    "router": ["--metrics-port", "9101"],
    "gateway": ["--http-host", "0.0.0.0", "--require-keys", "--drain-s", "60"],
    "worker": ["--instances", "--engine", "mock", "--name", "%H-%i", "--metrics-port", "%i"],
    "nats": ["--config", "/etc/nats/my own.conf"],
}


def made(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run([*argv]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run([*argv]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


@pytest.mark.parametrize("role", FLAGS)
def test_systemd_takes_each_unit(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = made(capsys, role, "--user", "root", "--program", "/usr/bin/env", *FLAGS[role])
    file = tmp_path / (f"penstock-{role}@.service" if "--instances" in FLAGS[role] else f"penstock-{role}.service")
    file.write_text(text)
    assert not re.search(r"^After=.*\bpenstock-nats.service", text, re.M) or role != "nats"
    if shutil.which("systemd-analyze"):
        named = str(file).replace("@.", "@9201.")
        checked = subprocess.run(["systemd-analyze", "verify", named], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_a_unit_waits_for_the_drain_and_keeps_down_what_would_fail_again(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = made(capsys, "gateway", "--program", "/p", *FLAGS["gateway"])
    assert "TimeoutStopSec=75\n" in gateway
    assert "RestartPreventExitStatus=2\n" in gateway
    worker = made(capsys, "worker", "--program", "/p", *FLAGS["worker"])
    assert f"TimeoutStopSec={WorkerSettings().drain_s + GRACE_S:g}\n" in worker
    assert GRACE_S > WORKER_GRACE_S
    assert "RestartPreventExitStatus=2 3\n" in worker  # 3: `penstock drain`
    assert "KillMode=mixed\n" in worker
    assert "EnvironmentFile=-/etc/penstock/worker-%i.env\n" in worker
    nats = made(capsys, "nats", "--program", "/n")
    assert "KillSignal=SIGUSR2\n" in nats
    assert "Environment=GOGC=50\nEnvironmentFile=-/etc/penstock/nats.env\n" in nats  # whose value wins


def test_processes_of_several_hosts_and_instances_have_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """All workers were named `worker`: `penstock drain worker` named several, and a router took them for one."""
    for role in ("router", "gateway"):
        assert f"Environment=PENSTOCK_NAME={role}-%l\n" in made(capsys, role, "--program", "/p")
    worker = made(capsys, "worker", "--program", "/p", "--instances")
    # A name in the files of variables goes before it, as systemd reads them.
    assert worker.index("Environment=PENSTOCK_NAME=worker-%l-%i\n") < worker.index("EnvironmentFile=")
    assert "PENSTOCK_NAME" not in made(capsys, "worker", "--program", "/p", "--name", "mine")


def test_flags_come_back_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    awkward = ["--model", "/srv/my models/x", "--override-engine-args", '{"a": "$HOME \\\\ b"}', "--engine", "vllm"]
    text = made(capsys, "worker", "--program", "/opt/penstock/bin/penstock", *awkward)
    (line,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.replace("$$", "$"))
    assert words == ["/opt/penstock/bin/penstock", "worker", *awkward]
    assert read(WorkerSettings, words[2:]).model == "/srv/my models/x"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["gateway", "--http-prt", "8000"], "did you mean --http-port"),
        (["worker", "--metrics-port", "%i"], "metrics-port"),
        (["router", "--nats-url", "nats://router:hunter2@host:4222"], "others may read units"),
        (["env"], "of which role"),
        (["env", "worker", "--data-dir", "/nonexistent", "--servers", "a"], "does not exist"),
        (["env", "worker"], "--servers"),
        (["env", "worker", "--cluster", "a"], "--servers names those of clients"),
        (["env", "worker", "--cluster=a:6222"], "--servers names those of clients"),
        (["env", "worker", "--servers", "a:6222"], "a:6222 is the port among servers (`penstock nats --cluster`)"),
    ],
)
def test_what_could_not_run_is_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = [] if argv[0] == "env" else ["--program", "/p"]
    said = refused(capsys, argv[0], *program, *argv[1:])
    assert says in said
    assert "hunter2" not in said


def program_of(text: str) -> str:
    (line,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line)[0]


def test_the_program_is_the_one_that_was_called_then_the_interpreter_s_then_the_path_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("called-1.0", "interpreter", "path"):
        (tmp_path / folder).mkdir()
        for name in ("penstock", "nats-server"):
            (tmp_path / folder / name).touch(0o755)
    link = tmp_path / "called"
    link.symlink_to("called-1.0")
    monkeypatch.setattr("sys.argv", [str(link / "penstock")])
    monkeypatch.setattr("sys.executable", str(tmp_path / "interpreter" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for folder in ("called", "interpreter", "path"):
        assert program_of(made(capsys, "router")) == str(tmp_path / folder / "penstock")
        assert program_of(made(capsys, "nats")) == str(tmp_path / folder / "nats-server")
        for name in ("penstock", "nats-server"):
            (tmp_path / folder / name).unlink()
    assert f"beside {tmp_path / 'interpreter' / 'python'} or on the PATH" in refused(capsys, "router")


def test_an_unknown_flag_of_the_broker_s_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["nats", "--program", "/n", "--confg", "x"])
    assert "--confg" in capsys.readouterr().err


def test_each_role_gets_the_password_of_its_user_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({role: f"{role}/1" for role in (*USER_ROLES, "sys")}))
    flags = ["--data-dir", str(tmp_path), "--servers", "a,b:4333", "--ca", "/etc/ca.crt"]
    for role in USER_ROLES:
        text = made(capsys, "env", role, *flags)
        lines = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
        urls = [urlsplit(url) for url in lines["PENSTOCK_NATS_URL"].split(",")]
        assert [(url.scheme, url.username, url.password, url.netloc.rpartition("@")[2]) for url in urls] == [
            ("tls", role, f"{role}%2F1", "a:4222"),
            ("tls", role, f"{role}%2F1", "b:4333"),
        ]
        assert lines["PENSTOCK_NATS_CA"] == "/etc/ca.crt"
        assert ("PENSTOCK_SYS_NATS_URL" in lines) == (role == "router")
    # While passwords are changed, of the user that is to be used from now on.
    changed = {"worker-2": "new", "second_in_use": "worker"}
    (tmp_path / "secrets.json").write_text(json.dumps(json.loads((tmp_path / "secrets.json").read_text()) | changed))
    assert "tls://worker-2:new@a:4222" in made(capsys, "env", "worker", *flags)
    assert "tls://router:router%2F1@a:4222" in made(capsys, "env", "router", *flags)
    (tmp_path / "secrets.json").write_text(json.dumps({role: f"{role}/1" for role in (*USER_ROLES, "sys")}))
    plain = made(capsys, "env", "worker", "--data-dir", str(tmp_path), "--servers", "a", "--namespace", "blue")
    assert "nats://worker:" in plain
    assert "PENSTOCK_NAMESPACE=blue" in plain


def test_the_page_on_upgrades_begins_with_routers_and_ends_with_brokers() -> None:
    *_, config, nats, routers, streams, workers, gateways, brokers, back = UPGRADE
    assert len(UPGRADE) == 8
    assert "nats --print-config" in config
    assert nats == brokers
    wanted = zip((routers, workers, gateways), UNITS, strict=True)
    assert all(f"systemctl restart {unit}\n" in block for block, unit in wanted)
    assert "streams apply" in streams
    assert back.endswith("ln -sfn penstock-1 /opt/penstock\n")
