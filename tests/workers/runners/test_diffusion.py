"""A session of a diffusion worker on a real nats-server, with an engine that the test controls."""

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.faststream_app import BusBroker
from penstock.infra.bus.object_store import get
from penstock.infra.bus.publisher import Publisher
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.model.modeldir import ModelError
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import control, wire
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion, GenerateRequest
from penstock.schemas.subjects import Subjects
from penstock.workers.engines.diffusion.diffusion_protocol import GeneratedMedia, Progress
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.runners import pipeline_runner as module
from penstock.workers.runners.pipeline_runner import PipelineRunner
from penstock.workers.runners.pipeline_thread import PipelineThread
from penstock.workers.session.process import WorkerProcess
from penstock.workers.session.request_runner import ServedModel
from penstock.workers.session.session import WorkerSession
from tests.infra.bus.support import eventually
from tests.pipeline.support import Process
from tests.workers.support import LogClient, dial, ids, request

MADE = Diffuser("image", "TestPipeline", 16, 8, 6, ("png", "webp"), 10_000, 50)
STEPS = 6


class ControlledPipeline:
    """An engine whose steps the test allows one by one; notes how many requests it was ever in at once."""

    name = "painter"
    load_seconds = 0.0

    def __init__(self, *, interruptible: bool = True) -> None:
        self.interruptible = interruptible
        self.diffuser = MADE
        self.asked: list[Diffusion] = []
        self.steps = 0
        self.most_at_once = 0
        self.fails: BaseException | None = None
        self.closes = 0
        self._inside = 0
        self._go = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()

    def hold(self) -> None:
        """From now on steps need ``allow``."""
        self._free.clear()

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            self._go.release()

    def release(self) -> None:
        self._free.set()
        self._go.release()

    def generate(self, ask: Diffusion, progress: Progress) -> list[GeneratedMedia]:
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        try:
            self.asked.append(ask)
            for step in range(1, ask.steps + 1):
                if not self._free.is_set():
                    assert self._go.acquire(timeout=30)
                if self.fails is not None:
                    raise self.fails
                self.steps += 1
                if self.interruptible:
                    progress(step, ask.steps)
            pixels = np.full((1, ask.height, ask.width, 3), ask.seed % 256, np.uint8)
            return [GeneratedMedia(pixels)] * ask.images
        finally:
            self._inside -= 1

    def close(self) -> None:
        self.closes += 1


class WorkerHarness:
    """One worker in miniature."""

    def __init__(self, bus: Any, painter: ControlledPipeline, settings: WorkerSettings) -> None:
        self.bus = bus
        self.painter = painter
        self.settings = settings
        self.publisher = Publisher(bus)
        self.metrics = WorkerMetrics(MetricScope())
        self.thread = PipelineThread()
        self.broken: list[BaseException] = []
        self.session: WorkerSession

    async def begin(self) -> WorkerSession:
        broker = BusBroker(self.bus)
        await broker.connect()
        self.session = WorkerSession(
            *(self.bus, broker, self.publisher, ServedModel("m", (), "", None, "test"), self.settings, self.metrics),
            lambda context: PipelineRunner(context, self.thread, self.painter, self.broken.append),
        )
        await self.session.open()
        return self.session

    @property
    def id(self) -> str:
        return self.session.id


@contextlib.asynccontextmanager
async def run_worker(
    broker: EmbeddedNats, subjects: Subjects, painter: ControlledPipeline
) -> AsyncIterator[WorkerHarness]:
    async with dial(broker, subjects, "painter") as bus:
        made = WorkerHarness(bus, painter, WorkerSettings(role="diffusion"))
        await made.publisher.open()
        await made.begin()
        try:
            yield made
        finally:
            painter.release()
            if made.session.tasks:
                await made.session.fence()
            assert await asyncio.to_thread(made.thread.stop, 10)
            await made.publisher.close()


@pytest.fixture
async def worker(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[WorkerHarness]:
    async with run_worker(broker, pipeline, ControlledPipeline()) as worker:
        yield worker


def picture(seed: int = 9, deadline_s: float = 60.0, **more: Any) -> GenerateRequest:
    ask = Diffusion("image", "a boat", 16, 8, STEPS, "png", seed=seed, **more)
    return request((), deadline_s=deadline_s, digests=b"", diffusion=ask)


async def send(log: LogClient, worker: str, asked: GenerateRequest, attempt: int = 1, **more: Any) -> None:
    await log.send_job(worker, asked, attempt, role="diffusion", **more)


async def test_a_request_becomes_steps_a_stored_file_and_one_end(log: LogClient, worker: WorkerHarness) -> None:
    asked = picture(images=2)
    await send(log, worker.id, asked)
    end = await log.end(asked)
    assert (end.code, end.worker, end.choices[0].reason) == ("", worker.id, "stop")
    assert end.usage.completion == len(log.streamed(asked)) == 2 * STEPS
    t = end.timings
    assert t.created_ns <= t.routed_ns <= t.started_ns <= t.first_token_ns <= t.ended_ns
    files = end.choices[0].files
    finish = log.progress(asked)[0].finish
    assert finish is not None
    assert finish.files == files
    assert [file.name for file in files] == [f"{asked.id}-1-{i}.png" for i in range(2)]
    for file in files:
        data = await get(log.bus, "results", file.name, limit=1 << 20)
        assert (len(data), file.type, file.width, file.height) == (file.bytes, "image/png", 16, 8)
        assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (9, 9, 9)
    await log.settled(worker.id)


async def test_the_registration_has_its_kind_and_one_slot(log: LogClient, worker: WorkerHarness) -> None:
    await eventually(lambda: log.registered(worker.id))
    registration = log.registered(worker.id)
    assert registration is not None
    assert (registration.role, registration.diffusion) == ("diffusion", MADE)
    assert (registration.slots, registration.queue, registration.kv_events) == (1, 0, False)


async def test_requests_wait_for_each_other_and_the_event_loop_for_none(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    first, second = picture(1), picture(2)
    await send(log, worker.id, first)
    await send(log, worker.id, second)
    await eventually(lambda: len(worker.painter.asked) == 1 and len(worker.session.requests.running) == 2)
    async with asyncio.timeout(30):
        page = await worker.session.runner.dump(0)  # any order is answered while the engine computes
    assert page.events == ()
    worker.painter.release()
    assert [(await log.end(asked)).code for asked in (first, second)] == ["", ""]
    assert worker.painter.most_at_once == 1
    assert [ask.seed for ask in worker.painter.asked] == [1, 2]


async def test_progress_is_reported_while_the_engine_computes(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    asked = picture()
    await send(log, worker.id, asked)
    for done in (2, 5):
        worker.painter.allow(done - worker.painter.steps)
        await log.has_streamed(asked, done)
        assert len(log.streamed(asked)) == done
    assert not log.ends(asked)
    worker.painter.release()
    await log.end(asked)


async def test_a_cancelled_request_ends_at_its_next_step(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    asked, after = picture(), picture(3)
    await send(log, worker.id, asked)
    worker.painter.allow(2)
    await log.has_streamed(asked, 2)
    await worker.session.on_cancel(asked.id, "gone")
    assert not log.ends(asked)
    await send(log, worker.id, after)
    worker.painter.allow(1)
    end = await log.end(asked)
    assert (end.code, end.usage.completion) == (Code.cancelled, 2)
    worker.painter.release()
    assert (await log.end(after)).code == ""
    assert worker.painter.steps == 2 + 1 + STEPS


async def test_a_request_that_waits_is_cancelled_at_once(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    first, second = picture(), picture(2)
    await send(log, worker.id, first)
    await send(log, worker.id, second)
    await eventually(lambda: len(worker.session.requests.running) == 2)
    await worker.session.on_cancel(second.id, "gone")
    assert (await log.end(second)).code == Code.cancelled
    assert not log.ends(first)
    worker.painter.release()
    assert (await log.end(first)).code == ""
    assert len(worker.painter.asked) == 1


async def test_a_request_that_cannot_be_stopped_is_ended_all_the_same(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient
) -> None:
    async with run_worker(broker, pipeline, ControlledPipeline(interruptible=False)) as worker:
        worker.painter.hold()
        asked, after = picture(deadline_s=0.5), picture(2)
        await send(log, worker.id, asked)
        await eventually(lambda: worker.painter.asked)
        assert (await log.end(asked)).code == Code.deadline_exceeded
        await send(log, worker.id, after)
        worker.painter.release()
        assert (await log.end(after)).code == ""
        assert worker.painter.most_at_once == 1
        assert len(log.ends(asked)) == 1


async def test_a_request_that_the_engine_refuses_ends_alone(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.fails = RequestError(Code.invalid_request, "too odd")
    bad, good = picture(), picture(2)
    await send(log, worker.id, bad)
    end = await log.end(bad)
    assert (end.code, end.message) == (Code.invalid_request, "too odd")
    worker.painter.fails = None
    await send(log, worker.id, good)
    assert (await log.end(good)).code == ""
    assert not worker.broken


async def test_a_picture_that_no_file_can_hold_ends_its_request_alone(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = GeneratedMedia(np.zeros((1, 1, 16_384, 3), dtype=np.uint8))
    monkeypatch.setattr(worker.painter, "generate", lambda ask, progress: [wide])
    asked = picture()
    assert asked.diffusion is not None
    as_webp = msgspec.structs.replace(asked.diffusion, format="webp")
    await send(log, worker.id, msgspec.structs.replace(asked, diffusion=as_webp))
    end = await log.end(asked)
    assert end.code == Code.engine_error
    assert "16384x1 could not be written as webp" in end.message
    assert not worker.broken


async def test_a_request_for_tokens_is_refused(log: LogClient, worker: WorkerHarness) -> None:
    asked = request()
    await send(log, worker.id, asked)
    end = await log.end(asked)
    assert end.code == Code.invalid_request
    assert not worker.painter.asked


async def test_a_broken_engine_gives_the_request_back_as_poison(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    running, waiting = picture(), picture(2)
    await send(log, worker.id, running)
    await send(log, worker.id, waiting)
    await eventually(lambda: len(worker.session.requests.running) == 2)
    worker.painter.fails = RuntimeError("the device is gone")
    worker.painter.release()
    await eventually(lambda: worker.broken)
    await worker.session.fail(f"engine_error: {worker.broken[0]!r}")
    back = [await log.handed_back(asked) for asked in (running, waiting)]
    assert [event.poison for event in back] == [True, False]
    assert "the device is gone" in back[0].reason
    assert not log.done


async def test_another_attempt_starts_over_and_is_shown_once_it_is_further(
    log: LogClient, worker: WorkerHarness
) -> None:
    worker.painter.hold()
    asked = picture()
    streamed_before = [70, 71, 72]
    await log.publish_tokens(asked, 1, streamed_before)
    await send(log, worker.id, asked, attempt=2, resume=(wire.pack_tokens(streamed_before),))
    worker.painter.allow(2)
    await eventually(lambda: any(item.attempt == 2 for item in log.items))
    assert log.streamed(asked) == streamed_before
    worker.painter.allow(2)
    await log.has_streamed(asked, 4)
    assert log.streamed(asked)[:3] == streamed_before
    worker.painter.release()
    end = await log.end(asked)
    assert worker.painter.steps == STEPS, "nothing of an attempt is taken over"
    assert (end.attempt, len(ids(end.choices[0].tokens))) == (2, STEPS)
    assert end.choices[0].files[0].name == f"{asked.id}-2-0.png"


async def test_a_later_attempt_takes_the_place_of_one_that_runs_here(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    asked = picture()
    await send(log, worker.id, asked)
    await eventually(lambda: worker.painter.asked)
    await send(log, worker.id, asked, attempt=2)
    await eventually(lambda: worker.session.requests.running[asked.id].attempt == 2)
    worker.painter.release()
    end = await log.end(asked)
    assert end.attempt == 2
    await log.settled(worker.id)
    assert len(log.ends(asked)) == 1


async def test_draining_finishes_the_picture_and_requeues_what_waits(log: LogClient, worker: WorkerHarness) -> None:
    worker.painter.hold()
    running, waiting = picture(), picture(2)
    await send(log, worker.id, running)
    await send(log, worker.id, waiting)
    await eventually(lambda: worker.painter.asked and len(worker.session.requests.running) == 2)
    draining = asyncio.create_task(worker.session.drain(20))
    back = await log.handed_back(waiting)
    assert (back.reason, back.poison) == ("draining", False)
    assert not draining.done()
    worker.painter.release()
    assert (await log.end(running)).code == ""
    await draining
    await eventually(lambda: log.registrations[-1] == (worker.id, None))
    assert len(worker.painter.asked) == 1


async def test_a_session_without_its_lease_publishes_nothing_of_its_picture(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.painter.hold()
    asked, after = picture(), picture(2)
    await send(log, worker.id, asked)
    await eventually(lambda: worker.painter.asked)
    old = worker.session
    await log.remove_key(old.id)
    await asyncio.wait_for(old.lost.wait(), 10)
    await old.fence()
    await worker.begin()
    await send(log, worker.id, after)
    worker.painter.release()
    assert (await log.end(after)).worker == worker.id != old.id
    assert not log.ends(asked)
    assert not [item for item in log.items if item.request == asked.id]
    assert worker.painter.most_at_once == 1


async def test_while_trust_is_in_doubt_the_end_waits(
    log: LogClient, worker: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = picture()
    doubted = asyncio.Event()

    def in_doubt() -> bool:
        doubted.set()
        return False

    monkeypatch.setattr(worker.session.lease, "trusted", in_doubt)
    await send(log, worker.id, asked)
    await asyncio.wait_for(doubted.wait(), 10)
    assert not log.ends(asked)
    monkeypatch.undo()
    assert (await log.end(asked)).code == ""


# -- the process --------------------------------------------------------------------------------------------------


async def test_a_worker_process_serves_and_ends_in_good_order(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter = ControlledPipeline()
    monkeypatch.setattr(module, "build_engine", lambda settings: painter)
    settings = WorkerSettings(
        nats_url=broker.url("operator"),
        namespace=log.bus.subjects.namespace,
        role="diffusion",
        model="owner/painter",
        name="p",
    )
    serving = asyncio.create_task(WorkerProcess(settings, module.DiffusionBackend).serve())
    await eventually(lambda: log.registrations or serving.done())
    worker, registration = log.registrations[-1]
    assert registration is not None
    assert registration.model == "owner/painter"
    asked = picture()
    await send(log, worker, asked)
    assert (await log.end(asked)).code == ""
    subject = log.bus.subjects.control(worker)
    released = await log.bus.nc.request(subject, wire.encode(control.Release("t", "w")), timeout=5)
    assert "pins no blocks" in control.decode_ok(released.data).error
    await log.bus.nc.request(subject, wire.encode(control.Drain()), timeout=5)
    assert await asyncio.wait_for(serving, 20) == 0
    assert painter.closes == 1


async def test_a_process_with_a_broken_engine_ends_with_status_70(
    broker: EmbeddedNats, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter = ControlledPipeline()
    painter.fails = RuntimeError("the device is gone")
    monkeypatch.setattr(module, "build_engine", lambda settings: painter)
    settings = WorkerSettings(
        nats_url=broker.url("operator"), namespace=log.bus.subjects.namespace, role="diffusion", model="painter"
    )
    serving = asyncio.create_task(WorkerProcess(settings, module.DiffusionBackend).serve())
    await eventually(lambda: log.registrations or serving.done())
    asked = picture()
    await send(log, log.registrations[-1][0], asked)
    assert (await log.handed_back(asked)).poison
    assert await asyncio.wait_for(serving, 20) == 70


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "/nowhere"}, "is not a directory"),
        ({"engine": "trtllm", "model": "x"}, "use --engine native, which runs the same directory with diffusers"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_fix(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, EngineError, ModelError), match=says):
        module.build_engine(WorkerSettings(role="diffusion", **settings))


def test_what_cannot_be_served_ends_the_process_with_the_fix(tmp_path: Path) -> None:
    flags = ("--role", "diffusion", "--log-format", "json", "--engine", "mock", "--model", "x")
    process = Process(tmp_path / "log", "worker", *flags)
    assert process.wait() == 2
    assert "--role diffusion runs with --engine native" in process.log.read_text()
