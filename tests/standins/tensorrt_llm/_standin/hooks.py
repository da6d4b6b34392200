"""Handles for tests of adapters: nothing here exists in TensorRT-LLM."""

from __future__ import annotations

import threading
from typing import Any

from tensorrt_llm._standin.engine import Engine


def engine(llm: Any) -> Engine:
    found: Engine = llm._standin
    return found


def hold(llm: Any) -> None:
    """The engine does nothing from here on but what ``allow`` lets it."""
    engine(llm).hold()


def allow(llm: Any, iterations: int = 1) -> None:
    engine(llm).allow(iterations)


def free(llm: Any) -> None:
    engine(llm).free()


def freeze(llm: Any) -> None:
    """The executor's process hangs: nothing is computed, and no call of it returns."""
    engine(llm).freeze()


def thaw(llm: Any) -> None:
    engine(llm).thaw()


def die(llm: Any, error: BaseException | None = None) -> None:
    """The executor breaks: every request that runs is answered by this exception, which is no RequestError."""
    engine(llm).fail(error or RuntimeError("CUDA error: an illegal memory access was encountered"))


def emit(llm: Any, data: dict[str, Any], window: int | None = None, skip: int = 0, rank: int = 0) -> None:
    """An event of its own making; ``skip``: ids that are left out before it, as after an overflow."""

    def put(ranks: Any) -> None:
        events = ranks[rank].cache.events
        for _ in range(skip):
            next(events._ids)
        events.put(window or events._windows[-1], data)

    engine(llm).call(put)


def counts(llm: Any) -> dict[str, int]:
    """Of rank 0, once all that was asked before is done."""
    done, found = threading.Event(), {}

    def look(ranks: Any) -> None:
        rank = ranks[0]
        found.update(
            running=len(rank.running),
            waiting=len(rank.waiting),
            sending=len(rank.sending),
            used=rank.cache.used,
            taken=rank.cache.taken,
            total=rank.cache.total,
        )
        done.set()

    engine(llm).call(look)
    assert done.wait(10), "the engine is held or dead"
    return found
