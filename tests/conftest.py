"""A real nats-server, and a namespace of its own for every test that uses it.

Use ``broker`` for a shared server, ``subjects`` for a fresh namespace, ``nc`` for an operator's connection,
``connect`` for one of another role, ``bus`` or ``pipeline`` for a namespace whose streams exist, and ``make_broker``
for a server that the test may kill.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import logging
import os
import secrets
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import certifi
import pytest
import structlog
from nats.aio.client import Client

from penstock.infra.bus.client import BusClient
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects, inbox_prefix
from tests import properties
from tests.infra.bus.support import opened

properties.register()
os.environ.setdefault("PENSTOCK_DASHBOARD_PORT", "-1")  # a process less for every deployment that is started
# Beside other tests, two threads wait for each other: a token of the demo model takes 110 instead of 5 CPU-ms. Read by
# torch when it is imported, also in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_PR_SET_THP_DISABLE = 41


def huge_pages(allowed: bool) -> None:
    """Whether this process and those that it starts get them. To move into them what it has loaded (``gc_policy``), a
    native worker takes 0.8 CPU-s of 4.5 until it is ready."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)


huge_pages(False)

# Folders whose modules share deployments.
TOGETHER = ("tests/pipeline/shared/", "tests/pipeline/fleet/", "tests/pipeline/demo/", "tests/pipeline/pairs/")
# Half of their time is waiting, for processes and leases.
WAITING = ("tests/pipeline/", "tests/chaos/", "tests/infra/nats_server/", "tests/workers/kv_transfer/")
# Of both kinds, those that take long, in the order in which they are run; all others follow.
LONGEST = (
    *TOGETHER,
    "tests/chaos/",
    "tests/workers/engines/test_contract.py",
    "tests/infra/nats_server/test_several_machines.py",
    "tests/infra/nats_server/test_disk.py",
    "tests/pipeline/",
    "tests/workers/kv_transfer/",
    "tests/workers/",
    "tests/router/",
    "tests/infra/",
    "tests/penstock/",
)
TAIL = 0.1  # of the files that compute: behind the last that waits

# Every client of httpx reads certifi's certificates, which takes 20 CPU-ms; here one context serves all of them.
CERTIFI = {"cafile": certifi.where()}
new_context = ssl.create_default_context
httpx_context = functools.cache(functools.partial(new_context, **CERTIFI))
ssl.create_default_context = lambda *args, **more: httpx_context() if more == CERTIFI else new_context(*args, **more)

# Of 30 streams each. With those of 100 tests, a server takes twice as long to make another one.
NAMESPACES = 30

T = TypeVar("T")
Connect = Callable[..., Awaitable[Client]]


def outside(work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of its own, leaving pytest-asyncio's alone."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def round_trip(client: Client) -> None:
    """Wait until the server has seen everything sent so far.

    nats-py's ``flush`` writes its PING ahead of what is still buffered; only the second one is behind it.
    """
    await client.flush()
    await client.flush()


def pytest_collection(session: pytest.Session) -> None:
    """Modules and tests stay until the end: collecting garbage among them takes seconds, at each of its passes."""
    gc.disable()
    import_in_turn(session.config)


def import_in_turn(config: pytest.Config) -> None:
    """Import all test modules in a process of pytest-xdist, each of which begins at another one.

    What one has compiled, with its assertions rewritten, the others then read. Side by side at the same module, each
    compiles all: in a new checkout, that is 16 CPU-s per process.
    """
    known: dict[str, Any] | None = getattr(config, "workerinput", None)
    if known is None or config.args != config.getini("testpaths"):
        return
    names = sorted(
        ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        for path in (config.rootpath / "tests").rglob("test_*.py")
    )
    first = len(names) * int(known["workerid"].removeprefix("gw")) // int(known["workercount"])
    for name in names[first:] + names[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and reports this
            importlib.import_module(name)


def unit_of(nodeid: str) -> str:
    """What one process runs: a folder of ``TOGETHER``, or a file."""
    return next((each for each in TOGETHER if nodeid.startswith(each)), nodeid.partition("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait among files that compute, the longest of both first: all cores are busy until the end."""
    units = sorted(
        dict.fromkeys(unit_of(item.nodeid) for item in items),
        key=lambda unit: next((at for at, start in enumerate(LONGEST) if unit.startswith(start)), len(LONGEST)),
    )
    waiting = [unit for unit in units if unit.startswith(WAITING)]
    computing = [unit for unit in units if not unit.startswith(WAITING)]
    places = {unit: at / len(waiting) for at, unit in enumerate(waiting)}
    places |= {unit: at / len(computing) / (1 - TAIL) for at, unit in enumerate(computing)}
    items.sort(key=lambda item: places[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, a file is run in one process, and so is each folder of ``TOGETHER``."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Logging that a test sets up, or has a command set up, ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], EmbeddedNats]]:
    """The run's own nats-server, own port and store; a new one after every ``NAMESPACES`` tests."""
    running: list[EmbeddedNats] = []
    asked = itertools.count()

    def end() -> None:
        for server in running:
            server.kill()  # in order, it would take seconds to close all streams, which nobody needs
            outside(server.stop())
        running.clear()

    def current() -> EmbeddedNats:
        if next(asked) % NAMESPACES == 0 or not running:
            end()
            server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
            outside(server.start())
            running.append(server)
        return running[0]

    yield current
    end()


@pytest.fixture
def broker(brokers: Callable[[], EmbeddedNats]) -> EmbeddedNats:
    """A nats-server that tests share; its role users know the namespace "ps" only."""
    return brokers()


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., EmbeddedNats]]:
    """Make (not start) servers that end with the test; each name is one data directory."""
    made: list[EmbeddedNats] = []

    def make(name: str = "own", **options: Any) -> EmbeddedNats:
        server = EmbeddedNats(tmp_path / name, **options)
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()
        outside(server.stop())


@pytest.fixture
def subjects() -> Subjects:
    """A namespace nobody else uses."""
    return Subjects(f"t{secrets.token_hex(6)}")


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect to a server as a role (default: operator); closed with the test, also when it fails.

    What the server complains of is added to ``errors``.
    """
    opened: list[Client] = []

    async def open_as(server: EmbeddedNats, role: str = "operator", errors: list[str] | None = None) -> Client:
        async def note(error: Exception) -> None:
            if errors is not None:
                errors.append(str(error))

        client = BusClient()
        await client.connect(
            server.url(role),
            inbox_prefix=inbox_prefix(role),
            name=f"test-{role}",
            error_cb=note,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.05,
        )
        opened.append(client)
        return client

    yield open_as
    for client in opened:
        await client.close()


@pytest.fixture
async def nc(broker: EmbeddedNats, connect: Connect) -> Client:
    """An operator's connection to the shared server."""
    return await connect(broker)


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    """An operator's bus in a fresh namespace with all its streams."""
    async with opened(broker, subjects) as bus:
        yield bus


@pytest.fixture
async def pipeline(nc: Client, subjects: Subjects) -> Subjects:
    """A fresh namespace with all its streams."""
    await apply(nc, topology(subjects))
    return subjects
