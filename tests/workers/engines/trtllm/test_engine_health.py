"""An engine's queues are read beside the event loop, and one that hangs is noticed."""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.trtllm import adapter, engine_health
from penstock.workers.engines.trtllm.engine_health import KvEvents, QueueReader
from tests.workers.engines.contract import BOUND_S
from tests.workers.engines.trtllm.conftest import Results, ask, run, until

Make = Callable[..., Any]
PROMPT = list(range(40, 90))


def llm_of(engine: Any) -> Any:
    return engine.runtime.llm


def test_queues_are_read_in_a_thread_of_their_own_and_no_task_is_made_for_an_event(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    llm, asked = llm_of(engine), []
    for name in ("get_kv_cache_events", "get_stats"):
        real = getattr(llm, name)

        def counted(timeout: float = 2, real: Any = real) -> Any:
            asked.append((threading.current_thread().name, timeout))
            return real(timeout)

        monkeypatch.setattr(llm, name, counted)
    for name in ("get_kv_cache_events_async", "get_stats_async"):
        monkeypatch.setattr(llm, name, lambda timeout=2: pytest.fail("it blocks the event loop"))
    results = run(engine, ask("a", PROMPT, 4))
    until(engine, lambda results: bool(results.events) and bool(asked), results)
    assert set(asked) == {("trtllm-polls", 0)}
    assert not [task for task in engine.runtime.loop.tasks if not task.get_name().startswith("sequence ")]


def test_nothing_is_read_before_the_first_request(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm import LLM

    calls: list[str] = []
    for name in ("generate_async", "get_kv_cache_events", "get_stats"):
        real = getattr(LLM, name)

        @functools.wraps(real)
        def noted(self: Any, *given: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            calls.append(name)
            return real(self, *given, **more)

        monkeypatch.setattr(LLM, name, noted)
    engine = make(publish_events_and_metrics=True)
    before = len(calls)
    assert not engine.has_work()
    run(engine, ask("a", PROMPT, 1))
    until(engine, lambda results: {"get_kv_cache_events", "get_stats"} <= set(calls[before:]))
    assert calls[before] == "generate_async"


def test_a_process_that_hangs_is_noticed_while_requests_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._standin import hooks

    monkeypatch.setattr(engine_health, "POLL_LATE_S", 0.3)
    engine = make()
    engine.adapter.follower.queues.watch_s = 0.05
    engine.submit(ask("a", PROMPT, 400, ignore_eos=True))
    until(engine, lambda results: bool(results.tokens("a")))
    hooks.freeze(llm_of(engine))
    try:
        with pytest.raises(EngineError, match="has not answered a poll"):
            until(engine, lambda results: False)
        with pytest.raises(EngineError):
            engine.submit(ask("b", PROMPT, 2))
    finally:
        hooks.thaw(llm_of(engine))


def test_and_while_it_is_idle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._standin import hooks

    monkeypatch.setattr(engine_health, "POLL_LATE_S", 0.3)
    engine = make()
    engine.adapter.follower.queues.watch_s = 0.05
    run(engine, ask("a", PROMPT, 2))
    until(engine, lambda results: not engine.has_work())
    hooks.freeze(llm_of(engine))
    try:
        deadline = time.monotonic() + 30
        while not engine.has_work():  # an idle engine is asked only that
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(EngineError, match="does not answer any more"):
            until(engine, lambda results: False)
    finally:
        hooks.thaw(llm_of(engine))


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_answers_polls_and_generates_nothing_is_noticed(make: Make, busy: bool) -> None:
    """As after a burst of cancels in disaggregated serving: its health stays good."""
    from tensorrt_llm._standin import hooks

    engine = make()
    signs = engine.adapter.follower.liveness
    signs.quiet_s, signs.answer_s = 0.2, 0.3
    engine.adapter.follower.queues.watch_s = 0.05
    hooks.hold(llm_of(engine))
    if busy:
        engine.submit(ask("a", PROMPT, 4))
    with pytest.raises(EngineError, match="one token"):
        until(engine, lambda results: False)
    hooks.free(llm_of(engine))


def test_an_idle_engine_that_generates_is_asked_again_and_again_and_stays(make: Make) -> None:
    engine = make()
    signs = engine.adapter.follower.liveness
    signs.quiet_s = 0.05
    engine.adapter.follower.queues.watch_s = 0.02
    answers: list[float] = []
    real = signs.answered
    signs.answered = lambda now: (answers.append(now), real(now))
    until(engine, lambda results: len(answers) >= 3)
    assert run(engine, ask("a", PROMPT, 3, ignore_eos=True)).tokens("a")
    assert engine.stats().running == 0
    assert not any(event.digests for event in Results().events)


def test_a_batch_that_the_serializer_loses_is_counted_and_its_blocks_are_forgotten(make: Make) -> None:
    from prometheus_client import CollectorRegistry
    from tensorrt_llm._standin import hooks

    engine = make()
    registry = CollectorRegistry()
    for collector in engine.collectors():
        registry.register(collector)
    results = run(engine, ask("a", PROMPT, 4))
    until(engine, lambda results: bool(engine.dump()), results)
    unset = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None}
    hooks.emit(llm_of(engine), unset)

    def counted() -> bool:
        return bool(registry.get_sample_value("trtllm_kv_event_batches_lost_total"))

    deadline = time.monotonic() + BOUND_S
    for number in itertools.count(1):  # events that are read together with the broken one are lost, too
        run(engine, ask(number, [number, *PROMPT], 4))
        if counted():
            break
        assert time.monotonic() < deadline, "no later event shows that some are missing"
    assert registry.get_sample_value("trtllm_kv_event_batches_lost_total") == 1


def test_a_poll_that_fails_loses_a_batch_and_not_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    llm = llm_of(engine)
    results = run(engine, ask("a", PROMPT, 4))
    until(engine, lambda results: bool(engine.dump()), results)
    real, failed = llm.get_kv_cache_events, []

    def failing(timeout: float = 2) -> Any:
        if not failed:
            failed.append(True)
            raise AttributeError("'NoneType' object has no attribute 'new_value'")
        return real(timeout)

    monkeypatch.setattr(llm, "get_kv_cache_events", failing)
    until(engine, lambda results: not engine.dump())
    assert run(engine, ask("b", PROMPT, 2, ignore_eos=True)).tokens("b")


def test_events_that_can_never_be_read_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "MOST_FAILURES", 3)
    emitted: list[Any] = []

    class Llm:
        def get_kv_cache_events(self, timeout: float) -> Any:
            raise TypeError("the serializer changed")

        def get_stats(self, timeout: float) -> Any:
            return []

    given_up = threading.Event()

    class Signs(engine_health.Liveness):
        def polled(self, now: float) -> None:
            super().polled(now)
            if len(emitted) == 3 and not found.events.wanted:
                given_up.set()

    found = QueueReader(
        Llm(), Signs(time.monotonic()), emitted.append, pytest.fail,
        ask=lambda: None, beat=lambda: None, events=True, stats=True,
    )  # fmt: skip
    found.start()
    found.read()
    assert given_up.wait(30)
    found.close()
    assert emitted == [KvEvents((), lost=True)] * 3


def test_kv_that_never_comes_fails_its_request_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._standin import hooks

    monkeypatch.setattr(adapter, "FETCH_MORE_S", 0.1)
    source, target = make(role="prefill"), make(role="decode", handoff_lease_s=1.0)
    results = run(source, ask("a", PROMPT, 1, pin=True, ignore_eos=True))
    (pinned,) = results.pinned
    hooks.hold(llm_of(target))
    target.submit(ask("a", PROMPT, 8, generated=results.tokens("a"), opaque=pinned.opaque, ignore_eos=True))
    results = until(target, lambda results: "a" in results.ended())
    assert results.failure("a").code == "transfer_failed"
    hooks.free(llm_of(target))
    assert run(target, ask("b", PROMPT, 3, ignore_eos=True)).tokens("b")


def test_an_engine_that_hangs_is_closed_within_a_bound(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm._standin import hooks

    from penstock.workers.engines.external import runtime

    monkeypatch.setattr(runtime.shut_down, "__defaults__", (0.2,))
    monkeypatch.setattr(engine_health, "JOIN_S", 0.1)
    engine = make()
    hooks.freeze(llm_of(engine))
    engine.close()
    hooks.thaw(llm_of(engine))
