"""Sequences stand still, and continue, whatever the engine's loop has not reported yet."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo, SequenceRequest, StepResult
from penstock.workers.engines.external import engine as module
from penstock.workers.engines.external.engine import EngineAdapter, ExternalEngine
from penstock.workers.engines.external.runtime import EngineRuntime, LoopThread
from penstock.workers.engines.external.sequences import ActiveSequence, Follower, SequenceUpdate, Token


class Endless(Follower[None, None]):
    """An engine whose first token of each sequence is its context's length; the others wait for an end."""

    stubborn = False

    async def _follow(self, sequence: ActiveSequence[None]) -> None:
        token = len(sequence.prompt) + len(sequence.request.generated)
        cached = sequence.first_output(0)
        self._emit(SequenceUpdate(sequence, cached, [Token(token)]))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not self.stubborn:
                raise
            await asyncio.sleep(60)


@pytest.fixture
def made() -> Iterator[tuple[ExternalEngine[None], Endless]]:
    loop, stack = LoopThread("test"), contextlib.ExitStack()
    runtime = EngineRuntime[None](None, None, loop, stack)
    stack.callback(loop.close)
    follower = Endless(runtime)
    info = EngineInfo("test", 16, 9, 1, 99, 99, (), False)
    adapter = EngineAdapter("Test", lambda request, lora: ActiveSequence(request, None), follower, MagicMock())
    engine = ExternalEngine(info, runtime, adapter)
    yield engine, follower
    engine.close()


def submit(engine: ExternalEngine[None], key: object = "a") -> None:
    engine.submit(SequenceRequest(key, [1, 2, 3], Sampling(), Stop(max_tokens=9)))


def until(engine: ExternalEngine[None], found: Callable[[StepResult], Any]) -> StepResult:
    for _ in range(2000):
        if found(result := engine.step()):
            return result
    raise AssertionError("nothing arrived")


def test_a_sequence_continues_behind_its_tokens(made: tuple[ExternalEngine[None], Endless]) -> None:
    engine, _ = made
    submit(engine)
    first = until(engine, lambda step: step.outputs)
    assert ([each.key for each in first.started], [each.token for each in first.outputs]) == (["a"], [3])
    engine.suspend()
    engine.await_settled()
    engine.resume()
    second = until(engine, lambda step: step.outputs)
    assert (second.started, [each.token for each in second.outputs]) == ([], [4])
    assert engine.stats().running == 1


def test_a_start_that_was_not_read_before_a_pause_is_returned_once(
    made: tuple[ExternalEngine[None], Endless],
) -> None:
    engine, _ = made
    submit(engine)
    while not engine.runtime.inbox:
        pass
    engine.suspend()
    engine.resume()
    result = until(engine, lambda step: step.outputs)
    assert ([each.key for each in result.started], [each.token for each in result.outputs]) == (["a"], [3])
    assert engine.stats().running == 1
    assert engine.cancel("a")
    assert engine.stats().running == 0


def test_a_pause_of_an_engine_that_aborts_nothing_ends_with_an_error(
    made: tuple[ExternalEngine[None], Endless], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, follower = made
    follower.stubborn = True
    submit(engine)
    until(engine, lambda step: step.outputs)
    engine.suspend()
    assert not engine.settled
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    with pytest.raises(EngineError, match="Test did not abort its requests within 0 s"):
        assert engine.settled
