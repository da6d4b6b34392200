"""A worker's session on a real nats-server, with a mock engine that the test can hold, slow down or break."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import Entry, read
from penstock.infra.bus.faststream_app import BusBroker
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import end
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import block_hashes, control, done, fleet, jobs, kv, tokens, transfer, wire
from penstock.schemas.errors import ServingError
from penstock.schemas.jobs import Decision, Job, Move, Stage
from penstock.schemas.requests import GenerateRequest, Sampling, Stop
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, MEMORY, Subjects
from penstock.schemas.token_dedup import ChoiceProgress, replay
from penstock.schemas.tokens import Finish, TokenBatch, TokenItem
from penstock.schemas.transfer import Handoff
from penstock.workers.engine_loop.loop import EngineLoop, EngineThread
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import Engine, StepResult
from penstock.workers.engines.mock.executor import GREEDY, MockVocabulary, expected_tokens
from penstock.workers.kv_transfer.transport_protocol import Transport
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.runners.token_backend import moves_prefixes
from penstock.workers.runners.token_runner import TokenRunner
from penstock.workers.session.request_runner import ServedModel
from penstock.workers.session.session import WorkerSession
from tests.infra.bus.support import eventually
from tests.workers.kv_transfer.loopback import LoopbackNetwork, open_loopback

MODEL = "m"
GATEWAY = "gw"
GATEWAYS = (GATEWAY, "g1", "g2")
REVISION = "rev"
BLOCK = 4
VOCABULARY = MockVocabulary(1000)

_numbers = itertools.count(1)


# -- requests -----------------------------------------------------------------------------------------------------


def request(
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    max_tokens: int = 8,
    *,
    deadline_s: float = 60.0,
    strings: tuple[str, ...] = (),
    **options: Any,
) -> GenerateRequest:
    """A request with an id of its own; ``options`` are fields of GenerateRequest."""
    now = time.time_ns()
    packed = wire.pack_tokens(prompt)
    fields: dict[str, Any] = {
        "id": f"r{next(_numbers)}",
        "model": MODEL,
        "gateway": GATEWAY,
        "sampling": GREEDY,
        "created_ns": now,
        "deadline_ns": now + int(deadline_s * 1e9),
        "digests": block_hashes.chain(packed, BLOCK, block_hashes.root(REVISION)),
    }
    return GenerateRequest(
        prompt=packed,
        stop=Stop(max_tokens=max_tokens, ignore_eos=True, strings=strings),
        block_size=BLOCK,
        **fields | options,
    )


def answer(
    asked: GenerateRequest, count: int | None = None, choice: int = 0, vocabulary: MockVocabulary = VOCABULARY
) -> list[int]:
    """What any worker must answer."""
    prompt = list(wire.unpack_tokens(asked.prompt))
    count = asked.stop.max_tokens if count is None else count
    return expected_tokens(prompt, count, vocabulary, sampling=asked.sampling, choice=choice)


def ids(packed: bytes) -> list[int]:
    return list(wire.unpack_tokens(packed))


DRAWN = Sampling(temperature=1.0, seed=7)


# -- connections and the log --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def dial(
    server: EmbeddedNats, subjects: Subjects, name: str = "test", *, url: str = "", **options: Any
) -> AsyncIterator[Bus]:
    """A connection whose end would not end the test run; fails if the server closed it."""
    ended: list[int] = []
    bus = await connect(
        url or server.url("operator"),
        role="operator",
        name=name,
        namespace=subjects.namespace,
        end_process=ended.append,  # type: ignore[arg-type]
        **options,
    )
    try:
        yield bus
    finally:
        await bus.close()
    assert not ended


class LogClient:
    """Follows all streams of a namespace, and publishes into them as routers and other workers do."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.batches: list[TokenBatch] = []
        self.done: list[done.Done] = []
        self.returned: list[done.Returned] = []
        self.kv: list[kv.KvBatch] = []
        self.work: list[Entry] = []
        self.registrations: list[tuple[str, fleet.Registration | None]] = []
        s = bus.subjects
        bucket = s.bucket("workers")
        # Of tokens each gateway by itself: live, all of them together cannot be distinguished from other streams.
        addresses = (*GATEWAYS, f"{MEMORY}.{GATEWAY}")
        token_streams = [(s.tokens_stream(each), s.tokens(each), self._on_tokens) for each in addresses]
        follow: tuple[tuple[str, str, Callable[[Entry], None]], ...] = (
            (s.stream("KV"), s.all("kv"), lambda e: self.kv.append(kv.decode(e.data))),
            (f"KV_{bucket}", f"$KV.{bucket}.>", self._on_registration),
        )
        self._tails = [LogTail(bus, stream, subject, on) for stream, subject, on in (*token_streams, *follow)]
        self._ends: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for tail in self._tails:
            await tail.start()
        self._ends = asyncio.create_task(self._read_ends())

    async def stop(self) -> None:
        await end([self._ends])
        for tail in self._tails:
            await tail.stop()

    async def _read_ends(self) -> None:
        """Ends are republished without their bodies."""
        after = 0
        while True:
            with contextlib.suppress(ServingError, NatsError):  # the broker is away for the moment
                async for entry in read(
                    self.bus, self.bus.subjects.stream("DONE"), f"{self.bus.subjects.namespace}.>", after=after
                ):
                    after = entry.seq
                    event: done.Done | done.Returned = done.decode(entry.data)
                    if isinstance(event, done.Done):
                        self.done.append(event)
                    else:
                        self.returned.append(event)
            await asyncio.sleep(0.02)

    def _on_tokens(self, entry: Entry) -> None:
        self.batches.append(tokens.decode(entry.data))

    def _on_registration(self, entry: Entry) -> None:
        worker = entry.subject.rpartition(".")[2]
        gone = "KV-Operation" in entry.headers or not entry.data
        self.registrations.append((worker, None if gone else fleet.decode(entry.data)))

    # what was published

    @property
    def items(self) -> list[TokenItem]:
        return [item for batch in self.batches for item in batch.items]

    def progress(self, asked: GenerateRequest) -> list[ChoiceProgress]:
        """What a client of the request has seen."""
        return replay([item for item in self.items if item.request == asked.id], asked.n)

    def streamed(self, asked: GenerateRequest, choice: int = 0) -> list[int]:
        return ids(self.progress(asked)[choice].tokens)

    def ends(self, asked: GenerateRequest) -> list[done.Done]:
        return [event for event in self.done if event.request == asked.id]

    async def end(self, asked: GenerateRequest, within_s: float = 30.0) -> done.Done:
        """The terminal event, and nothing after it in the token stream that a client would wait for."""
        await eventually(lambda: self.ends(asked), within_s)
        (event,) = self.ends(asked)
        await eventually(lambda: all(part.finish is not None for part in self.progress(asked)))
        return event

    async def has_streamed(self, asked: GenerateRequest, count: int = 1) -> None:
        await eventually(lambda: len(self.streamed(asked)) >= count)

    async def handed_back(self, asked: GenerateRequest, attempt: int = 1) -> done.Returned:
        await eventually(lambda: [e for e in self.returned if (e.request, e.attempt) == (asked.id, attempt)])
        (event,) = [e for e in self.returned if (e.request, e.attempt) == (asked.id, attempt)]
        return event

    def registered(self, worker: str) -> fleet.Registration | None:
        found = None
        for name, registration in self.registrations:
            if name == worker:
                found = registration
        return found

    async def handoffs(self, asked: GenerateRequest) -> list[Handoff]:
        """The ledger's lines about a request, as they happened."""
        lines: list[Handoff] = []
        subjects = self.bus.subjects
        async for entry in read(self.bus, subjects.stream("HANDOFF"), subjects.all("handoff")):
            lines += [e for e in transfer.decode_ledger(entry.data).events if e.ticket.startswith(f"{asked.id}:")]
        return sorted(lines, key=lambda line: line.at_ns)

    async def states(self, asked: GenerateRequest, *wanted: str) -> list[str]:
        """States in the ledger, in order, once all of ``wanted`` are among them, each as often as it is named."""
        deadline = time.monotonic() + 15
        while True:
            states = [line.state for line in await self.handoffs(asked)]
            if Counter(wanted) <= Counter(states):
                return states
            assert time.monotonic() < deadline, states
            await asyncio.sleep(0.02)

    async def failure(self, asked: GenerateRequest) -> str:
        """Why a handoff failed."""
        await self.states(asked, "failed")
        (failed,) = [line for line in await self.handoffs(asked) if line.state == "failed"]
        return failed.cause

    # publishing

    async def send_job(
        self,
        worker: str,
        asked: GenerateRequest,
        attempt: int = 1,
        *,
        resume: tuple[bytes, ...] = (),
        finished: tuple[int, ...] = (),
        endings: tuple[Finish, ...] = (),
        msg_id: str = "",
        role: str = "aggregated",
        route: tuple[Stage, ...] = (),
        rank: int = 0,
        suspect: str = "",
        move: Move | None = None,
        revision: str = "",
    ) -> int:
        """Publish a job as a router does; its sequence in WORK. ``route``: the stages after this worker."""
        stages = (Stage(role, worker, rank, move), *route) if move is not None else ()
        decision = Decision("kv", worker, "test", time.time_ns(), rank=rank, route=stages, revision=revision)
        raw = msgspec.Raw(wire.encode(asked))
        job = Job(raw, attempt, decision, resume, finished, route, endings, suspect=suspect)
        load = jobs.load_header(
            len(asked.prompt) // 4, 0, asked.gateway, asked.deadline_ns, asked.priority.value, asked.n
        )
        headers = {HEADER_MSG_ID: msg_id or f"{asked.id}:{attempt}", HEADER_LOAD: load}
        subject = self.bus.subjects.work(role, worker)
        return int((await self.bus.js.publish(subject, wire.encode(job), headers=headers)).seq)

    async def publish_tokens(
        self, asked: GenerateRequest, attempt: int, streamed: Sequence[int], choice: int = 0
    ) -> None:
        """Stream tokens as another worker that ran an attempt from its beginning."""
        item = TokenItem(asked.id, attempt, choice, 0, wire.pack_tokens(streamed))
        batch = wire.encode(TokenBatch("other", 0, 0, (item,)))
        await self.bus.js.publish(self.bus.subjects.tokens(asked.gateway), batch)

    async def revoke(self, worker: str, asked: GenerateRequest, attempt: int, role: str = "aggregated") -> None:
        subject = self.bus.subjects.work(role, worker)
        await self.bus.js.publish(subject, wire.encode(jobs.Revoke(asked.id, attempt)))

    async def settled(self, worker: str) -> None:
        """Until the worker has acknowledged every job."""
        deadline = time.monotonic() + 10
        while True:
            info = await self.bus.js.consumer_info(self.bus.subjects.stream("WORK"), worker)
            if not info.num_pending and not info.num_ack_pending:
                return
            assert time.monotonic() < deadline, f"{info.num_pending} undelivered, {info.num_ack_pending} unacknowledged"
            await asyncio.sleep(0.01)

    async def remove_key(self, worker: str) -> None:
        """As a router does that declares a worker dead."""
        subject, stream = self.bus.subjects.lease(worker), f"KV_{self.bus.subjects.bucket('workers')}"
        while True:
            stored = await self.bus.js.get_last_msg(stream, subject, direct=True)
            assert stored.seq is not None
            reply = await self.bus.nc.request(subject, b"", headers=fleet.removal_headers(stored.seq))
            if b"10071" not in reply.data:  # renewed in between
                return


@contextlib.asynccontextmanager
async def log_client(server: EmbeddedNats, subjects: Subjects) -> AsyncIterator[LogClient]:
    async with dial(server, subjects, "log-client") as bus:
        log = LogClient(bus)
        await log.start()
        try:
            yield log
        finally:
            await log.stop()


# -- an engine in the test's hands --------------------------------------------------------------------------------


class ControlledEngine:
    """An engine whose steps the test can count, hold and break.

    A step that is held blocks its thread, as a long one does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.wake: Callable[[], None] = lambda: None
        self._go = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()
        self._allowed = 0
        self.steps = 0
        self.breaks_at: int | None = None
        self.closes = 0

    def hold(self) -> None:
        """From now on steps need ``allow``."""
        self._free.clear()

    def allow(self, steps: int) -> None:
        self._allowed += steps
        self._go.release(steps)
        self.wake()

    def resume(self) -> None:
        self._free.set()
        self._allowed = 0
        self._go.release()
        self.wake()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> StepResult:
        if not self._free.is_set():
            self._allowed -= 1
            assert self._go.acquire(timeout=30)
        if self.steps == self.breaks_at:
            raise RuntimeError("the device is gone")
        self.steps += 1
        return self._engine.step()

    def close(self) -> None:
        self.closes += 1
        self._engine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def engine(**options: Any) -> ControlledEngine:
    """A mock engine of the tests' sizes, without step times."""
    defaults: dict[str, Any] = {
        "vocab_size": 1000,
        "block_size": BLOCK,
        "total_blocks": 512,
        "max_model_len": 1000,
        "speedup": 0,
    }
    return ControlledEngine(mock.build(mock.MockOptions(**defaults | options)))


class WorkerHarness:
    """One worker process in miniature: a connection, an engine, one session at a time."""

    def __init__(
        self,
        bus: Bus,
        held: ControlledEngine,
        settings: WorkerSettings,
        detokenizer: Detokenizer | None,
        model: str,
        network: LoopbackNetwork | None = None,
    ) -> None:
        self.bus = bus
        self.broker = BusBroker(bus)
        self.transport: Transport | None = None
        if network is not None:
            agent = f"agent-{next(_numbers)}"
            self.transport = open_loopback(network, agent, held.memory(), quarantine_s=2.0)
        self.engine = held
        self.settings = settings
        self.publisher = Publisher(bus)
        self.metrics = WorkerMetrics(MetricScope())
        self.failures: list[BaseException] = []
        self.fatal: list[BaseException] = []  # of tasks: they end a real process
        self.loop = EngineLoop()
        self.thread = EngineThread(lambda: held, self.loop, self.failures.append)
        held.wake = self.loop.wake
        self.model = ServedModel(model, (), REVISION, detokenizer, bus.nc.options["name"])
        self._controls: list[Any] = []
        self.session: WorkerSession

    @property
    def id(self) -> str:
        return self.session.id

    async def begin(self) -> WorkerSession:
        """A new session; it answers control requests for its dump."""
        info = self.engine.info
        vision = self.engine.vision
        prefixes = self.engine.kv_transfer if moves_prefixes(self.settings) else None
        await self.broker.connect()
        self.session = session = WorkerSession(
            *(self.bus, self.broker, self.publisher, self.model, self.settings, self.metrics),
            lambda context: TokenRunner(
                *(context, self.loop, info, self.transport, vision, self.engine.grammars), prefixes=prefixes
            ),
        )

        async def obey(message: Any) -> None:
            order = control.decode_worker(message.data)
            if isinstance(order, control.DumpKv):
                await message.respond(wire.encode(await session.runner.dump(order.page)))
            elif isinstance(order, control.Push):
                pushing = asyncio.create_task(session.runner.push(order))
                pushing.add_done_callback(
                    lambda task: asyncio.ensure_future(message.respond(wire.encode(task.result())))
                )
            elif isinstance(order, control.PinPrefix):
                await message.respond(wire.encode(session.runner.pin_prefix(order)))
            elif isinstance(order, control.Release):
                await message.respond(wire.encode(session.runner.release(order)))

        self._controls.append(await self.bus.nc.subscribe(self.bus.subjects.control(session.id), cb=obey))
        await session.open()
        return session

    async def die(self) -> None:
        """As if the process were killed: nothing more is published, and the lease runs out."""
        for subscription in self._controls:
            await subscription.unsubscribe()
        await self.session.fence()

    async def stats(self) -> Any:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def answer(stats: Any) -> None:
            loop.call_soon_threadsafe(answered.set_result, stats)

        self.loop.ask(lambda engine: engine.stats(), answer)
        return await asyncio.wait_for(answered, 10)

    async def frees_everything(self) -> None:
        """Until no sequence holds a block."""
        deadline = time.monotonic() + 30
        while (stats := await self.stats()).used_blocks or stats.running or stats.waiting:
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_worker(
    server: EmbeddedNats,
    subjects: Subjects,
    held: ControlledEngine | None = None,
    *,
    detokenizer: Detokenizer | None = None,
    model: str = MODEL,
    network: LoopbackNetwork | None = None,
    **settings: Any,
) -> AsyncIterator[WorkerHarness]:
    """A registered worker; with a ``network`` it hands off blocks in it."""
    fatal: list[BaseException] = []
    async with dial(server, subjects, f"worker-{next(_numbers)}", on_fatal=fatal.append) as bus:
        made = WorkerHarness(bus, held or engine(), WorkerSettings(**settings), detokenizer, model, network)
        made.fatal = fatal
        made.thread.start()
        await made.publisher.open()
        await asyncio.to_thread(made.thread.wait_ready, 10)
        try:
            await made.begin()
            yield made
        finally:
            made.engine.resume()
            if made.session.tasks:  # not drained, failed or dead yet
                await made.session.fence()
            if made.transport is not None:
                await asyncio.to_thread(made.transport.close)
            made.loop.stop()
            assert await asyncio.to_thread(made.thread.join, 10)
            await made.publisher.close()
        assert made.engine.closes == 1
