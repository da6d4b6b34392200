"""Tenants on a broker of one's own: several operators, each with a data folder of its own, manage the same ones."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeout

from penstock.cli.commands import main
from penstock.infra.bus.audit import write
from penstock.infra.bus.client import BusClient
from penstock.infra.nats_server import tenants
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.jetstream_api import reload
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.nats_server.tenants import Accounts, Tenant
from penstock.launch.nats import apply_if_lost
from penstock.schemas.audit import KEYS_LOST, AuditEntry
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects, cell_namespace
from penstock.schemas.tenants import Limits
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
    assert rows == {
        "acme": ["20000", "none", "3", "none", "none", "none", "own", "m"],
        "zenith": ["20000", "none", "1", "none", "none", "none", "own", "all"],
    }
    # The operator's disk is lost: a new folder gets the same password, and no limit changes.
    three = tmp_path / "three"
    assert await ran("conf", "--nats-url", url, "--data-dir", str(three)) == 0
    assert await ran("add", "acme", "--nats-url", url, "--data-dir", str(three)) == 0
    assert [url_in(three, name) for name in ("acme", "default")] == [url_in(one, name) for name in ("acme", "default")]
    capsys.readouterr()
    assert await ran("list", "--nats-url", url, "--data-dir", str(three)) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["acme", *rows["acme"]]
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


async def lose_everything(server: EmbeddedNats, connect: Connect) -> None:
    """What `streams apply` makes of a broker that lost its disks, as far as tenants are concerned."""
    nc = await connect(server)
    js = nc.jetstream()
    for info in await js.streams_info():
        if info.config.name.startswith(("KV_ps_tenants", "KV_ps_accounts", "ps_SUBMIT_")):
            await js.delete_stream(info.config.name)
    await apply(nc, topology(server.subjects))


async def logs_in(url: str) -> bool:
    client = BusClient()
    try:
        await client.connect(url, allow_reconnect=False)
    except nats.errors.Error:
        client.drop_link()
        return False
    await client.close()
    return True


async def test_tenants_come_back_with_their_passwords_and_limits_after_the_broker_lost_its_disk(
    ready: EmbeddedNats, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tenants add` made new passwords, with which no client of before could log in."""
    place = ("--nats-url", ready.url("operator"), "--data-dir", str(tmp_path))
    assert await ran("add", "acme", "--models", "m", "--weight", "3", *place) == 0
    assert await ran("add", "blue", *place) == 0
    assert await ran("rotate", "blue", "--keep-old", *place) == 0
    urls = {name: url_in(tmp_path, name) for name in ("acme", "blue", "default")}
    before = (tmp_path / tenants.INCLUDE).read_text()
    await lose_everything(ready, connect)
    capsys.readouterr()
    for verb in (("list",), ("add", "acme"), ("add", "red"), ("conf",)):
        assert await ran(*verb, *place) == 1
        said = capsys.readouterr().err
        assert f"{tmp_path} has acme, blue: if it lost its disk, `penstock tenants restore`" in said
    assert (tmp_path / tenants.INCLUDE).read_text() == before
    assert await ran("restore", *place) == 0
    assert "restored acme\nrestored blue\n" in capsys.readouterr().out
    assert (tmp_path / tenants.INCLUDE).read_text() == before, "servers need no change"
    used(ready, tmp_path)
    assert {name: url_in(tmp_path, name) for name in urls} == urls
    assert all([await logs_in(url) for url in urls.values()])
    nc = await connect(ready)
    assert await tenants.limits_at(nc, ready.subjects, "acme") == Limits(models=("m",), weight=3.0)
    await nc.jetstream().stream_info("ps_SUBMIT_acme")
    # Another operator, whose folder has copies as well, or this one again.
    entries = (await nc.jetstream().stream_info("ps_AUDIT")).state.messages
    capsys.readouterr()
    assert await ran("restore", *place) == 0
    assert "acme was there already\nblue was there already\n" in capsys.readouterr().out
    assert (await nc.jetstream().stream_info("ps_AUDIT")).state.messages == entries, "nothing was done"
    assert (tmp_path / tenants.INCLUDE).read_text() == before


async def test_a_folder_that_knows_no_tenant_makes_no_accounts_on_a_broker_that_lost_them(
    ready: EmbeddedNats, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list` stored a new password of the user client, and `restore` kept it: clients of before were locked out."""
    known, other = tmp_path / "known", tmp_path / "other"
    place = ("--nats-url", ready.url("operator"), "--data-dir")
    assert await ran("add", "acme", *place, str(known)) == 0
    before = (known / tenants.INCLUDE).read_text()
    await lose_everything(ready, connect)
    nc = await connect(ready)
    stored = len(await nc.jetstream().streams_info())
    capsys.readouterr()
    assert await ran("list", *place, str(other)) == 0
    assert "there is no tenant but 'default'" in capsys.readouterr().out
    assert len(await nc.jetstream().streams_info()) == stored, "a list writes nothing"
    assert not other.exists()
    # Once a gateway has noted that keys are gone, the broker is no new one.
    await write(nc, ready.subjects, "operator", AuditEntry(KEYS_LOST, "gateway-0"))
    for verb in (("list",), ("add", "red"), ("conf",)):
        assert await ran(*verb, *place, str(other)) == 1
        said = capsys.readouterr().err
        assert "the broker has lost its keys, so it may have lost tenants" in said
        assert "`penstock tenants restore --data-dir`" in said
    assert await ran("restore", *place, str(known)) == 0
    said = capsys.readouterr().out
    assert "restored acme" in said
    assert "left" not in said
    assert (known / tenants.INCLUDE).read_text() == before
    assert await ran("add", "red", *place, str(other)) == 0
    assert url_in(other, "default") == url_in(known, "default")


async def test_credentials_alone_bring_a_tenant_back_and_another_operators_work_stays(
    ready: EmbeddedNats, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    place = ("--nats-url", ready.url("operator"), "--data-dir")
    for name in ("acme", "blue"):
        assert await ran("add", name, "--models", "m", *place, str(one)) == 0
    urls = {name: url_in(one, name) for name in ("acme", "blue", "default")}
    for lost in ("tenants.json", tenants.INCLUDE):  # as what was kept of an earlier release's folder
        (one / lost).unlink()
    await lose_everything(ready, connect)
    # Another operator begins anew, and makes one of them again.
    assert await ran("add", "blue", *place, str(two)) == 0
    assert await ran("add", "acme", *place, str(one)) == 1
    assert "`penstock tenants restore acme` keeps that, --new-password makes another one" in capsys.readouterr().err
    assert await ran("restore", *place, str(one)) == 0
    said = capsys.readouterr().out
    assert "restored acme; its limits are not known: `penstock tenants add` sets them" in said
    assert "blue: left, the broker has another password; --replace takes that of" in said
    assert "client: left" in said
    assert url_in(one, "blue") == url_in(two, "blue")
    used(ready, one)
    assert await logs_in(urls["acme"])
    assert not await logs_in(urls["blue"])
    # --replace takes what is in the folder: a copy of the files of before.
    for name, url in urls.items():
        tenants.write_credentials(one, name, url)
    for lost in ("tenants.json", tenants.INCLUDE):
        (one / lost).unlink()
    assert await ran("restore", "--replace", *place, str(one)) == 0
    used(ready, one)
    assert all([await logs_in(url) for url in urls.values()])
    # Where there is a list, credentials of a tenant that is not in it may be of one that was removed.
    assert await ran("remove", "blue", *place, str(two)) == 0
    assert await ran("conf", *place, str(one)) == 0
    capsys.readouterr()
    assert await ran("restore", *place, str(one)) == 0
    assert "left out: blue, of which the folder has the credentials only" in capsys.readouterr().out
    assert await ran("add", "blue", *place, str(one)) == 1
    said = capsys.readouterr().err
    assert "'blue' was removed from this broker" in said
    assert "`penstock tenants add blue --new-password` creates it again" in said
    assert "restore" not in said
    assert await ran("add", "blue", "--new-password", *place, str(one)) == 0
    assert url_in(one, "blue") not in urls.values()
    assert await ran("restore", "red", *place, str(one)) == 1
    assert "has no tenant 'red'; it has acme, blue" in capsys.readouterr().err


async def test_tenants_of_a_folders_own_broker_are_applied_again(
    make_broker: Callable[[], EmbeddedNats], connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    await server.start()
    await apply(await connect(server), topology(server.subjects))
    place = ("--data-dir", str(server.data_dir))
    assert await ran("add", "acme", "--max-pending", "7", *place) == 0
    url = url_in(server.data_dir, "acme")
    await lose_everything(server, connect)
    capsys.readouterr()
    for verb in (("list",), ("add", "newt"), ("rotate", "acme")):
        assert await ran(*verb, *place) == 1
        said = capsys.readouterr().err
        assert "the broker has no tenants" in said
        assert f"{server.data_dir} has acme: if it lost its disk, `penstock tenants restore`" in said
    assert await ran("restore", *place) == 0
    assert "restored acme" in capsys.readouterr().out
    assert await ran("restore", *place) == 0
    assert "acme was there already" in capsys.readouterr().out
    assert await ran("list", *place) == 0
    limits = await tenants.limits_at(await connect(server), server.subjects, "acme")
    assert limits == Limits(max_pending=7)
    assert await logs_in(url)
    assert url_in(server.data_dir, "acme") == url
    # Of a backup with the credentials alone, the limits are not known.
    await lose_everything(server, connect)
    (server.data_dir / "tenants.json").unlink()
    capsys.readouterr()
    assert await ran("restore", *place) == 0
    assert "restored acme; its limits are not known: `penstock tenants add` sets them" in capsys.readouterr().out


async def test_passwords_in_a_folder_that_are_not_the_brokers_are_warned_of(
    ready: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each folder got passwords of its own, which `systemd env` and `print-config` wrote without a word."""
    place = ("--nats-url", ready.url("operator"), "--data-dir", str(tmp_path))
    assert await ran("add", "acme", *place) == 0
    assert not (tmp_path / "secrets.json").exists(), "only a configuration needs passwords, and makes them"
    assert "warning" not in capsys.readouterr().err
    shutil.copy(ready.data_dir / "secrets.json", tmp_path / "secrets.json")
    assert await ran("list", *place) == 0
    assert "warning" not in capsys.readouterr().err
    secrets = json.loads((tmp_path / "secrets.json").read_text())
    (tmp_path / "secrets.json").write_text(json.dumps(secrets | {"operator": "of another deployment"}))
    assert await ran("list", *place) == 0
    assert f"warning: {tmp_path}/secrets.json has another password of operator than this broker" in (
        capsys.readouterr().err
    )


async def test_a_configuration_says_since_when_its_passwords_are_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert main(["nats", "--print-config", "--data-dir", str(tmp_path)]) == 0
        return capsys.readouterr().err

    assert "secrets.json, made now: running servers need the folder with their own passwords" in said()
    assert f"secrets.json, of {time.strftime('%Y-')}" in said()


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


async def test_a_list_writes_nothing_and_a_change_needs_a_folder_that_it_may_write(
    ready: EmbeddedNats, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = ("--nats-url", ready.url("operator"), "--data-dir")
    assert await ran("add", "acme", *broker, str(tmp_path / "one")) == 0
    (tmp_path / "file").touch()
    for absent in (tmp_path / "none", tmp_path / "file" / "none"):  # root may write into any folder
        capsys.readouterr()
        assert await ran("list", *broker, str(absent)) == 0
        assert "acme" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    assert await ran("add", "blue", *broker, str(tmp_path / "file" / "none")) == 1
    assert "name a folder for credentials with --data-dir" in capsys.readouterr().err


async def test_cells_get_the_limits_of_homes_tenants_when_they_change_and_when_a_cell_lost_its_store(
    ready: EmbeddedNats, tmp_path: Path, connect: Connect
) -> None:
    url, nc = ready.url("operator"), await connect(ready)
    cell = Subjects(cell_namespace(ready.subjects.namespace, 1))
    await apply(nc, topology(cell))
    place = ("--nats-url", url, "--data-dir", str(tmp_path), "--cells", "2")

    async def weight(tenant: str) -> float | None:
        found = await tenants.limits_at(nc, cell, tenant)
        return None if found is None else found.weight

    assert await ran("add", "acme", "--weight", "3", *place) == 0
    assert await ran("add", "zenith", "--weight", "2", *place[:4]) == 0  # before the deployment had cells
    assert [await weight(name) for name in ("acme", "zenith")] == [3, None]
    assert await ran("add", "acme", "--weight", "4", *place) == 0
    assert [await weight(name) for name in ("acme", "zenith")] == [4, 2]
    assert await ran("remove", "zenith", *place) == 0
    assert [await weight(name) for name in ("acme", "zenith")] == [4, None]

    for name in [each.config.name for each in await nc.jetstream().streams_info()]:
        if name and cell.namespace in name:
            await nc.jetstream().delete_stream(name)
    home = (lambda: url), ready.subjects
    async with asyncio.timeout(30):
        await apply_if_lost(lambda: url, cell, cells=2, home=home)
    assert [await weight(name) for name in ("acme", "zenith")] == [4, None]
