"""Logging in without a password: with a client certificate, an nkey or a credentials file, on a real nats-server."""

import asyncio
import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
import structlog.testing
from nats.errors import Error as NatsError

from penstock.cli.commands import main
from penstock.infra.bus import connection
from penstock.infra.bus.audit import broker_user
from penstock.infra.bus.connection import connect
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.config import STORE_BYTES
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.permissions import permissions
from penstock.infra.process.child import die_with_parent
from penstock.launch.nats import connect_operator
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects, inbox_prefix
from tests.infra.bus.support import eventually
from tests.pipeline.support import free_port, until
from tests.tls_support import issue

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@asynccontextmanager
async def served(folder: Path, port: int, text: str) -> AsyncIterator[Callable[[str], None]]:
    """A nats-server with this configuration, and what has it read another one."""
    conf = folder / "nats.conf"
    conf.write_text(f'listen: "127.0.0.1:{port}"\n{text}', encoding="utf-8")

    def reload(text: str) -> None:
        conf.write_text(f'listen: "127.0.0.1:{port}"\n{text}', encoding="utf-8")
        server.send_signal(signal.SIGHUP)

    with (folder / "nats.log").open("ab") as log:
        server = subprocess.Popen(  # noqa: ASYNC220
            [find_server(), "-c", conf], stdout=log, stderr=log, preexec_fn=die_with_parent()
        )

    async def listens() -> bool:
        assert server.poll() is None, (folder / "nats.log").read_text()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await until(listens, "the server listens")
        yield reload
    finally:
        server.terminate()
        server.wait(30)


async def works(url: str, role: str = "operator") -> None:
    async with await connect(url, role=role, name="test", timeout=5) as bus:
        await bus.nc.flush()


def tls(pair: tuple[Path, Path], authority: Path) -> str:
    cert, key = pair
    return f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority}", verify: true }}\n'


@needs_openssl
async def test_a_client_certificate_and_the_own_authority_come_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them an own NATS behind a private authority, with mutual TLS, could not be used."""
    server, client, port = issue(tmp_path, "server"), issue(tmp_path, "client"), free_port()
    url = f"tls://127.0.0.1:{port}"
    async with served(tmp_path, port, tls(server, client[0])):
        with pytest.raises(ServingError, match="certificate verify failed"):
            await connect(url, role="operator", name="test", timeout=0.5)
        monkeypatch.setenv("PENSTOCK_NATS_CA", str(server[0]))
        with pytest.raises(ServingError):  # the server wants a certificate
            await connect(url, role="operator", name="test", timeout=0.5)
        monkeypatch.setenv("PENSTOCK_NATS_CERT", str(client[0]))
        with pytest.raises(ServingError, match="PENSTOCK_NATS_CERT and PENSTOCK_NATS_KEY belong together"):
            await connect(url, role="operator", name="test", timeout=0.5)
        monkeypatch.setenv("PENSTOCK_NATS_KEY", str(client[1]))
        await works(url)
        await (await connect_operator(url)).close()
        # The user of the system account has its own.
        with pytest.raises(ServingError):
            await connect(url, role="sys", name="test", timeout=0.5)
        monkeypatch.setenv("PENSTOCK_SYS_NATS_CERT", str(client[0]))
        monkeypatch.setenv("PENSTOCK_SYS_NATS_KEY", str(client[1]))
        await works(url, "sys")


async def test_a_user_whose_password_the_broker_forgets_for_a_moment_logs_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that was wrong for a moment costs no restart, which loads a model again; a lasting one does."""
    ended: list[int] = []
    right, wrong = (f'authorization {{ user: w, password: "{password}" }}\n' for password in ("right", "wrong"))
    port = free_port()
    async with served(tmp_path, port, right) as reload:
        url = f"nats://w:right@127.0.0.1:{port}"
        async with await connect(url, role="operator", name="x", end_process=ended.append) as bus:  # type: ignore[arg-type]
            reload(wrong)
            await eventually(lambda: not bus.connected)
            reload(right)
            await eventually(lambda: bus.connected)
            assert not ended
            monkeypatch.setattr(connection, "LOGIN_S", 0.0)
            with structlog.testing.capture_logs() as logged:
                reload(wrong)
                await eventually(lambda: ended)
                for _ in range(3):  # of a process that can do without, such as a router without the system account
                    await bus._on_error(NatsError("nats: 'Authorization Violation'"))
            assert ended == [75]
            [why] = [each["why"] for each in logged if each["event"] == "bus_closed"]
            assert why.startswith("the broker refuses the login: ")
            reload(right)
            await eventually(lambda: bus.connected)


async def test_a_broker_that_comes_late_is_waited_for_and_one_that_refuses_the_login_is_not(tmp_path: Path) -> None:
    """Processes that ended after 10 s were started again by Kubernetes later and later."""
    port = free_port()
    with structlog.testing.capture_logs() as logged:
        url = f"nats://w:right@127.0.0.1:{port}"
        opening = asyncio.create_task(connect(url, role="operator", name="x", timeout=0.05, wait_s=60))
        await eventually(lambda: any(each["event"] == "broker_awaited" for each in logged))
    async with served(tmp_path, port, 'authorization { user: w, password: "right" }\n'):
        async with asyncio.timeout(20), await opening as bus:
            assert bus.connected
        with pytest.raises(ServingError, match="Authorization Violation"):
            await connect(url.replace("right", "wrong"), role="operator", name="x", timeout=1, wait_s=600)
    with structlog.testing.capture_logs() as logged:
        wrong = connect(url.replace("right", "wrong"), role="operator", name="x", timeout=0.5, wait_s=600)
        opening = asyncio.create_task(wrong)
        await eventually(lambda: any(each["event"] == "broker_awaited" for each in logged))
    async with served(tmp_path, port, 'authorization { user: w, password: "right" }\n'), asyncio.timeout(20):
        with pytest.raises(ServingError, match="Authorization Violation"):
            await opening


@needs_openssl
async def test_certificates_that_were_replaced_are_used_at_the_next_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cert-manager replaces files before they expire; a process that kept the old ones could never connect again."""
    old, new, port = issue(tmp_path, "old"), issue(tmp_path, "new"), free_port()
    for name, path in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
        monkeypatch.setenv(f"PENSTOCK_NATS_{name}", str(tmp_path / path))

    def use(pair: tuple[Path, Path]) -> None:
        shutil.copy(pair[0], tmp_path / "ca.crt")
        shutil.copy(pair[0], tmp_path / "tls.crt")
        shutil.copy(pair[1], tmp_path / "tls.key")

    use(old)
    async with served(tmp_path, port, tls(old, old[0])):
        bus = await connect(f"tls://127.0.0.1:{port}", role="operator", name="test")
    async with bus:
        await eventually(lambda: not bus.connected)
        use(new)
        async with served(tmp_path, port, tls(new, new[0])):
            await eventually(lambda: bus.connected)
            await bus.nc.flush()
            await bus.close()


def test_every_file_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY", "CREDS", "NKEY"):
        with monkeypatch.context() as patch:
            patch.setenv(f"PENSTOCK_NATS_{name}", str(tmp_path / "gone"))
            with pytest.raises(ServingError, match=f"PENSTOCK_NATS_{name}: {tmp_path}/gone is missing"):
                asyncio.run(connect("nats://127.0.0.1:1", role="worker", name="test", timeout=0.1))
            with pytest.raises(BrokerProblem, match="is missing or cannot be read"):
                asyncio.run(connect_operator("nats://127.0.0.1:1"))


def seed(prefix: int) -> tuple[bytes, str]:
    """A new seed and its public key."""
    import nkeys

    made = nkeys.encode_seed(os.urandom(32), prefix)
    return made, nkeys.from_seed(bytearray(made)).public_key.decode()


async def test_an_nkey_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nkeys = pytest.importorskip("nkeys")
    (secret, public), (other, _), port = seed(nkeys.PREFIX_BYTE_USER), seed(nkeys.PREFIX_BYTE_USER), free_port()
    (tmp_path / "seed").write_bytes(secret)
    (tmp_path / "other").write_bytes(other)
    url = f"nats://127.0.0.1:{port}"
    accounts = f'accounts {{ A {{ users: [{{ nkey: "{public}" }}, {{ user: "named", password: "p" }}] }} }}\n'
    async with served(tmp_path, port, accounts):
        monkeypatch.setenv("PENSTOCK_NATS_NKEY", str(tmp_path / "other"))
        with pytest.raises(ServingError, match="Authorization Violation"):
            await connect(url, role="worker", name="test", timeout=0.5)
        await works(f"nats://named:p@127.0.0.1:{port}")  # what a URL says goes before the file
        monkeypatch.setenv("PENSTOCK_NATS_NKEY", str(tmp_path / "seed"))
        await works(url, "worker")
        await (await connect_operator(url)).close()


def token(issuer: bytes, subject: str, kind: str, **nats: Any) -> str:
    """A JWT as operators and accounts sign them."""
    import nkeys

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    pair = nkeys.from_seed(bytearray(issuer))
    claims = {
        "iat": 1_700_000_000, "iss": pair.public_key.decode(), "name": kind, "sub": subject,
        "nats": {"type": kind, "version": 2, **nats},
    }  # fmt: skip
    claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).decode().rstrip("=")
    head = part(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    body = f"{head}.{part(json.dumps(claims).encode())}"
    return f"{body}.{part(pair.sign(body.encode()))}"


def in_operator_mode(folder: Path, scope: tuple[bytes, Any] | None = None, **permissions: Any) -> str:
    """The configuration of a server with JetStream whose users are JWTs; writes ``user.creds``.

    ``scope``: the seed of a signing key of the account, and its scope with the user's rights.
    """
    nkeys = pytest.importorskip("nkeys")
    operator, operator_key = seed(nkeys.PREFIX_BYTE_OPERATOR)
    account, account_key = seed(nkeys.PREFIX_BYTE_ACCOUNT)
    _, system_key = seed(nkeys.PREFIX_BYTE_ACCOUNT)
    user, user_key = seed(nkeys.PREFIX_BYTE_USER)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
    stored = limits | dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    unlimited = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
    if scope is None:
        account_jwt = token(operator, account_key, "account", limits=stored)
        user_jwt = token(account, user_key, "user", **(unlimited | permissions))
    else:
        account_jwt = token(operator, account_key, "account", limits=stored, signing_keys=[scope[1]])
        user_jwt = token(scope[0], user_key, "user", issuer_account=account_key, pub={}, sub={})
    text = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n"
        f"\n-----BEGIN USER NKEY SEED-----\n{user.decode()}\n------END USER NKEY SEED------\n"
    )
    (folder / "user.creds").write_text(text, encoding="utf-8")
    return (
        f"operator: {token(operator, operator_key, 'operator')}\nresolver: MEMORY\nsystem_account: {system_key}\n"
        f"resolver_preload {{\n  {account_key}: {account_jwt}\n"
        f"  {system_key}: {token(operator, system_key, 'account', limits=limits)}\n}}\n"
        f'jetstream {{ store_dir: "{folder / "store"}", max_file_store: {STORE_BYTES} }}\nmax_payload: 8388608\n'
    )


async def test_a_credentials_file_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, port = in_operator_mode(tmp_path), free_port()
    url = f"nats://127.0.0.1:{port}"
    async with served(tmp_path, port, config):
        with pytest.raises(ServingError, match="Authorization Violation"):
            await connect(url, role="worker", name="test", timeout=0.5)
        monkeypatch.setenv("PENSTOCK_NATS_CREDS", str(tmp_path / "user.creds"))
        await works(url, "worker")
        await (await connect_operator(url)).close()


async def test_a_tenant_of_a_broker_with_jwts_is_one_of_the_http_api_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a server refuses `include tenants.conf`, and passwords."""
    config, port = in_operator_mode(tmp_path), free_port()
    monkeypatch.setenv("PENSTOCK_NATS_CREDS", str(tmp_path / "user.creds"))
    monkeypatch.setenv("PENSTOCK_NATS_URL", f"nats://127.0.0.1:{port}")
    folder = tmp_path / "operator"

    async def ran(*argv: str) -> int:
        return await asyncio.to_thread(main, [*argv])

    async with served(tmp_path, port, config):
        assert await ran("streams", "apply") == 0
        assert await ran("tenants", "add", "acme", "--models", "m", "--data-dir", str(folder)) == 0
        said = capsys.readouterr()
        assert "added acme for the HTTP API" in said.out
        assert "include" not in said.out
        assert "takes neither tenants.conf nor a tenant's password" in said.err
        assert not (folder / "tenants.conf").exists()
        assert not (folder / "tenants").exists()
        for argv in (("rotate", "acme"), ("conf",)):
            assert await ran("tenants", *argv, "--data-dir", str(folder)) == 1
            assert "(operator mode)" in capsys.readouterr().err
        monkeypatch.chdir(tmp_path)
        assert await ran("keys", "create", "--quiet", "--tenant", "acme") == 0
        assert await ran("tenants", "remove", "acme", "--data-dir", str(folder)) == 0


async def test_a_login_that_is_too_long_for_the_broker_names_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rights = {"pub": {"allow": [f"ps.{number:04}.{'x' * 60}" for number in range(80)]}}
    config, port = in_operator_mode(tmp_path, **rights), free_port()
    monkeypatch.setenv("PENSTOCK_NATS_CREDS", str(tmp_path / "user.creds"))
    url = f"nats://127.0.0.1:{port}"
    async with served(tmp_path, port, config):
        with pytest.raises(ServingError, match="max_control_line: 65536"):
            await connect(url, role="worker", name="test", timeout=0.5)
        with pytest.raises(BrokerProblem, match="max_control_line: 65536"):
            await connect_operator(url)
    async with served(tmp_path, port, config + "max_control_line: 65536\n"):
        await works(url, "worker")


async def test_a_user_of_a_scoped_signing_key_has_the_rights_of_its_role_and_a_short_login(tmp_path: Path) -> None:
    """As docs/roles.md makes them: the account's JWT has the rights, and the user's fits the server's default."""
    nkeys = pytest.importorskip("nkeys")
    (signing, signing_key), port = seed(nkeys.PREFIX_BYTE_ACCOUNT), free_port()
    allowed = permissions("gateway", Subjects())
    assert allowed is not None
    publish = ["ps.audit.{{subject()}}" if each == "ps.audit.gateway" else each for each in allowed.publish]
    rights = {"pub": {"allow": publish, "deny": list(allowed.deny)}, "sub": {"allow": list(allowed.subscribe)}}
    template = rights | {"subs": -1, "data": -1, "payload": -1}
    scope = {"kind": "user_scope", "key": signing_key, "role": "gateway", "template": template}
    config = in_operator_mode(tmp_path, scope=(signing, scope))
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error).lower())

    async with served(tmp_path, port, config):
        nc = await nats.connect(
            f"nats://127.0.0.1:{port}",
            user_credentials=str(tmp_path / "user.creds"),
            inbox_prefix=inbox_prefix("gateway"),
            error_cb=on_error,
        )
        subjects, user = Subjects(), await broker_user(nc)  # type: ignore[arg-type]
        for subject in (subjects.audit("gateway"), f"$JS.API.STREAM.MSG.DELETE.{subjects.stream('DONE')}"):
            await nc.publish(subject, b"")
            await eventually(lambda subject=subject: any(subject.lower() in each for each in refused))  # type: ignore[misc]
        own = await nc.subscribe("ps.verdict")
        await nc.publish(subjects.audit(user), b"")
        await nc.publish("ps.verdict", b"x")
        assert (await own.next_msg(timeout=10)).data == b"x"
        assert len(refused) == 2
        await nc.close()
