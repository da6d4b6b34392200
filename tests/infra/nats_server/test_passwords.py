"""Passwords of roles and tenants are changed while both are valid, on real servers."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from penstock.cli.commands import main
from penstock.configs.settings import NatsSettings
from penstock.infra.nats_server.binary import find_server
from penstock.infra.nats_server.config import USERS
from penstock.infra.nats_server.datadir import load_secrets
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.nats_server.tenants import Tenant, other_user, user_in_use
from penstock.infra.process.child import die_with_parent
from penstock.launch.machine import free_port
from penstock.launch.nats import own_config
from tests.cluster_support import three_nodes

MakeBroker = Callable[..., EmbeddedNats]


async def ran(*args: str) -> int:
    return await asyncio.to_thread(main, args)


async def valid(url: str) -> bool:
    nc = Client()
    try:
        await nc.connect(url, allow_reconnect=False, connect_timeout=5)
    except nats.errors.Error:
        return False
    finally:
        await nc.close()  # one that was refused is open, too
    return True


async def stays(url: str, ended: list[str]) -> Client:
    """A connection whose end is noted."""

    async def note() -> None:
        ended.append(url)

    return await nats.connect(url, disconnected_cb=note, max_reconnect_attempts=1)


class Own:
    """A server of an administrator's, with the file that was printed for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "operator"
        self.config = folder / "nats.conf"
        self.port = free_port(0)
        self.log = folder / "nats.log"
        self.pid = 0
        (folder / "operator").mkdir()
        self._settings = NatsSettings(print_config=True, nats_port=self.port, store_dir=str(folder / "store"))
        self._store = folder

    def print(self) -> None:
        self.config.write_text(own_config(self._settings, self.secrets()))

    def secrets(self) -> dict[str, str]:
        return load_secrets(self.folder / "secrets.json", USERS)

    def url(self, user: str) -> str:
        return f"nats://{user}:{self.secrets()[user]}@127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.print()
        with self.log.open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220
                [find_server(), "-c", self.config], stdout=log, stderr=log, preexec_fn=die_with_parent()
            )
        self.pid = process.pid
        try:
            async with asyncio.timeout(30):
                while not await self._answers():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield
        finally:
            process.kill()
            process.wait(30)

    async def _answers(self) -> bool:
        try:
            return await valid(self.url("sys"))
        except OSError:
            return False

    async def reload(self) -> None:
        self.print()
        seen = self.log.read_text().count("Reloaded server configuration")
        os.kill(self.pid, signal.SIGHUP)
        async with asyncio.timeout(20):
            while self.log.read_text().count("Reloaded server configuration") == seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_on_a_server_of_ones_own_both_passwords_are_valid_until_the_first_is_retired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Own(tmp_path)
    place = ("--data-dir", str(own.folder))
    async with own.running():
        first = own.url("gateway")
        ended: list[str] = []
        held = await stays(first, ended)
        assert await ran("passwords", "rotate", "gateway", *place) == 0
        assert "install it on each server, and reload it" in capsys.readouterr().out
        assert user_in_use(own.secrets(), "gateway") == "gateway-2"
        await own.reload()
        second = own.url("gateway-2")
        assert (await valid(first), await valid(second)) == (True, True)
        await held.flush()
        assert not ended, "the reload disturbed nobody"
        assert await ran("passwords", "list", *place) == 0
        assert "gateway   gateway-2               -             -" in capsys.readouterr().out
        kept = own.secrets()
        assert await ran("passwords", "retire", "gateway", *place) == 1
        assert "name your servers with --nats-url, or use --force" in capsys.readouterr().err
        known = (*place, "--nats-url", f"nats://127.0.0.1:{own.port}")
        assert await ran("passwords", "retire", "gateway", *known) == 1
        told = capsys.readouterr().err
        assert "(gateway) at 127.0.0.1:" in told
        assert "of server penstock-ps; restart them first (with the new users in their URLs)" in told
        assert own.secrets() == kept
        assert await ran("passwords", "list", *known) == 0
        assert "gateway   gateway-2               0             1" in capsys.readouterr().out
        assert await ran("passwords", "retire", "gateway", "--force", *place) == 0
        await own.reload()
        assert (await valid(first), await valid(second)) == (False, True)
        async with asyncio.timeout(20):
            while not ended:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await held.close()
        assert await valid(own.url("router")), "the others are as they were"
        assert await ran("passwords", "rotate", "gateway", *place) == 0
        assert user_in_use(own.secrets(), "gateway") == "gateway"
        await own.reload()
        assert (await valid(second), await valid(own.url("gateway"))) == (True, True)


async def test_connections_to_every_server_of_a_cluster_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with three_nodes(tmp_path) as cluster:
        folder = tmp_path / "operator"
        folder.mkdir()
        shutil.copy(cluster.nodes[0].data_dir / "secrets.json", folder)
        addresses = ",".join(f"nats://127.0.0.1:{node.port}" for node in cluster.nodes)
        known = ("--data-dir", str(folder), "--nats-url", addresses)
        clients = [await nats.connect(node.url("gateway"), name="held") for node in cluster.nodes]
        assert await ran("passwords", "list", *known) == 0
        assert "gateway   gateway                 3             0" in capsys.readouterr().out
        for client in clients[:-1]:
            await client.close()
        # The role's processes have moved; one, at any server, suffices to refuse.
        assert await ran("passwords", "rotate", "gateway", "--data-dir", str(folder)) == 0
        assert await ran("passwords", "retire", "gateway", *known) == 1
        assert "held (gateway)" in capsys.readouterr().err
        await clients[-1].close()
        assert await ran("passwords", "retire", "gateway", *known) == 0


async def test_what_cannot_be_rotated_says_why(
    make_broker: MakeBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    await server.start()
    before = (server.data_dir / "secrets.json").read_text()
    place = ("--data-dir", str(server.data_dir))
    for args, why in (
        (("rotate", "root", *place), "no role 'root'; the roles are gateway, router"),
        (("rotate", "--data-dir", str(tmp_path / "nothing")), "has no passwords"),
    ):
        assert await ran("passwords", *args) == 1
        assert why in capsys.readouterr().err
    assert (server.data_dir / "secrets.json").read_text() == before
    # A connection that would be cut off is named.
    assert await ran("passwords", "rotate", "viewer", *place) == 0
    old = json.loads((server.data_dir / "secrets.json").read_text())["viewer"]
    nc = await nats.connect(f"nats://127.0.0.1:{server.port}", user="viewer", password=old, name="grafana")
    assert await ran("passwords", "retire", "viewer", *place) == 1
    assert "grafana (viewer)" in capsys.readouterr().err
    await nc.close()
    assert await ran("passwords", "retire", "viewer", "--force", *place) == 0
    assert not await valid(f"nats://viewer:{old}@127.0.0.1:{server.port}")
    assert await valid(server.url("viewer"))
    assert "viewer-2" in server.url("viewer")
    assert other_user(server._secrets, "viewer") == "viewer"


async def test_a_tenants_password_is_changed_while_its_clients_are_connected(
    make_broker: MakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    await server.start()
    async with asyncio.timeout(60):
        assert await ran("streams", "apply", "--nats-url", server.url("operator")) == 0
    place = ("--data-dir", str(server.data_dir))

    def url() -> str:
        return str(json.loads((server.data_dir / "tenants" / "acme.json").read_text())["nats_url"])

    assert await ran("tenants", "add", "acme", *place) == 0
    urls = [url()]
    for _ in range(2):  # there and back again
        ended: list[str] = []
        held = await stays(urls[-1], ended)
        assert await ran("tenants", "rotate", "acme", "--keep-old", *place) == 0
        urls.append(url())
        assert (await valid(urls[-2]), await valid(urls[-1])) == (True, True)
        await held.flush()
        assert not ended
        await held.close()
        assert await ran("tenants", "rotate", "acme", "--keep-old", *place) == 1
        assert "end that first, with --end-old" in capsys.readouterr().err
        assert await ran("tenants", "add", "acme", "--weight", "2", *place) == 0
        assert url() == urls[-1], "a change of limits leaves the passwords"
        assert await ran("tenants", "rotate", "acme", "--end-old", *place) == 0
        assert (await valid(urls[-2]), await valid(urls[-1])) == (False, True)
        assert url() == urls[-1]
        assert await ran("tenants", "rotate", "acme", "--end-old", *place) == 1
        assert "it has one password only" in capsys.readouterr().err
    assert ["tenant2-acme" in each for each in urls] == [False, True, False]
    assert await ran("tenants", "rotate", "acme", *place) == 0
    assert (await valid(urls[-1]), await valid(url())) == (False, True)


class Cluster:
    """Three servers of an administrator's, each with the file that was printed for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "operator"
        self.folder.mkdir()
        self.clients, self.routes = ([free_port(0) for _ in range(3)] for _ in range(2))
        self.logs = [folder / f"{index}.log" for index in range(3)]
        self.configs = [folder / f"{index}.conf" for index in range(3)]
        self._stores = [folder / f"store-{index}" for index in range(3)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def secrets(self) -> dict[str, str]:
        return load_secrets(self.folder / "secrets.json", USERS)

    def print(self, index: int) -> None:
        nodes = tuple(f"127.0.0.1:{port}" for port in self.routes)
        place = {"cluster": nodes, "node": nodes[index], "nats_port": self.clients[index]}
        settings = NatsSettings(print_config=True, store_dir=str(self._stores[index]), **place)  # type: ignore[arg-type]
        self.configs[index].write_text(own_config(settings, self.secrets()))

    def url(self, user: str) -> str:
        return ",".join(f"nats://{user}:{self.secrets()[user]}@127.0.0.1:{port}" for port in self.clients)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            for index in range(3):
                self.start(index)
            yield
        finally:
            for index in list(self._running):
                self.stop(index)

    def start(self, index: int) -> None:
        """With what the passwords are now."""
        self.print(index)
        command = [str(find_server()), "-c", str(self.configs[index])]
        with self.logs[index].open("ab") as log:
            self._running[index] = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent())

    def stop(self, index: int) -> None:
        process = self._running.pop(index)
        process.terminate()
        process.wait(30)

    async def reload(self, index: int) -> None:
        self.print(index)
        seen = self.logs[index].read_text().count("Reloaded server configuration")
        self._running[index].send_signal(signal.SIGHUP)
        async with asyncio.timeout(20):
            while self.logs[index].read_text().count("Reloaded server configuration") == seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def whole(self) -> None:
        """Wait until each server has routes to both others."""
        async with asyncio.timeout(30):
            for port in self.clients:
                user = user_in_use(self.secrets(), "sys")
                sys = await nats.connect(f"nats://127.0.0.1:{port}", user=user, password=self.secrets()[user])
                while not all(len(names) == 2 for names in await self._routes(sys)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await sys.close()

    async def _routes(self, sys: Client) -> list[set[str]]:
        """The servers to which each server has a route."""
        inbox = sys.new_inbox()
        found: list[set[str]] = []
        replies = await sys.subscribe(inbox)
        await sys.publish("$SYS.REQ.SERVER.PING.ROUTEZ", reply=inbox)
        try:
            while len(found) < 3:
                routes = json.loads((await replies.next_msg(timeout=1)).data)["data"]["routes"] or []
                found.append({route["remote_name"] for route in routes})
        except nats.errors.TimeoutError:
            return [set()]
        finally:
            await replies.unsubscribe()
        return found


def lets_in(port: int, password: str) -> bool:
    """Whether a server takes this password of another server's."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link, link.makefile("rwb") as lines:
        assert lines.readline().startswith(b"INFO ")
        login = {"user": "route", "pass": password, "verbose": False, "name": "test", "cluster": "penstock-ps"}
        lines.write(b"CONNECT " + json.dumps(login).encode() + b"\r\nPING\r\n")
        lines.flush()
        return not any(
            line.startswith(b"-ERR 'Auth") for line in iter(lines.readline, b"") if not line.startswith(b"I")
        )


async def test_of_each_pair_of_servers_one_knows_the_other_s_password_whichever_were_restarted(tmp_path: Path) -> None:
    """With both passwords for each, refused connections displaced good ones: a server stayed alone for good."""
    cluster = Cluster(tmp_path)
    old = cluster.secrets()["sys"]
    assert await ran("passwords", "rotate", "route", "--data-dir", str(cluster.folder)) == 0
    new = cluster.secrets()["route"]
    dialled: list[dict[str, str]] = []  # with which password each server logs in to which
    for index in range(3):
        cluster.print(index)
        routes = re.findall(r"nats-route://route:([^@]+)@127.0.0.1:(\d+)", cluster.configs[index].read_text())
        assert len(routes) == 3, "each server once"
        dialled.append({port: password for password, port in routes})
    ports = [str(port) for port in cluster.routes]
    for restarted in range(4):  # in their order
        takes = [new if index < restarted else old for index in range(3)]
        for one, other in itertools.combinations(range(3), 2):
            knows = [
                (dialled[a][ports[b]] if a < restarted else old) == takes[b] for a, b in ((one, other), (other, one))
            ]
            assert any(knows), (restarted, one, other)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_servers_of_a_cluster_stay_together_while_their_password_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was that of sys: `retire` cut each server off that was reloaded, until all were."""
    cluster = Cluster(tmp_path)
    place = ("--data-dir", str(cluster.folder))
    servers = ("--nats-url", ",".join(f"nats://127.0.0.1:{port}" for port in cluster.clients))
    async with cluster.running():
        await cluster_is_there(cluster)
        first = cluster.secrets()["sys"]
        for verb, known in (("rotate", ()), ("retire", servers)):
            assert await ran("passwords", verb, "sys", *place, *known) == 0
            for index in range(3):
                await cluster.reload(index)
                await cluster.whole()
        assert cluster.secrets()["route"] == first != cluster.secrets()["sys"]
        capsys.readouterr()
        for verb in ("rotate", "retire"):
            assert await ran("passwords", verb, "route", *place) == 0
            assert "restart" in capsys.readouterr().out
            for index in range(3):
                cluster.stop(index)
                cluster.start(index)
                await cluster_is_there(cluster)
        second = cluster.secrets()["route"]
        for port in cluster.routes:
            assert (lets_in(port, first), lets_in(port, second)) == (False, True)
        assert await ran("passwords", "retire", "route", *place) == 1
        assert "there is no previous password" in capsys.readouterr().err


async def cluster_is_there(cluster: Cluster) -> None:
    async with asyncio.timeout(60):
        for port in cluster.clients:
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
    await cluster.whole()


async def test_what_is_no_cluster_has_no_password_among_servers(
    make_broker: MakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_broker()
    await server.start()
    assert await ran("passwords", "rotate", "route", "--data-dir", str(server.data_dir)) == 1
    assert "route is for the servers of a cluster" in capsys.readouterr().err
    assert await ran("passwords", "rotate", "route", "sys", "--data-dir", str(server.data_dir)) == 1
    assert "route: change it alone" in capsys.readouterr().err


def test_a_new_password_without_a_time_for_both_ends_every_earlier_one() -> None:
    both = Tenant(password="a", weight=2.0).with_password("b", keep_old=True)
    assert (both.password, both.second_password, both.login) == ("a", "b", ("b", True))
    alone = both.with_password("c")
    assert (alone.password, alone.second_password, alone.login, alone.weight) == ("c", "", ("c", False), 2.0)
