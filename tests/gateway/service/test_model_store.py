"""Which models are in memory: bounded, read once, never those with open requests let go of."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.gateway.service import model_store
from penstock.gateway.service.model_store import AGAIN_S, ModelStore, Source
from penstock.infra.bus.tasks import Tasks
from penstock.infra.model.modeldir import DEMO, ModelDir, ModelError, load
from penstock.schemas.errors import Code, ServingError

MODEL = load(DEMO)
A, B, C = (Source(name, f"/models/{name}", "") for name in "abc")


class Reader:
    """In the place of the disk."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, source: Source) -> ModelDir:
        self.reads.append(source.name)
        assert self.gate.wait(20)
        if source.name in self.broken:
            raise ModelError(f"{source.folder}/tokenizer.json is missing")
        return MODEL


class Stage:
    def __init__(self, limit: int, idle_s: float = 100.0) -> None:
        self.now = 1_000.0
        self.busy: set[str] = set()
        self.read = Reader()
        self.unloaded: list[str] = []
        self.tasks = Tasks("test")
        self.store = ModelStore(
            limit,
            idle_s,
            self.tasks,
            in_use=lambda: self.busy,
            unloaded=lambda source: self.unloaded.append(source.name),
            load=self.read,
            clock=lambda: self.now,
        )

    async def use(self, *sources: Source) -> None:
        for source in sources:
            self.now += 1
            await self.store.load(source)


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    made: list[Stage] = []

    def stage(limit: int, idle_s: float = 100.0) -> Stage:
        made.append(Stage(limit, idle_s))
        return made[-1]

    yield stage
    for each in made:
        each.read.gate.set()
        each.store.close()
        await each.tasks.aclose()


async def test_the_model_that_was_unused_for_longest_makes_room(make: Any) -> None:
    stage = make(2)
    await stage.use(A, B, A, C)
    assert stage.unloaded == ["b"]
    assert stage.store.get(B) is None
    await stage.use(B)
    assert stage.read.reads == ["a", "b", "c", "b"]
    assert stage.unloaded == ["b", "a"]


async def test_a_model_with_open_requests_stays_and_without_room_another_is_refused_for_now(make: Any) -> None:
    stage = make(2)
    await stage.use(A, B)
    stage.busy = {"a", "b"}
    with pytest.raises(ServingError, match=r"2 models in memory \(--max-models\)") as caught:
        await stage.store.load(C)
    assert caught.value.code is Code.model_unavailable
    assert caught.value.code.status == 503
    assert caught.value.retry_after is not None
    stage.busy = {"a"}
    await stage.use(C)
    assert stage.unloaded == ["b"]


async def test_what_the_operator_named_never_leaves(make: Any) -> None:
    stage = make(2, idle_s=10.0)
    stage.store.add(A, MODEL)
    await stage.use(B, C)
    assert stage.unloaded == ["b"]
    stage.now += 1_000
    stage.store.unload_idle()
    assert stage.unloaded == ["b", "c"]
    assert stage.store.peek(A) is MODEL


async def test_unused_models_leave_after_a_while_unless_they_have_open_requests(make: Any) -> None:
    stage = make(4, idle_s=10.0)
    await stage.use(A, B)
    stage.busy = {"a"}
    stage.now += 11
    stage.store.unload_idle()
    assert stage.unloaded == ["b"]
    stage.busy = set()
    stage.now += 9
    stage.store.unload_idle()
    assert stage.unloaded == ["b"], "its last request was open a moment ago"
    stage.now += 2
    stage.store.unload_idle()
    assert stage.unloaded == ["b", "a"]


async def test_a_model_is_read_once_for_all_that_wait_even_if_the_first_one_leaves(make: Any) -> None:
    stage = make(2)
    stage.read.gate.clear()
    waiting = [asyncio.create_task(stage.store.load(A)) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting[0].cancel()
    stage.read.gate.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [each is MODEL for each in found] == [False, True, True, True, True]
    assert stage.read.reads == ["a"]


async def test_while_one_is_being_read_another_one_is_there(make: Any) -> None:
    stage = make(3)
    await stage.use(B)
    stage.read.gate.clear()
    slow = asyncio.create_task(stage.store.load(A))
    await asyncio.sleep(0)
    assert await stage.store.load(B) is MODEL
    assert not slow.done()
    stage.read.gate.set()
    assert await slow is MODEL


async def test_reading_takes_no_more_places_than_there_are_and_a_request_waits_for_one(make: Any) -> None:
    """It was refused for the models with open requests, of which there were none."""
    stage = make(2)
    stage.read.gate.clear()
    first = asyncio.create_task(stage.store.load(A))
    await asyncio.sleep(0)
    stage.store.prefetch(B)
    waits = asyncio.create_task(stage.store.load(C))
    await asyncio.sleep(0)
    stage.store.prefetch(C)
    assert "c" not in stage.read.reads
    stage.busy = {"a"}
    stage.read.gate.set()
    assert [await first, await waits] == [MODEL, MODEL]
    assert (stage.unloaded, stage.read.reads[2:]) == (["b"], ["c"])


@pytest.mark.parametrize("stops", [False, True])
async def test_a_request_that_waits_for_a_place_in_vain_is_answered(
    make: Any, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(model_store, "WAIT_S", 20.0 if stops else 0.05)
    stage = make(1)
    stage.read.gate.clear()
    stage.store.prefetch(A)
    waits = asyncio.create_task(stage.store.load(B))
    await asyncio.sleep(0)
    if stops:
        await stage.tasks.aclose()
    with pytest.raises(ServingError, match="this gateway is stopping" if stops else r"not read .* within 0\.05 s"):
        await waits


async def test_one_that_cannot_be_read_says_why_and_is_tried_again_later(make: Any) -> None:
    stage = make(2)
    stage.read.broken = {"a"}
    for _ in range(3):
        with capture_logs(), pytest.raises(ServingError) as caught:
            await stage.store.load(A)
        assert caught.value.code is Code.model_unavailable
        assert "/models/a/tokenizer.json is missing" in caught.value.message
        assert "--model a=FOLDER" in caught.value.message
        stage.now += 1
    assert stage.read.reads == ["a"], "not for every request"
    assert "is missing" in stage.store.why_not(A)
    assert await stage.store.load(B) is MODEL, "others are served"
    stage.read.broken = set()
    stage.now += AGAIN_S
    assert await stage.store.load(A) is MODEL
    assert stage.store.why_not(A) == ""


async def test_a_folder_with_another_tokenizer_than_the_workers_is_not_used(make: Any) -> None:
    source = Source("a", str(DEMO), "0" * 32, "host-1")
    stage = make(2)
    stage.store._load = model_store.read_model
    with capture_logs(), pytest.raises(ServingError, match="another tokenizer") as caught:
        await stage.store.load(source)
    assert "host-1" in caught.value.message
    assert await stage.store.load(source._replace(tokenizer=MODEL.tokenizer_digest))


async def test_a_model_that_takes_too_long_is_an_answer_and_arrives_for_later_requests(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "WAIT_S", 0.01)
    stage = make(2)
    stage.read.gate.clear()
    with pytest.raises(ServingError, match="not read from") as caught:
        await stage.store.load(A)
    assert caught.value.code is Code.model_unavailable
    stage.read.gate.set()
    monkeypatch.setattr(model_store, "WAIT_S", 20.0)
    assert await stage.store.load(A) is MODEL
    assert stage.read.reads == ["a"]
