"""Three servers with TLS, from what ``penstock nats --print-config`` prints, and a deployment on them."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.configs.settings import NatsSettings
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.config import USERS
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.process.child import die_with_parent
from penstock.launch.nats import own_config, run
from tests.binaries import find_oldest_server
from tests.penstock.deploy.running import answers, ask
from tests.pipeline.support import MODEL, Process, free_port
from tests.tls_support import issue

SECRETS = {user: f"p-{user}" for user in USERS}


@asynccontextmanager
async def server(config: Path) -> AsyncIterator["subprocess.Popen[bytes]"]:
    with config.with_suffix(".log").open("wb") as log:
        made = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", config], stdout=log, stderr=log, preexec_fn=die_with_parent()
        )
    try:
        yield made
    finally:
        made.kill()
        made.wait(30)


def printed(folder: Path, *flags: str) -> str:
    """What the command prints; the passwords are those of the folder."""
    process = Process(folder / "print.log", "nats", "--print-config", "--data-dir", str(folder / "operator"), *flags)
    assert process.wait() == 0, process.log.read_text()
    text = process.log.read_text()
    return text[: text.index("passwords of ")]


@pytest.mark.slow  # test_cluster runs on three servers, and each printed file is read below
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_a_deployment_runs_on_three_servers_with_tls_whose_files_were_printed(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "servers")
    clients, monitors, routes = ([free_port() for _ in range(3)] for _ in range(3))
    nodes = [f"127.0.0.1:{port}" for port in routes]
    variables = {"PENSTOCK_NATS_CA": str(cert)}
    async with AsyncExitStack() as stack:
        for index, node in enumerate(nodes):
            config = tmp_path / f"node-{index}.conf"
            config.write_text(
                printed(
                    tmp_path, "--cluster", ",".join(nodes), "--node", node, "--nats-port", str(clients[index]),
                    "--store-dir", str(tmp_path / f"store-{index}"),
                    "--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(cert),
                    "--monitor-port", str(monitors[index]),
                )
            )  # fmt: skip
            await stack.enter_async_context(server(config))
        for port in monitors:
            await answers(f"http://127.0.0.1:{port}/healthz")
        passwords = load_secrets(tmp_path / "operator" / "secrets.json", USERS)
        url = ",".join(f"tls://operator:{passwords['operator']}@127.0.0.1:{port}" for port in clients)
        apply = Process(tmp_path / "apply.log", "streams", "apply", "--replicas", "3", nats_url=url, **variables)
        assert apply.wait(90) == 0, apply.log.read_text()
        http = free_port()
        up = Process(
            tmp_path / "up.log", "up", "--engine", "mock", "--model", str(MODEL), "--mock-speedup", "0",
            "--http-port", str(http), "--dashboard-port", "-1", "--data-dir", str(tmp_path / "data"),
            "--drain-s", "3", nats_url=url, **variables,
        )  # fmt: skip
        try:
            up.wait_for("(ready after", 90)
            assert await ask(f"http://127.0.0.1:{http}", MODEL.name)
        finally:
            status = up.stop()
        assert status == 0


def made(**flags: object) -> str:
    return own_config(NatsSettings(**{"print_config": True, **flags}), SECRETS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tls_cert": "c"}, "--tls-cert and --tls-key are needed together"),
        ({"tls_ca": "c"}, "--tls-ca with both"),
        ({"cluster": ("a", "b"), "node": "a", "tls_cert": "c", "tls_key": "k"}, "--tls-ca: the servers of a cluster"),
        ({"cluster": ("a", "b")}, "--node: name the server that the configuration is for: a, b"),
        ({"nkeys": "n", "client_certs": True}, "--nkeys and --client-certs exclude each other"),
        ({"client_certs": True}, "--client-certs needs --tls-cert, --tls-key, and --tls-ca"),
        ({"node": "a"}, "--node is one of --cluster"),
        ({"cluster": ("a", "a"), "node": "a"}, "--cluster names a server twice"),
        ({"cluster": ("a:4222", "b:4222"), "node": "a:4222"}, r"a:4222 is the port of clients \(`penstock systemd env"),
    ],
)
def test_flags_that_contradict_each_other_are_named(flags: Mapping[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(**flags)


def test_servers_of_a_cluster_send_their_clients_away_within_half_a_minute_when_they_stop() -> None:
    files = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    assert 'lame_duck_duration: "30s"' in made(cluster=("a", "b"), node="a", **files)
    assert "lame_duck" not in made()


def test_a_server_that_runs_here_does_not_take_what_it_would_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(NatsSettings(tls_cert="c", tls_key="k")) == 2
    assert "penstock nats: --tls-cert is for --print-config" in capsys.readouterr().err


def test_every_server_of_the_minimum_version_reads_it_and_listens_for_other_machines(tmp_path: Path) -> None:
    text = made(cluster=("a", "b", "c"), node="b", store_dir=str(tmp_path / "store"), tenants_file="tenants.conf")
    assert 'host: "0.0.0.0"' in text
    assert 'server_name: "b"' in text
    assert 'listen: "0.0.0.0:6222"' in text
    assert 'advertise: "b:6222"' in text, "certificates have names, not the addresses by which servers see each other"
    assert text.count("nats-route://route:p-sys@") == 3
    assert 'host: "127.0.0.1"' in made()
    (tmp_path / "nats.conf").write_text(text)
    (tmp_path / "tenants.conf").touch()
    for binary in filter(None, (str(find_server()), find_oldest_server())):
        command = [binary, "-t", "-c", tmp_path / "nats.conf"]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
