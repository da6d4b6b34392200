"""Nothing holds up a router's or a gateway's event loop: 1,000 workers, a large index, thousands of requests.

What is measured is the processor time of single callbacks, not the clock: other processes of the machine do not count.
"""

import asyncio
import gc
import secrets
import time
from collections.abc import Iterator

import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.service.gateway import CellLink, Gateway
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.publisher import Publisher
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.model import modeldir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process.gc_policy import freeze_loaded
from penstock.router.state.attempts import ENDED_REMEMBERED
from penstock.router.state.cluster_state import ClusterState
from penstock.schemas import fleet, jobs, kv, wire
from penstock.schemas.jobs import LoadHeader, Stage
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, Subjects
from tests.router.support import Routing, routing
from tests.workers.support import MODEL, request

WORKERS = 1000
BLOCKS = 300_000
REQUESTS = 5_000
MOST_S = 0.005
MACHINE = 3.0  # CI machines are slower than those that the bound is for, and their caches are shared


class Callbacks:
    """Processor time of each callback of the loop that runs now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worst_s = 0.0
        self.worst = ""
        run = asyncio.events.Handle._run  # type: ignore[attr-defined]

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.worst_s:
                self.worst_s, self.worst = took, repr(handle)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)

    def check(self) -> None:
        assert self.worst_s < MOST_S * MACHINE, f"{self.worst_s * 1e3:.1f} ms: {self.worst}"


def registration(number: int, running: int = 0) -> fleet.Registration:
    return fleet.Registration(
        *(f"w{number:04}", MODEL, "aggregated", "mock", 1 + number, 32, 1000, 8, 4096),
        load=fleet.Load(running),
        host="somewhere",
        connection=f"worker:{number}",
        kv_events=False,
    )


def renewals(subjects: Subjects, running: int) -> Iterator[Entry]:
    """Of all workers, as the bucket brings them."""
    for number in range(WORKERS):
        data = wire.encode(registration(number, running))
        yield Entry(subjects.lease(f"w{number:04}"), number + 1 + running * WORKERS, data, {})


async def rest() -> None:
    """Let everything run that is due."""
    for _ in range(20):
        await asyncio.sleep(0.01)


def fill(cluster: ClusterState) -> None:
    """Requests and blocks, as after hours of work."""
    far_ns = time.time_ns() + 3600 * 10**9
    for number in range(ENDED_REMEMBERED):
        cluster.tracker.finish(f"01900000-0000-7000-8000-{number:012}")
    for number in range(REQUESTS):
        worker = f"w{number % WORKERS:04}"
        load = LoadHeader(100, 0, "", far_ns, "", 1, (Stage("aggregated", worker),))
        cluster.tracker.admit(f"busy-{number}", 1, worker, load, now_ns=0, echoed=True, seq=number)
    assert cluster.caches.index is not None
    for number in range(BLOCKS // 1000):
        batch = kv.KvBatch(f"w{number:04}", 1, 0, (kv.Stored(secrets.token_bytes(16_000), None),))
        cluster.caches.index.apply(batch)


@pytest.fixture
async def one(broker: EmbeddedNats, pipeline: Subjects) -> Iterator[Routing]:
    async with routing(broker, pipeline) as one:
        registry = one.router.cluster.registry
        registry._clock = lambda: 0.0  # no lease ends, however slow the machine is
        for entry in renewals(pipeline, 0):
            registry.on_entry(entry)
        fill(one.router.cluster)
        before = gc.get_threshold()
        freeze_loaded()  # as a router does; what the test run itself has loaded would be collected too
        yield one
        gc.set_threshold(*before)
        gc.unfreeze()


async def test_snapshots_sweeps_and_dumps_do_not_hold_up_the_loop(
    one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = one.router.cluster
    assert cluster.caches.index is not None
    dump = kv.KvDump("w0500", 1, 0, (kv.Stored(secrets.token_bytes(16 * 100_000), None),))
    callbacks = Callbacks(monkeypatch)
    await cluster.save()
    await cluster.caches.save()
    for number in range(20):
        cluster.caches.index.forget(f"w{number:04}")
    while not cluster.caches.index.sweep(0):
        await one.router.maintenance.sweep(time.time_ns(), time.monotonic())
    assert await cluster.caches.loader.load([dump])
    assert cluster.caches.index.held(("w0500", 0)) == 100_000
    await rest()
    callbacks.check()


async def test_decisions_of_a_burst_do_not_hold_up_the_loop(one: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    best_s = 1.0
    for _ in range(5):  # a neighbour that takes the caches makes one burst slow, hardly five
        asked = [request(range(200), max_tokens=10) for _ in range(100)]
        with monkeypatch.context() as patched:
            callbacks = Callbacks(patched)
            for each in asked:
                message = type("Message", (), {"data": wire.encode(each), "subject": "s", "reply": ""})()
                await one.router.on_request(message)
        assert sum(each.id in one.unfinished for each in asked) == 100
        if (best_s := min(best_s, callbacks.worst_s)) < MOST_S * MACHINE:
            return
    raise AssertionError(f"{best_s * 1e3:.1f} ms at best")


async def test_a_takeover_of_thousands_of_requests_does_not_hold_up_the_loop_and_comes_before_decisions(
    one: Routing, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = one.router.cluster
    cluster.owns = lambda model: False
    header = jobs.load_header(*LoadHeader(100, 0, "", time.time_ns() + 3600 * 10**9, "", 1))
    others = REQUESTS // 2
    for number in range(others):
        headers = {HEADER_LOAD: header, HEADER_MSG_ID: f"other-{number}:1"}
        subject = pipeline.work("aggregated", f"w{number % WORKERS:04}")
        cluster._on_work(Entry(subject, number + 1, b"", headers))
    assert cluster.tracker.request("other-0") is None
    asked = [request(range(200), max_tokens=10) for _ in range(2)]
    first, second = [type("Message", (), {"data": wire.encode(r), "subject": "s", "reply": ""})() for r in asked]
    await one.router.on_request(first)  # what a first decision prepares is another matter
    assert cluster.tracker.request("other-0") is None
    callbacks = Callbacks(monkeypatch)
    cluster.owns = lambda model: True
    asyncio.get_running_loop().call_soon(cluster.owners_changed)
    await asyncio.sleep(0)
    await one.router.on_request(second)
    assert cluster.tracker.request(f"other-{others - 1}") is not None
    assert cluster.tracker.request(asked[1].id) is not None
    await rest()
    callbacks.check()


async def test_checks_for_requests_without_progress_do_not_visit_a_whole_fleet(one: Routing) -> None:
    cluster = one.router.cluster
    cluster.tracker.put_worker(registration(WORKERS))
    assert len(cluster.tracker.workers()) == WORKERS + 1
    assert f"w{WORKERS}" not in cluster.steps()
    assert cluster.steps().keys() == cluster.tracker.busy()
    cluster.stalled = frozenset({"w0001"})
    for entry in cluster.tracker.active_at("w0001"):
        cluster.tracker.finish(entry.request)
    assert "w0001" in cluster.steps(), "without work it makes no steps, and is stalled until it makes one"


async def test_renewals_that_change_nothing_cost_next_to_nothing(
    one: Routing, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a router and in a gateway, per second of 1,000 workers: 1,333 renewals."""
    cluster = one.router.cluster
    model = modeldir.load(modeldir.TINY, name=MODEL)
    links, served = [CellLink(one.bus, Publisher(one.bus))], GatewaySettings(served_model_name=MODEL)
    gateway = Gateway(links, [model], served, GatewayMetrics(MetricScope()))
    for entry in renewals(pipeline, 1):
        gateway.fleet.watches[0].on_entry(entry)
    context = gateway.fleet.only_context()
    callbacks = Callbacks(monkeypatch)
    serving = cluster.tracker.serving(MODEL)
    spent = {}
    for name, members in (("router", cluster.registry), ("gateway", gateway.fleet.watches[0])):
        entries = list(renewals(pipeline, 2))
        began = time.thread_time()
        for entry in entries:
            members.on_entry(entry)
        spent[name] = (time.thread_time() - began) / fleet.RENEW_S  # of a second
    await rest()
    callbacks.check()
    assert context is not None
    assert gateway.fleet.only_context() is context, "made anew, though nothing had changed"
    assert cluster.tracker.serving(MODEL) is serving
    assert max(spent.values()) < 0.10, spent
