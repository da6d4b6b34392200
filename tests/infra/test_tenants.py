"""Tenants on a broker of one's own: several operators, each with a data folder of its own, manage the same ones."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeout

from infra.broker import tenants
from infra.broker.apply import apply
from infra.broker.reload import reload
from infra.broker.server import EmbeddedNats
from infra.broker.tenants import Accounts, Tenant
from infra.cli import main
from schemas.streams import topology
from schemas.subjects import Subjects
from tests.conftest import Connect


@pytest.fixture
async def ready(make_broker: Callable[[], EmbeddedNats], connect: Connect) -> EmbeddedNats:
    """A broker with the streams, which does as one of an administrator's own."""
    server = make_broker()
    await server.start()
    await apply(await connect(server), topology(server.subjects))
    return server


async def ran(*args: str) -> int:
    return await asyncio.to_thread(main, ["tenants", *args])


def url_in(folder: Path, tenant: str) -> str:
    return str(json.loads((folder / "tenants" / f"{tenant}.json").read_text())["nats_url"])


def used(server: EmbeddedNats, folder: Path) -> None:
    """What an administrator does with the file."""
    shutil.copy(folder / tenants.INCLUDE, server.data_dir / tenants.INCLUDE)
    reload(server.data_dir)


async def test_a_second_operator_keeps_the_tenants_and_passwords_of_the_first(
    ready: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file named only its own tenant, with a client password of its own: the first tenant was locked out."""
    url = ready.url("operator")
    one, two = tmp_path / "one", tmp_path / "two"
    assert await ran("add", "acme", "--models", "m", "--nats-url", url, "--data-dir", str(one)) == 0
    assert await ran("add", "zenith", "--nats-url", url, "--data-dir", str(two)) == 0
    used(ready, two)
    for folder, tenant in ((one, "acme"), (two, "zenith"), (one, "default"), (two, "default")):
        client = await nats.connect(url_in(folder, tenant), allow_reconnect=False)
        await client.flush()
        await client.close()
    assert url_in(one, "default") == url_in(two, "default")
    # A limit changes, and the others and the password stay, whoever set them.
    assert await ran("add", "acme", "--weight", "3", "--nats-url", url, "--data-dir", str(two)) == 0
    assert url_in(two, "acme") == url_in(one, "acme")
    capsys.readouterr()
    assert await ran("list", "--nats-url", url, "--data-dir", str(one)) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {"acme": ["20000", "3", "own", "m"], "zenith": ["20000", "1", "own", "all"]}
    # The second removes what the first has added, and the first can make the file again.
    assert await ran("remove", "acme", "--nats-url", url, "--data-dir", str(two)) == 0
    assert await ran("conf", "--nats-url", url, "--data-dir", str(one)) == 0
    texts = [(folder / tenants.INCLUDE).read_text() for folder in (one, two)]
    assert texts[0] == texts[1]
    assert "acme" not in texts[0]
    assert await ran("remove", "acme", "--nats-url", url, "--data-dir", str(one)) == 1
    assert "no tenant 'acme'; there are: zenith" in capsys.readouterr().err


async def test_two_operators_at_once_do_not_undo_each_other(nc: Client, pipeline: Subjects) -> None:
    one = await Accounts.open(nc, pipeline, {}, "first")
    two = await Accounts.open(nc, pipeline, {}, "second")
    assert two.client_password == "first"
    await one.put("acme", Tenant(password="a"))
    await two.put("zenith", Tenant(password="z"))
    assert set(two.tenants) == {"acme", "zenith"}
    await one.read()
    await one.put("acme", Tenant(password="b"))
    with pytest.raises(ValueError, match="another operator has changed tenant 'acme'"):
        await two.put("acme", Tenant(password="c"))
    with pytest.raises(ValueError, match="another operator has changed tenant 'acme'"):
        await two.remove("acme")
    await two.read()
    assert two.tenants["acme"].password == "b"
    await two.remove("acme")
    await two.put("acme", Tenant(password="d"))
    assert two.tenants["acme"].password == "d"


async def test_tenants_of_a_folder_from_before_the_bucket_are_taken_once(nc: Client, pipeline: Subjects) -> None:
    earlier = {"acme": Tenant(password="old", weight=2.0)}
    accounts = await Accounts.open(nc, pipeline, earlier, "client")
    assert accounts.tenants == earlier
    await accounts.remove("acme")
    assert (await Accounts.open(nc, pipeline, earlier, "client")).tenants == {}


async def test_no_role_but_the_operator_reads_the_passwords(ready: EmbeddedNats, connect: Connect) -> None:
    operator = await connect(ready)
    accounts = await Accounts.open(operator, ready.subjects, {}, "client")
    await accounts.put("acme", Tenant(password="secret"))
    subject, ask = "$JS.API.STREAM.MSG.GET.KV_ps_accounts", b'{"last_by_subj": "$KV.ps_accounts.acme"}'
    assert b'"data"' in (await operator.request(subject, ask)).data
    for role in ("gateway", "router", "worker"):
        errors: list[str] = []
        other = await connect(ready, role, errors)
        with pytest.raises(NatsTimeout):
            await other.request(subject, ask, timeout=0.3)
        assert "permissions violation" in " ".join(errors).lower()


async def test_credentials_name_every_server_with_its_scheme(ready: EmbeddedNats, tmp_path: Path) -> None:
    """They named one server of three, and turned tls:// into nats://."""
    urls = f"{ready.url('operator')},{ready.url('operator').rpartition(':')[0]}:1"
    assert await ran("add", "acme", "--nats-url", urls, "--data-dir", str(tmp_path)) == 0
    assert [part.rpartition("@")[2] for part in url_in(tmp_path, "acme").split(",")] == [
        part.rpartition("@")[2] for part in urls.split(",")
    ]
    several = "tls://operator:p%40ss@nats-1.example.com:4222,tls://operator:p@nats-2.example.com:4223"
    made = tenants.with_user(several, "tenant-acme", "a/b")
    assert made == ",".join(f"tls://tenant-acme:a%2Fb@nats-{n}.example.com:{4221 + n}" for n in (1, 2))
    written = json.loads(tenants.write_credentials(tmp_path, "acme", made).read_text())
    assert written["server"] == "tls://nats-1.example.com:4222,tls://nats-2.example.com:4223"
    assert (written["user"], written["password"]) == ("tenant-acme", "a/b")
    # An operator that logs in with a file has no credentials in its URL.
    assert tenants.with_user("tls://h:4222", "u", "p") == "tls://u:p@h:4222"
    assert tenants.with_user("h:4222", "u", "p") == "nats://u:p@h:4222"
