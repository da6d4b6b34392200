"""Nkeys and client certificates as docs/operations.md prints them, on a real server with TLS."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.configs.settings import NatsSettings
from penstock.infra.bus.connection import connect
from penstock.infra.nats_server.config import USERS
from penstock.infra.nats_server.permissions import BROKER_ROLES, permissions
from penstock.launch.nats import own_config
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects, inbox_prefix
from tests.infra.bus.support import eventually
from tests.penstock.deploy.running import answers, ask
from tests.pipeline.support import MODEL, ROOT, Process, free_port, stopped, until
from tests.pipeline.test_own_cluster import server
from tests.tls_support import issue_authority

PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Nkeys and certificates") : PAGE.index("## Several models")]
SERVED = ("router", "worker", "gateway")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def block(title: str) -> str:
    """The commands or variables of the page below this comment."""
    return re.search(rf"```sh\n# {title}[^\n]*\n(.*?)```", SECTION, re.DOTALL)[1]  # type: ignore[index]


class Site:
    """An admin machine in ``folder``, with what hosts have in ``nats/`` and ``penstock/``."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way, self.port = folder, way, free_port()
        for name in ("nats", "penstock", "bin"):
            (folder / name).mkdir()
        issue_authority(folder)
        self.run(
            "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
            "-subj /CN=s -keyout nats/tls.key -out s.csr\n"
            "printf 'subjectAltName=IP:127.0.0.1\\n' > s.ext\n"
            "openssl x509 -req -in s.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile s.ext -out nats/tls.crt\n"
        )
        for place in ("nats", "penstock"):
            shutil.copy(folder / "ca.crt", folder / place / "ca.crt")
        command = folder / "bin" / "penstock"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
        command.chmod(0o700)

    def here(self, text: str) -> str:
        """With the folders and the address of this machine."""
        text = text.replace("/etc/", f"{self.folder}/").replace("host-1:4222", f"127.0.0.1:{self.port}")
        return text.replace("--print-config", f"--print-config --nats-port {self.port} --store-dir {self.folder}/store")

    def run(self, script: str) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        path = f"{self.folder}/bin:{environ['PATH']}"
        environ |= {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PATH": path}
        done = subprocess.run(
            ["sh", "-ec", self.here(script)], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self) -> None:
        """Bring to the hosts what was made."""
        made = [*self.folder.glob("*.key"), *self.folder.glob("*.crt"), *self.folder.glob("nkeys/*.nk")]
        for file in made:
            shutil.copy(file, self.folder / "penstock" / file.name)

    def variables(self, role: str) -> dict[str, str]:
        text = self.here(block(f"{self.way}: of a router")).replace("router.", f"{role}.")
        return dict(line.split("=", 1) for line in text.splitlines() if role == "router" or "_SYS_" not in line)


async def logs_in(variables: Mapping[str, str], role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is connected as its role: the broker takes its inbox, and no other role's."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        async with await connect(variables["PENSTOCK_NATS_URL"], role=role, name="test", timeout=5) as bus:
            refused: list[str] = []
            bus.on_refused.append(refused.append)
            allowed = permissions(role, Subjects()) if role != "sys" else None
            for subject in allowed.subscribe if allowed is not None else ("$SYS.ACCOUNT.*.CONNECT",):
                await bus.nc.subscribe(subject)
            await bus.nc.flush()
            assert refused == []
            if role not in ("sys", "operator"):
                other = "router" if role != "router" else "worker"
                await bus.nc.subscribe(f"{inbox_prefix(other)}.>")
                await eventually(lambda: bool(refused))


async def audits(site: Site, variables: Mapping[str, str], way: str) -> None:
    """Nothing that the pipeline itself did is in the audit log, and what the operator did has its name."""

    def printed(*flags: str) -> str:
        shown = Process(site.folder / "audit.log", "audit", "--all", *flags, **variables)
        assert shown.wait() == 0, shown.log.read_text()
        return shown.log.read_text()

    changed = Process(site.folder / "set.log", "streams", "set", "KV", "--max-age", "2h", **variables)
    assert changed.wait() == 0, changed.log.read_text()
    nkeys = ("--nkeys", str(site.folder / "nkeys")) if way == "nkeys" else ()

    async def reported() -> bool:
        return "stream update" in printed()

    await until(reported, "the broker's report is written")
    shown = printed(*nkeys)
    assert "operator*  stream update  ps_KV" in shown
    assert "operator  streams set  ps_KV" in shown
    assert "consumer create" not in shown.replace("router-", ""), shown
    assert not re.search("^[0-9:]+  U[A-Z2-7]{55}", shown, re.MULTILINE), shown


@pytest.mark.timeout(180)  # a whole deployment, as no role may lack what it needs: some 10 s
@pytest.mark.parametrize("way", [pytest.param("nkeys", marks=pytest.mark.slow), "certificates"])
async def test_a_deployment_runs_with_users_without_passwords_as_the_page_prints_it(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "nkeys":
        pytest.importorskip("nkeys")
    site = Site(tmp_path, way)
    site.run(block(f"{way}: on the admin machine"))
    site.install()
    config = tmp_path / "nats.conf"
    assert "password" not in config.read_text()
    processes: list[Process] = []
    async with server(config):
        until_it_answers = site.here(block(f"{way}: streams")).strip()
        site.run(f"for i in 1 2 3 4 5 6 7 8 9 10; do {until_it_answers} && exit 0; sleep 0.2; done; exit 1")
        for role in (*BROKER_ROLES, "sys"):
            variables = site.variables("router") if role == "router" else site.variables(role)
            if role == "sys":
                variables |= {f"PENSTOCK_SYS_{k.removeprefix('PENSTOCK_')}": v for k, v in variables.items()}
            await logs_in(variables, role, monkeypatch)
        monkeypatch.setenv("PENSTOCK_NATS_CA", str(tmp_path / "ca.crt"))
        with pytest.raises(ServingError):  # a user without a password is none that needs no proof
            await connect(f"tls://operator:@127.0.0.1:{site.port}", role="operator", name="test", timeout=1)
        top = Process(tmp_path / "top.log", "top", "--once", **site.variables("reader"))
        assert top.wait() == 0, "a reader may do what a viewer may, whose inbox the command takes"
        http = free_port()
        flags = {
            "router": ("--nkeys", str(tmp_path / "nkeys")) if way == "nkeys" else (),
            "worker": ("--engine", "mock", "--mock-speedup", "0", "--model", str(MODEL)),
            "gateway": ("--http-port", str(http), "--model", str(MODEL)),
        }
        try:
            for role in SERVED:
                processes.append(Process(tmp_path / f"{role}.log", role, *flags[role], **site.variables(role)))
            await answers(f"http://127.0.0.1:{http}/health/ready")
            assert await ask(f"http://127.0.0.1:{http}", MODEL.name)
            await audits(site, site.variables("operator"), way)
        finally:
            statuses = await stopped(processes)
        assert statuses == [0, 0, 0]


def nkey_config(folder: Path) -> str:
    return own_config(NatsSettings(print_config=True, nkeys=str(folder)), dict.fromkeys(USERS, "p"))


def test_a_second_key_of_a_role_is_written_beside_the_first_and_all_names_of_the_audit_log_are_keys(
    tmp_path: Path,
) -> None:
    pytest.importorskip("nkeys")
    text = nkey_config(tmp_path)
    assert text == nkey_config(tmp_path), "keys that exist stay"
    public = {file.stem: file.read_text().strip() for file in tmp_path.glob("*.pub")}
    assert set(public) == {*BROKER_ROLES, "sys"}
    assert oct((tmp_path / "operator.nk").stat().st_mode)[-3:] == "600"
    operator = text[text.index(f'nkey: "{public["operator"]}"') :]
    assert f"ps.audit.{public['gateway']}" in operator
    assert f'"ps.audit.{public["operator"]}"' not in operator
    assert "ps.audit.gateway" not in text
    shutil.copy(tmp_path / "sys.nk", tmp_path / "worker-2.nk")
    (tmp_path / "gateway.nk").unlink()  # the server needs public keys only
    both = nkey_config(tmp_path)
    assert "# worker-2" in both
    assert public["gateway"] in both


@pytest.mark.parametrize(
    ("file", "says"),
    [("worker.nk", "worker.nk: no seed of an nkey, which begins with SU"), ("worker.pub", "no public key of a user")],
)
def test_a_file_that_is_no_key_is_named(file: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("nkeys")
    (tmp_path / file).write_text("hello\n")
    with pytest.raises(ValueError, match=says):
        nkey_config(tmp_path)
