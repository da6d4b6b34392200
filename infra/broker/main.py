"""``penstock nats`` and ``penstock streams apply``."""

import asyncio
import sys

from nats.aio.client import Client
from nats.errors import Error as NatsError

from configs.logs import setup
from configs.settings import NatsSettings
from infra.broker.apply import apply
from infra.broker.datadir import DataDirBusy, DataDirUnusable
from infra.broker.disk import DiskWatch
from infra.broker.failures import NoServerBinary, ServerFailed
from infra.broker.jetstream_api import BrokerProblem
from infra.broker.roles import ROLES, inbox_prefix
from infra.broker.server import EmbeddedNats
from infra.bus.client import BusClient
from infra.bus.connection import authenticate, why_unreachable
from infra.cli import StreamsSettings
from infra.launch.signals import Stop
from infra.launch.sockets import CannotListen
from infra.launch.supervisor import USAGE, Keeper
from schemas.errors import ServingError
from schemas.streams import GIB, topology
from schemas.subjects import Subjects

CONNECT_S = 10.0


def run(settings: NatsSettings) -> int:
    """Run the embedded broker in the foreground; it is restarted if it exits."""
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


async def _serve(settings: NatsSettings) -> int:
    broker = EmbeddedNats(
        settings.data_dir,
        settings.namespace,
        settings.nats_port,
        settings.monitor_port,
        durability=settings.durability,
        host=settings.nats_host,
    )
    keeper = Keeper(broker)
    with Stop() as stop:
        try:
            await keeper.start()
            url, size = broker.url("operator"), settings.store_size
            await apply_at(url, broker.subjects, record=settings.record, store_size=size)
            print(f"nats-server on {settings.nats_host}:{broker.port}; log: {broker.log_path}")
            print(f"passwords of {', '.join(ROLES)} and sys: {broker.data_dir / 'secrets.json'}")
            async with DiskWatch(broker):
                await stop.asked.wait()
        finally:
            await keeper.stop(timeout_s=30)
            await broker.stop()
    return 0


def run_apply(settings: StreamsSettings) -> int:
    """Create the streams on a broker and print the changes."""
    try:
        subjects = Subjects(settings.namespace)
        work = apply_at(
            settings.nats_url, subjects, settings.replicas, record=settings.record, store_size=settings.store_size
        )
        done = asyncio.run(work)
    except (BrokerProblem, ValueError) as error:
        print(f"penstock streams apply: {error}", file=sys.stderr)
        return 1
    for line in done or [f"nothing to do: all streams of namespace {settings.namespace!r} are there"]:
        print(line)
    return 0


async def apply_at(
    url: str, subjects: Subjects, replicas: int = 1, *, record: bool = False, store_size: float = 0.0
) -> list[str]:
    """Connect as the operator, apply, close.

    Args:
        store_size: GiB of all streams together that are created now; 0: their own sizes.
    Raises:
        BrokerProblem: as ``apply``, or no server answers there.
    """
    nc = await connect_operator(url)
    try:
        size = int(store_size * GIB)
        return await apply(nc, topology(subjects, record=record), replicas, size_bytes=size)
    finally:
        await nc.close()


async def connect_operator(url: str) -> Client:
    """A connection for administration: fails after a few seconds, where a serving process would retry.

    Raises:
        BrokerProblem: no server answers there, or it refuses the credentials.
    """
    problems: list[Exception] = []

    async def note(error: Exception) -> None:
        problems.append(error)

    client = BusClient()
    try:
        async with asyncio.timeout(CONNECT_S):
            await client.connect(
                url.split(","),
                name="penstock-operator",
                inbox_prefix=inbox_prefix("operator"),
                error_cb=note,
                max_reconnect_attempts=2,
                reconnect_time_wait=0.2,
                **authenticate(client, url.partition(",")[0], "operator"),
            )
            return client
    except ServingError as error:
        raise BrokerProblem(error.message) from None
    except (OSError, TimeoutError, NatsError) as error:
        client.drop_link()
        reason = why_unreachable(problems[-1] if problems else error)
        raise BrokerProblem(
            f"no connection to {_without_password(url)} ({reason}): "
            "start the broker, or check the address and the credentials"
        ) from None


def _without_password(url: str) -> str:
    return ",".join(part.rpartition("@")[2] for part in url.split(","))
