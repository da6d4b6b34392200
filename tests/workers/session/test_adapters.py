"""Which adapters a worker serves: those of its flags, and what entries on the broker say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.model import modeldir
from penstock.infra.model.adapter import AdapterError
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import AdapterEntry, LoraAdapter
from penstock.schemas.requests import Stop
from penstock.schemas.subjects import Subjects, adapter_key
from penstock.schemas.wire import encode
from penstock.workers.engines import mock
from penstock.workers.engines.engine_protocol import RequestError, SequenceRequest
from penstock.workers.engines.mock.executor import GREEDY
from penstock.workers.session import adapters as adapters_module
from penstock.workers.session.adapters import AdapterTable
from tests.adapters import write_adapter
from tests.workers.support import dial

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("worker")
    for seed, name in enumerate(("inside/poet", "inside/clerk", "outside")):
        write_adapter(made / name, modeldir.DEMO, seed=seed, targets=("q_proj",))
    (made / "inside" / "link").symlink_to(made / "outside")
    return made


class Worker:
    """A table over a mock engine, whose thread is the test's."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = mock.build(mock.MockOptions(vocab_size=1000, max_loras=2, max_lora_rank=8))
        assert self.engine.adapters is not None
        self.published = asyncio.Event()

        async def changed() -> None:
            self.published.set()

        given = WorkerSettings(**{"lora_folder": str(folder / "inside"), **settings})
        self.table = AdapterTable(self.engine.adapters, self.call, given, ("m", "alias"), changed)

    def call(self, work: Callable[[Any], None]) -> "Future[None]":
        done: Future[None] = Future()
        work(self.engine)
        done.set_result(None)
        return done

    def served(self) -> dict[str, LoraAdapter]:
        return {each.name: each for each in self.table.registered()}

    async def change(self, bus: Bus, entry: AdapterEntry) -> LoraAdapter | None:
        """Store an entry; what the worker registers of it then."""
        self.published.clear()
        subject = f"$KV.{bus.subjects.bucket('adapters')}.{adapter_key(entry.model, entry.name)}"
        await bus.nc.request(subject, encode(entry), timeout=5)
        await asyncio.wait_for(self.published.wait(), 20)
        return self.served().get(entry.name)


@pytest.fixture
async def bus(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Bus]:
    async with dial(broker, pipeline) as made:
        yield made


async def test_flags_name_adapters_and_those_in_the_folder_have_its_names(folder: Path) -> None:
    worker = Worker(folder, lora=(f"scribe={folder / 'outside'}",))
    await worker.table.start()
    # What is outside is served because a flag says so, though not by the link.
    assert {name: each.error for name, each in worker.served().items() if not each.digest} == {}
    assert set(worker.served()) == {"poet", "clerk", "link", "scribe"}
    assert sum(each.loaded for each in worker.served().values()) == 2, "the others are in host memory"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": ("poet",)}, "write it as NAME=FOLDER"),
        ({"lora": ("poet=/nowhere",)}, "--lora poet: /nowhere has no adapter_config.json"),
        ({"lora": ("m={outside}",)}, "--lora m: 'm' is the name of a model"),
        ({"lora": ("a@b={outside}",)}, "cannot name an adapter"),
        ({"lora_folder": "/nowhere"}, "there is no such folder"),
    ],
)
async def test_a_flag_that_cannot_be_served_stops_the_worker_with_the_reason(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    given = {
        name: tuple(each.format(outside=folder / "outside") for each in value) if name == "lora" else value
        for name, value in settings.items()
    }
    with pytest.raises(AdapterError, match=message):
        await Worker(folder, **given).table.start()


async def test_entries_load_replace_and_unload_and_a_new_session_finds_them(
    folder: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "RETIRE_S", 0.05)
    worker = Worker(folder)
    await worker.table.start()
    await worker.table.follow(bus)
    keeping = asyncio.create_task(worker.table.keep())
    first = await worker.change(bus, AdapterEntry("new", "m", "clerk"))
    assert first is not None
    assert (first.root, first.error, bool(first.revision)) == ("clerk", "", True)
    second = await worker.change(bus, AdapterEntry("new", "m", str(folder / "inside" / "poet")))
    assert second is not None
    assert second.digest == worker.served()["poet"].digest != first.digest

    def ask(adapter: str) -> None:
        worker.engine.submit(SequenceRequest(object(), [1, 2, 3], GREEDY, Stop(1), adapter=adapter))

    while True:  # requests that a router placed just before still come
        try:
            ask(first.id)
        except RequestError as error:
            assert f"{first.id} is no longer served" in error.message  # noqa: PT017
            break
        await asyncio.sleep(0.02)
    ask(second.id)
    assert await worker.change(bus, AdapterEntry("clerk", "m", unloaded=True)) is None
    keeping.cancel()
    await worker.table.unfollow()
    worker.table.close()

    again = Worker(folder)
    await again.table.start()
    assert "clerk" in again.served(), "by its flags alone"
    await again.table.follow(bus)
    assert set(again.served()) == {"poet", "link", "new"}
    assert again.served()["new"].id == second.id
    await again.table.unfollow()


async def test_what_cannot_be_loaded_is_said_and_what_was_there_stays(folder: Path, bus: Bus) -> None:
    worker = Worker(folder, max_cpu_loras=4)
    await worker.table.start()
    await worker.table.follow(bus)
    keeping = asyncio.create_task(worker.table.keep())
    before = worker.served()["poet"]
    for path in ("../outside", str(folder / "outside"), "link"):
        after = await worker.change(bus, AdapterEntry("poet", "m", path))
        assert after is not None
        assert f"{path!r} is not within the worker's --lora-folder" in after.error
        assert (after.id, after.root) == (before.id, before.root)
        assert after.revision > before.revision
    assert (await worker.change(bus, AdapterEntry("poet", "alias", "poet"))) is not None
    fourth = await worker.change(bus, AdapterEntry("fourth", "m", "clerk"))
    fifth = await worker.change(bus, AdapterEntry("fifth", "m", "clerk"))
    assert fourth is not None
    assert fifth is not None
    assert (fourth.error, bool(fifth.digest)) == ("", False)
    assert "4 adapters are in host memory, which --max-cpu-loras limits" in fifth.error
    keeping.cancel()
    await worker.table.unfollow()
    worker.table.close()


async def test_what_was_loaded_stays_while_the_entries_cannot_be_read_and_then_they_are_followed(
    folder: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "RETRY_S", 0.05)
    worker, operator = Worker(folder), Worker(folder)
    await operator.table.follow(bus)
    keeping = asyncio.create_task(operator.table.keep())
    await operator.change(bus, AdapterEntry("new", "m", "clerk"))
    await worker.table.start()
    await worker.table.follow(bus)
    assert "new" in worker.served()
    await worker.table.unfollow()  # the end of a session
    with monkeypatch.context() as patched:
        failing = AsyncMock(side_effect=ServingError(Code.broker_unavailable, "no answer"))
        patched.setattr(adapters_module.LogTail, "start", failing)
        await worker.table.follow(bus)
        assert "new" in worker.served()
    await operator.change(bus, AdapterEntry("new", "m", unloaded=True))
    keeping.cancel()
    keeping = asyncio.create_task(worker.table.keep())
    await asyncio.wait_for(worker.published.wait(), 20)
    assert "new" not in worker.served()
    keeping.cancel()
    for each in (worker, operator):
        await each.table.unfollow()
        each.table.close()


async def test_a_worker_outlives_whatever_an_entry_or_a_file_says(
    folder: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that ended one would end all workers, and again after each restart."""
    worker = Worker(folder)
    await worker.table.start()
    await worker.table.follow(bus)
    keeping = asyncio.create_task(worker.table.keep())
    broken = await worker.change(bus, AdapterEntry("new", "m", "po\0et"))
    assert broken is not None
    assert (broken.digest, "null" in broken.error) == ("", True)

    def prepare(*_: object) -> object:
        raise KeyError("x" * 1_000_000)

    with monkeypatch.context() as patched:
        patched.setattr(worker.engine.adapters, "prepare", prepare)
        long = await worker.change(bus, AdapterEntry("new", "m", "clerk"))
    assert long is not None
    assert (long.digest, len(long.error)) == ("", 500)  # registrations have to fit into a message
    moving = write_adapter(folder / "inside" / "later" / "moving", modeldir.DEMO, seed=7, targets=("q_proj",))
    ready = worker.engine.adapters.prepare  # type: ignore[union-attr]

    def prepare_late(*given: Any) -> object:
        write_adapter(moving, modeldir.DEMO, seed=8, targets=("q_proj",))
        return ready(*given)

    with monkeypatch.context() as patched:
        patched.setattr(worker.engine.adapters, "prepare", prepare_late)
        changed = await worker.change(bus, AdapterEntry("new", "m", "later/moving"))
    assert changed is not None
    assert (changed.digest, "changed while it was read" in changed.error) == ("", True)
    mended = await worker.change(bus, AdapterEntry("new", "m", "poet"))
    assert mended is not None
    assert (mended.error, mended.digest) == ("", worker.served()["poet"].digest)
    keeping.cancel()
    await worker.table.unfollow()
    worker.table.close()


async def test_an_old_entry_that_is_removed_brings_no_adapter_back(folder: Path, bus: Bus) -> None:
    worker = Worker(folder)
    await worker.table.start()
    await worker.table.follow(bus)
    keeping = asyncio.create_task(worker.table.keep())
    try:
        for name in ("poet", "loaded"):  # "poet" is in the folder, so that flags name it
            await worker.change(bus, AdapterEntry(name, "m", "clerk"))
        await worker.change(bus, AdapterEntry("poet", "m", unloaded=True))
        subject = f"$KV.{bus.subjects.bucket('adapters')}."
        await bus.nc.request(subject + adapter_key("m", "poet"), b"", timeout=5)
        worker.published.clear()
        await bus.nc.request(subject + adapter_key("m", "loaded"), b"", timeout=5)
        await asyncio.wait_for(worker.published.wait(), 20)
        assert set(worker.served()) == {"clerk", "link"}
    finally:
        keeping.cancel()
        await worker.table.unfollow()
        worker.table.close()
