"""Routers on a real nats-server, and stub workers that publish only what a test tells them to."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import end
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.held.held_requests import HELD_BYTES
from penstock.router.service.router import Router
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import block_hashes, control, done, fleet, jobs, kv, requests, wire
from penstock.schemas.jobs import Job
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_GONE, HEADER_LOAD, HEADER_MSG_ID, Subjects
from penstock.schemas.transfer import Encoded, Endpoint, Memory, Prefilled, Ticket
from tests.infra.bus.support import eventually
from tests.workers.support import BLOCK, MODEL, LogClient, dial, request


class Routing:
    """One router process in miniature."""

    def __init__(self, bus: Bus, settings: RouterSettings) -> None:
        self.bus = bus
        self.publisher = Publisher(bus)
        scope = MetricScope(prefix="penstock_router")
        self.registry = scope.registry
        self.router = Router(bus, self.publisher, settings, Metrics(scope))
        self.ended = False

    @property
    def waiting(self) -> list[str]:
        return [pending.request.id for pending in self.router.held]

    @property
    def unfinished(self) -> dict[str, tuple[int, str]]:
        """Attempt and worker by request. What is left unfolded is folded first, not with the next snapshot."""
        self.fold()
        return self.folded

    def fold(self) -> None:
        """Fold what is left unfolded."""
        cluster = self.router.cluster
        for unfolded in cluster._unowned.take():
            cluster._fold_kept(unfolded)

    @property
    def folded(self) -> dict[str, tuple[int, str]]:
        """The same, without what is left unfolded."""
        return {entry.request: (entry.attempt, entry.worker) for entry in self.router.cluster.tracker.active()}

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    async def knows(self, *workers: str) -> None:
        await eventually(lambda: set(workers) <= {r.worker for r in self.router.cluster.tracker.workers()})

    async def close(self) -> None:
        self.ended = True
        await self.router.close()
        await self.publisher.close()

    async def kill(self) -> None:
        """As if the process were killed: the link breaks, and nothing is said before."""
        self.ended = True
        router = self.router
        self.bus.closing = True
        await self.bus.nc.close()
        for puller in router.intake.pullers.values():
            await puller.stop()
        await router.tasks.aclose()
        await router.cluster.tasks.aclose()
        await router.cluster.disconnects.stop()
        await self.publisher.close()


@contextlib.asynccontextmanager
async def routing(
    server: EmbeddedNats, subjects: Subjects, *, url: str = "", **settings: Any
) -> AsyncIterator[Routing]:
    """A router that is open; ``url``: of the broker, in another way than the server's own."""
    async with dial(server, subjects, "router", url=url) as bus:
        made = Routing(bus, RouterSettings(**{"seed": 1} | settings))
        await made.publisher.open()
        await made.router.open()
        try:
            yield made
        finally:
            if not made.ended:
                await made.close()


def room(requests: int) -> int:
    """``max_held_bytes`` for so many requests of the tests."""
    asked = request()
    return requests * (HELD_BYTES + len(asked.digests) + len(wire.encode(asked)) + 64)


class Stub:
    """A registered worker that takes jobs and says nothing. Its cache holds what ``store`` put there."""

    def __init__(self, bus: Bus, worker: str, **fields: Any) -> None:
        self.id = worker
        self.bus = bus
        defaults: dict[str, Any] = {"model": MODEL, "slots": 8, "total_blocks": 1000, "max_model_len": 1000, "queue": 0}
        self.registration = fleet.Registration(
            worker=worker, engine="stub", block_size=BLOCK, **{"role": "aggregated", "epoch": 1} | defaults | fields
        )
        ranks = range(self.registration.dp_size)
        self.caches: list[list[bytes]] = [[] for _ in ranks]
        self.seqs = [-1 for _ in ranks]
        self.dumps = 0
        self._renewing: asyncio.Task[None] | None = None
        self._control: Any = None

    @property
    def cache(self) -> list[bytes]:
        return self.caches[0]

    async def register(self) -> None:
        self._control = await self.bus.nc.subscribe(self.bus.subjects.control(self.id), cb=self._on_control)
        await self._write()
        self._renewing = asyncio.create_task(self._renew())

    async def _write(self) -> None:
        await self.bus.js.publish(
            self.bus.subjects.lease(self.id), wire.encode(self.registration), headers={"Nats-TTL": "60"}
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(fleet.RENEW_S)
            await self._write()

    async def change(self, **fields: Any) -> None:
        self.registration = msgspec.structs.replace(self.registration, **fields)
        await self._write()

    async def stop(self) -> None:
        """No more renewals; the key stays."""
        if self._renewing is not None:
            assert await end([self._renewing])  # once cancelled, it may continue where an answer comes at that moment
            await self._control.unsubscribe()
            self._renewing = None

    async def _on_control(self, message: Any) -> None:
        """One page per rank."""
        rank = control.decode_worker(message.data).page
        self.dumps += not rank
        cache = self.caches[rank]
        events = (kv.Stored(b"".join(cache)),) if cache else ()
        following = (rank + 1) % len(self.caches)
        dump = kv.KvDump(self.id, self.registration.epoch, self.seqs[rank], events, rank, following)
        await message.respond(wire.encode(dump))

    async def store(self, digests: bytes, *, lost: bool = False, rank: int = 0) -> int:
        """Add one chain of blocks to the cache and publish the event; ``lost``: it never reaches the stream."""
        cache = self.caches[rank]
        known = cache[-1] if cache else None
        cache += block_hashes.split(digests)
        self.seqs[rank] += 1
        batch = kv.KvBatch(self.id, self.registration.epoch, self.seqs[rank], (kv.Stored(digests, known),), rank)
        if lost:
            return 0
        return int((await self.bus.js.publish(self.bus.subjects.kv(MODEL, self.id), wire.encode(batch))).seq)

    async def finish(self, asked: GenerateRequest, attempt: int = 1, choices: Sequence[done.Outcome] = ()) -> None:
        """The terminal event."""
        event = done.Done(asked.id, asked.model, attempt, self.id, tuple(choices))
        subject = self.bus.subjects.done(asked.tenant, asked.model, asked.id)
        await self.bus.js.publish(subject, wire.encode(event), headers={HEADER_MSG_ID: asked.id})

    async def hand_back(
        self,
        asked: GenerateRequest,
        attempt: int = 1,
        reason: str = "draining",
        *,
        crashed: str = "",
        gone: bool = False,
    ) -> None:
        """
        Args:
            crashed: as whoever reports its death.
            gone: as whoever saw that its process ended.
        """
        event = done.Returned(asked.id, asked.model, attempt, self.id, reason, crashed=crashed)
        headers = {HEADER_MSG_ID: f"{asked.id}:{attempt}:returned"}
        headers |= done.returned_headers(event) | ({HEADER_GONE: self.id} if gone else {})
        await self.bus.js.publish(self.bus.subjects.returned(asked.model), wire.encode(event), headers=headers)

    async def hand_off(self, job: Job, resume: tuple[bytes, ...] = ()) -> int:
        """Give a job that has further stages to the next of them, as a worker does that has done its own."""
        asked = requests.decode(job.request)
        target, later = job.route[0], job.route[1:]
        onward = msgspec.structs.replace(job, route=later, resume=resume or job.resume)
        ticket_id = f"{asked.id}:{job.attempt}:{target.role}"
        held = wire.pack_tokens(range(len(asked.digests) // 16))
        pool = "embeds" if self.registration.role == "encode" else "kv"
        assert self.registration.transfer is not None
        ticket = Ticket(ticket_id, self.id, self.registration.transfer, pool, held, held, asked.deadline_ns)
        raw = msgspec.Raw(wire.encode(onward))
        message = (Encoded if pool == "embeds" else Prefilled)(
            asked.id, job.attempt, raw, ticket, started_ns=time.time_ns()
        )
        load = jobs.load_header(
            len(asked.prompt) // 4, 0, asked.gateway, asked.deadline_ns, asked.priority.value, asked.n, job.route
        )
        headers = {HEADER_MSG_ID: ticket_id, HEADER_LOAD: load}
        subject = self.bus.subjects.work(target.role, target.worker)
        return int((await self.bus.js.publish(subject, wire.encode(message), headers=headers)).seq)


def endpoint(
    host: str = "",
    *,
    rdma: bool = False,
    backend: str = "nixl",
    layout: str = "x",
    quantization: str = "",
    **pools: Memory,
) -> Endpoint:
    """Where a worker's pools are said to be."""
    pools = {"kv": Memory(0, 100, 10, layout=layout), **pools}
    return Endpoint(f"agent@{host}", backend, pools=pools, host=host, rdma=rdma, quantization=quantization)


class Clients:
    """What the test publishes as a gateway, and what the routers make of it."""

    def __init__(self, log: LogClient) -> None:
        self.log = log
        self.bus = log.bus
        self._stubs: list[Stub] = []

    async def stub(self, worker: str = "w1", **fields: Any) -> Stub:
        stub = Stub(self.bus, worker, **fields)
        self._stubs.append(stub)
        await stub.register()
        return stub

    async def stop(self) -> None:
        for stub in self._stubs:
            await stub.stop()

    async def ask(self, *all_asked: GenerateRequest) -> None:
        for asked in all_asked:
            subject = self.bus.subjects.request(asked.model, asked.priority.value, asked.id)
            await self.bus.js.publish(subject, wire.encode(asked), headers={HEADER_MSG_ID: asked.id})

    async def work(self) -> list[tuple[str, Job]]:
        """All readable jobs in WORK, with the worker of each, in order."""
        s = self.bus.subjects
        found = []
        async for entry in read(self.bus, s.stream("WORK"), s.all("work")):
            with contextlib.suppress(msgspec.MsgspecError):
                job = jobs.decode(entry.data)
                if isinstance(job, Job):
                    found.append((entry.subject.rpartition(".")[2], jobs.with_candidates(job)))
        return found

    async def header(self, asked: GenerateRequest, attempt: int = 1) -> jobs.LoadHeader:
        """Of a job in WORK."""
        s = self.bus.subjects
        async for entry in read(self.bus, s.stream("WORK"), s.all("work")):
            if entry.headers.get(HEADER_MSG_ID) == f"{asked.id}:{attempt}":
                return jobs.read_load_header(entry.headers[HEADER_LOAD])
        raise AssertionError("no such job")

    async def revoked(self) -> list[tuple[str, jobs.Revoke]]:
        """All revocations in WORK, with the worker of each."""
        s = self.bus.subjects
        entries = [entry async for entry in read(self.bus, s.stream("WORK"), s.all("work"))]
        named = [entry for entry in entries if entry.headers.get(HEADER_CONTENT_TYPE) == wire.content_type(jobs.Revoke)]
        found = [(entry.subject.rpartition(".")[2], jobs.decode(entry.data)) for entry in named]
        return [(worker, message) for worker, message in found if isinstance(message, jobs.Revoke)]

    async def placed(self, asked: GenerateRequest, attempt: int = 1, within_s: float = 30.0) -> tuple[str, Job]:
        """The one job of an attempt, once it is there."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            found = [(worker, job) for worker, job in await self.work() if _is(job, asked, attempt)]
            if found:
                assert len(found) == 1
                return found[0]
            assert asyncio.get_running_loop().time() < deadline, f"attempt {attempt} is not placed"
            await asyncio.sleep(0.01)

    async def order(self) -> list[str]:
        """Request ids in the order in which they were placed."""
        return [requests.decode(job.request).id for _, job in await self.work()]

    async def unacknowledged(self, priority: str = "standard") -> int:
        """Requests of a class that routers hold."""
        info = await self.bus.js.consumer_info(self.bus.subjects.stream("REQUESTS"), f"router-{priority}")
        return int(info.num_ack_pending or 0)

    async def acknowledged(self, count: int, priority: str = "standard") -> None:
        """Until so many requests of a class were taken out of the log for good."""
        deadline = asyncio.get_running_loop().time() + 10
        while True:
            info = await self.bus.js.consumer_info(self.bus.subjects.stream("REQUESTS"), f"router-{priority}")
            assert info.delivered is not None
            done_with = not info.num_ack_pending and (info.delivered.stream_seq or 0) > 0 and not info.num_pending
            if done_with and (info.delivered.consumer_seq or 0) >= count:
                return
            assert asyncio.get_running_loop().time() < deadline, info
            await asyncio.sleep(0.01)


def _is(job: Job, asked: GenerateRequest, attempt: int) -> bool:
    return job.attempt == attempt and requests.decode(job.request).id == asked.id
