"""``penstock nats``, and applying the streams to a broker."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError

from penstock.configs.logs import setup
from penstock.configs.settings import NatsSettings
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import Refused, authenticate, note_refusal, refusals, why_unreachable
from penstock.infra.nats_server.apply_streams import apply, divide, lost_streams
from penstock.infra.nats_server.binary import MINIMUM, NoServerBinary, ServerFailed, dotted
from penstock.infra.nats_server.config import LAME_DUCK_S, USERS, Cluster, ServerConfig, Tls, render
from penstock.infra.nats_server.datadir import DataDirBusy, DataDirUnusable, load_nkeys, load_secrets, prepare
from penstock.infra.nats_server.disk import DiskWatch
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.permissions import BROKER_ROLES, SECOND
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.nats_server.tenants import copy_limits
from penstock.infra.process.sockets import CannotListen
from penstock.infra.process.supervisor import USAGE, Keeper, StopSignals
from penstock.schemas.errors import ServingError
from penstock.schemas.streams import GIB, Topology, divided, scaled, topology
from penstock.schemas.subjects import Subjects, cell_namespace, inbox_prefix

log = structlog.get_logger("nats")

CONNECT_S = 10.0
APPLY_AGAIN_S = 1.0
# Flags that need --print-config
PRINTED = ("cluster", "node", "tenants_file", "tls_cert", "tls_key", "tls_ca", "nkeys", "client_certs")
CLIENTS_PORT, ROUTES_PORT = 4222, 6222


def run(settings: NatsSettings) -> int:
    """Run the embedded broker in the foreground; it is restarted if it exits."""
    if settings.print_config:
        return print_config(settings)
    if printed := [name for name in PRINTED if getattr(settings, name)]:
        flag = f"--{printed[0].replace('_', '-')}"
        print(f"penstock nats: {flag} is for --print-config: the broker that runs here is one server", file=sys.stderr)
        return USAGE
    setup("auto", "info", name="nats")
    try:
        return asyncio.run(_serve(settings))
    except (
        ServerFailed,
        NoServerBinary,
        DataDirBusy,
        DataDirUnusable,
        CannotListen,
        BrokerProblem,
        ValueError,
    ) as error:
        print(f"penstock nats: {error}", file=sys.stderr)
        permanent = isinstance(error, DataDirUnusable) or (isinstance(error, CannotListen) and error.permanent)
        return USAGE if permanent else 1


def print_config(settings: NatsSettings) -> int:
    """Print a configuration for a server of your own and return the exit status."""
    try:
        data_dir = Path(settings.data_dir).resolve()
        prepare(data_dir)
        dated = _dated(data_dir / "secrets.json")
        print(own_config(settings, load_secrets(data_dir / "secrets.json", USERS)), end="")
    except (ValueError, DataDirUnusable) as error:
        print(f"penstock nats: {error}", file=sys.stderr)
        return USAGE
    users = f"{', '.join(BROKER_ROLES)} and sys"
    if settings.nkeys:
        folder = Path(settings.nkeys).resolve()
        note = f"seeds of {users}: {folder}/USER.nk, for PENSTOCK_NATS_NKEY, and sys.nk for PENSTOCK_SYS_NATS_NKEY"
    elif settings.client_certs:
        note = f"certificates of {users} need these as DNS names, and the authority {settings.tls_ca}"
    else:
        note = f"passwords of {users}, two users each: {data_dir / 'secrets.json'}{dated}"
    print(note, file=sys.stderr)
    return 0


def _dated(path: Path) -> str:
    """When the passwords last changed, as text: a configuration with other passwords locks every process out."""
    if not path.exists():
        return ", made now: running servers need the folder with their own passwords (--data-dir)"
    return f", of {time.strftime('%Y-%m-%d %H:%M', time.localtime(path.stat().st_mtime))}"


def own_config(settings: NatsSettings, secrets: Mapping[str, str]) -> str:
    """
    Raises:
        ValueError: flags contradict each other, or a file of --nkeys has no key.
        DataDirUnusable: the folder of --nkeys cannot be written.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key) or (settings.tls_ca and not settings.tls_cert):
        raise ValueError("--tls-cert and --tls-key are needed together, and --tls-ca with both")
    if settings.nkeys and settings.client_certs:
        raise ValueError("--nkeys and --client-certs exclude each other")
    if settings.client_certs and not settings.tls_ca:
        raise ValueError("--client-certs needs --tls-cert, --tls-key, and --tls-ca with the authority of the users")
    if settings.cluster and settings.tls_cert and not settings.tls_ca:
        raise ValueError("--tls-ca: the servers of a cluster verify each other; name the file with their authority")
    if settings.cluster and settings.node not in settings.cluster:
        raise ValueError(f"--node: name the server that the configuration is for: {', '.join(settings.cluster)}")
    if settings.node and not settings.cluster:
        raise ValueError("--node is one of --cluster; name all of them there")
    port_of_clients = settings.nats_port or CLIENTS_PORT
    if own := [each for each in settings.cluster if each.endswith(f":{port_of_clients}")]:
        raise ValueError(
            f"--cluster: {own[0]} is the port of clients (`penstock systemd env --servers`); servers reach each other "
            f"at another one: {ROUTES_PORT}, if you name none"
        )
    if len(set(settings.cluster)) != len(settings.cluster):
        raise ValueError("--cluster names a server twice")
    routes = tuple(each if ":" in each else f"{each}:{ROUTES_PORT}" for each in settings.cluster)
    cluster = None
    if settings.cluster:
        address = routes[settings.cluster.index(settings.node)]
        port = int(address.rpartition(":")[2])
        cluster = Cluster(f"penstock-{settings.namespace}", settings.node, port, routes, advertise=address)
    config = ServerConfig(
        name=f"penstock-{settings.namespace}",
        port=settings.nats_port or CLIENTS_PORT,
        host=_listens_on(settings),
        store_dir=settings.store_dir,
        secrets=secrets,
        subjects=Subjects(settings.namespace),
        monitor_port=settings.monitor_port,
        monitor_host=settings.monitor_host,
        sync_always=settings.durability == "power",
        cluster=cluster,
        tenants_file=settings.tenants_file,
        lame_duck_s=LAME_DUCK_S if cluster is not None else 0,
        tls=Tls(settings.tls_cert, settings.tls_key, settings.tls_ca) if settings.tls_cert else None,
        nkeys=load_nkeys(Path(settings.nkeys), USERS, SECOND) if settings.nkeys else {},
        client_certs=settings.client_certs,
        cells=settings.cells or 1,
    )
    private = " It holds passwords." if cluster is not None or not (settings.nkeys or settings.client_certs) else ""
    header = f"# Made by `penstock nats --print-config`, for nats-server {dotted(MINIMUM)} or newer.{private}"
    return render(config).replace("# Generated by penstock at every start; edits are lost.", header, 1)


def _listens_on(settings: NatsSettings) -> str:
    """The address to listen on: that of the flag, or all addresses for a cluster over several machines."""
    elsewhere = any(not each.startswith(("127.", "localhost")) for each in settings.cluster)
    return "0.0.0.0" if elsewhere and settings.nats_host == NatsSettings().nats_host else settings.nats_host


async def _serve(settings: NatsSettings) -> int:
    broker = EmbeddedNats(
        settings.data_dir,
        settings.namespace,
        settings.nats_port,
        settings.monitor_port,
        settings.monitor_host,
        durability=settings.durability,
        host=settings.nats_host,
        cells=settings.cells or 1,
    )
    cells = [Subjects(cell_namespace(settings.namespace, cell)) for cell in range(settings.cells or 1)]
    sizes: dict[str, Any] = {"record": settings.record, "store_size": settings.store_size, "cells": len(cells)}

    async def again() -> None:
        for subjects in cells:
            await apply_if_lost(broker.url, subjects, **sizes)

    keeper = Keeper(broker, restarted=again)
    with StopSignals() as stop:
        try:
            await keeper.start()
            for subjects in cells:
                await apply_at(broker.url("operator"), subjects, **sizes)
            print(f"nats-server on {settings.nats_host}:{broker.port}; log: {broker.log_path}")
            print(f"passwords of {', '.join(BROKER_ROLES)} and sys: {broker.data_dir / 'secrets.json'}")
            async with DiskWatch(broker, restart=keeper.restart):
                await stop.asked.wait()
        finally:
            await keeper.stop(timeout_s=30)
            await broker.stop()
    return 0


async def apply_at(
    url: str,
    subjects: Subjects,
    replicas: int = 1,
    *,
    record: bool = False,
    store_size: float = 0.0,
    cells: int = 1,
    tags: Sequence[str] = (),
) -> list[str]:
    """Connect as the operator, apply, close.

    Args:
        store_size: GiB of all streams that are created now, in all cells together; 0: their default sizes.
        cells: the number of the deployment's cells, including this one.
        tags: see ``apply``.
    Raises:
        BrokerProblem: as ``apply``, or no server answers there.
    """
    async with as_operator(url, "streams apply") as nc:
        size = int(store_size * GIB / cells)
        whole = divided(topology(subjects, record=record), cells)
        done = await apply(nc, whole, replicas, size_bytes=size, tags=tags)
        if done:
            async with recorded(nc, subjects, "streams apply", f"namespace {subjects.namespace}", _changes(done)):
                pass
        return done


async def divide_at(
    url: str, subjects: Subjects, before: int, *, record: bool = False, store_size: float = 0.0, cells: int = 1
) -> list[str]:
    """Resize the streams of a cell after the number of cells that share the space has changed from ``before`` to
    ``cells``; see ``divide``.

    Raises:
        BrokerProblem: as ``apply``, or no server answers there.
    """

    def part(number: int) -> Topology:
        whole = divided(topology(subjects, record=record), number)
        return scaled(whole, int(store_size * GIB / number)) if store_size else whole

    async with as_operator(url, "streams apply") as nc:
        done = await divide(nc, part(before), part(cells))
        if done:
            async with recorded(nc, subjects, "streams apply", f"namespace {subjects.namespace}", _changes(done)):
                pass
        return done


async def copy_tenants(home_url: str, home: Subjects, url: str, subjects: Subjects) -> list[str]:
    """Copy the limits of tenants from the home cell to a cell, and return the tenants whose limits changed there.

    Raises:
        BrokerProblem: as ``apply``, or no server answers in one of the two cells.
    """
    async with as_operator(home_url, "tenants") as nc, as_operator(url, "tenants") as cell:
        try:
            copied = await copy_limits(nc, home, cell, subjects)
            for name in copied:
                async with recorded(cell, subjects, "tenants copy", name, f"from namespace {home.namespace}"):
                    pass
            return copied
        except (NatsError, TimeoutError) as error:
            raise BrokerProblem(f"the broker does not take the limits of tenants: {error}") from error


async def apply_if_lost(
    url: Callable[[], str],
    subjects: Subjects,
    *,
    record: bool = False,
    store_size: float = 0.0,
    cells: int = 1,
    home: tuple[Callable[[], str], Subjects] | None = None,
) -> None:
    """After a restart of a broker, apply the streams if its store was lost; retried until the broker accepts them.

    Args:
        url: returns the operator's URL, whose password may change.
        record, store_size, cells: as ``apply_at``.
        home: returns the home cell's URL for any other cell, whose routers need the tenants' weights again.
    """
    lost: list[str] = []
    while True:
        try:
            async with as_operator(url(), "streams apply") as nc:
                now = await lost_streams(nc, topology(subjects, record=record))
            if now:
                lost = now
                await apply_at(url(), subjects, record=record, store_size=store_size, cells=cells)
            if lost and home is not None:
                await copy_tenants(home[0](), home[1], url(), subjects)
        except (BrokerProblem, NatsError, TimeoutError, OSError) as error:
            log.warning("streams_not_applied", error=str(error) or repr(error), retry_in_s=APPLY_AGAIN_S)
            await asyncio.sleep(APPLY_AGAIN_S)
            continue
        if lost:
            log.warning(
                "streams_made_again",
                streams=lost,
                action="the broker has lost its store: `penstock tenants restore` and `penstock keys import` bring "
                "back tenants and keys",
            )
        return


@contextlib.asynccontextmanager
async def as_operator(url: str, command: str) -> AsyncIterator[Client]:
    """A connection for administration, closed with the block. A refusal of the broker cancels the block.

    Args:
        command: the command that connects, without ``penstock``.
    Raises:
        BrokerProblem: as ``connect_operator``, or the user lacks a permission; the text names the role that has it.
    """
    on_refused: list[Refused] = []
    nc = await connect_operator(url, on_refused)
    user = urlsplit(url.partition(",")[0]).username or ""
    try:
        with refusals(on_refused, user, command, "operator"):
            yield nc
    except ServingError as error:
        raise BrokerProblem(error.message) from None
    finally:
        await nc.close()


def _changes(done: Sequence[str]) -> str:
    """The changes for the audit log, with everything that was created in one list."""
    created = [each.removeprefix("created ") for each in done if each.startswith("created ")]
    parts = [f"created {', '.join(created)}"] if created else []
    return "; ".join([*parts, *(each for each in done if not each.startswith("created "))])


async def connect_operator(url: str, on_refused: Sequence[Refused] = ()) -> BusClient:
    """A connection for administration. It fails after a few seconds; a serving process would retry.

    Args:
        on_refused: each is called with the broker's message when it refuses a subject to this user.
    Raises:
        BrokerProblem: no server answers there, or it refuses the credentials.
    """
    problems: list[Exception] = []

    async def note(error: Exception) -> None:
        problems.append(error)
        note_refusal(error, on_refused)

    client = BusClient()
    credentials: dict[str, Any] = {}
    try:
        credentials = authenticate(client, url.partition(",")[0], "operator")
        async with asyncio.timeout(CONNECT_S):
            await client.connect(
                url.split(","),
                name="penstock-operator",
                inbox_prefix=inbox_prefix("operator"),
                error_cb=note,
                max_reconnect_attempts=2,
                reconnect_time_wait=0.2,
                **credentials,
            )
            return client
    except ServingError as error:
        raise BrokerProblem(error.message) from None
    except (OSError, TimeoutError, NatsError) as error:
        client.drop_link()
        reason = why_unreachable(problems[-1] if problems else error, credentials)
        raise BrokerProblem(
            f"no connection to {_without_password(url)} ({reason}): "
            "start the broker, or check the address and the credentials"
        ) from None


def _without_password(url: str) -> str:
    return ",".join(part.rpartition("@")[2] for part in url.split(","))
