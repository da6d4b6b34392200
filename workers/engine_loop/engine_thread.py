"""Where an engine runs: in a thread of its own or, if its steps are short, in the event loop's.

Python runs one thread at a time: an engine that computes in Python gains nothing from a thread of its own, and each
request would wake both threads several times.
"""

import asyncio
import threading
import time
from collections.abc import Callable

import structlog

from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import Engine

log = structlog.get_logger("engine")

SLICE_S = 0.001  # of steps without a pause in the event loop, which then does what else is due


class EngineThread:
    """Owns an engine from its construction to its end.

    Args:
        build: makes the engine, in a thread of its own.
        engine_loop: what is done with the engine.
        failed: called in the engine thread, once, when the engine is broken.
        event_loop: runs an engine with short steps, and must run until ``join`` has returned; None: none.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        engine_loop: EngineLoop,
        failed: Callable[[BaseException], None],
        event_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._build = build
        self._engine_loop = engine_loop
        self._failed = failed
        self._event_loop = event_loop
        self._scheduled = False  # a turn
        self._timer: asyncio.TimerHandle | None = None  # of a turn, unless something is to be done before
        self._loop_thread = 0  # the event loop's; known from the first turn on
        self._error: BaseException | None = None
        self._engine: Engine
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> Engine:
        """Block until the engine is built; not in the event loop. Raises what ``build`` raised."""
        if not self._ready.wait(timeout):
            raise TimeoutError("the engine is still loading")
        if self._error is not None:
            raise self._error
        return self._engine

    def join(self, timeout: float) -> bool:
        """Block until the engine is closed, behind ``EngineLoop.stop``; not in the event loop. False: it is not yet."""
        return self._ended.wait(timeout)

    # --- in a thread of its own ---

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
        except BaseException as error:
            self._error = error
            self._ended.set()
            self._ready.set()
            return
        in_event_loop = self._engine_loop.in_event_loop = self._event_loop is not None and engine.short_steps
        if in_event_loop:
            self._engine_loop.on_command = self._request_turn
            self._request_turn()
        self._ready.set()
        if in_event_loop:
            return
        try:
            while not self._engine_loop.stopped:
                pause = self._engine_loop.advance(engine)
                if pause != 0:
                    self._engine_loop.run_command(engine, pause)
        except BaseException as error:
            self._on_error(error)
        finally:
            self._close()

    # --- in the event loop ---

    def _request_turn(self) -> None:
        """From any thread."""
        assert self._event_loop is not None
        if threading.get_ident() == self._loop_thread:
            self._turn_soon()
        else:
            self._event_loop.call_soon_threadsafe(self._turn_soon)

    def _turn_soon(self) -> None:
        if not self._scheduled:
            assert self._event_loop is not None
            self._scheduled = True
            self._event_loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Advance for a time slice, or until there is nothing to do."""
        self._loop_thread = threading.get_ident()
        self._scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        engine_loop, engine, event_loop = self._engine_loop, self._engine, self._event_loop
        assert event_loop is not None
        if self._ended.is_set():
            return
        until = time.perf_counter() + SLICE_S
        try:
            while not engine_loop.stopped:
                pause = engine_loop.advance(engine)
                if pause is None:
                    return
                if pause:
                    self._timer = event_loop.call_later(pause, self._turn_soon)
                    return
                if time.perf_counter() >= until:
                    self._turn_soon()
                    return
        except BaseException as error:
            self._on_error(error)
        self._close()

    # --- in either ---

    def _on_error(self, error: BaseException) -> None:
        log.error("engine_failed", error=repr(error), exc_info=True)
        self._failed(error)

    def _close(self) -> None:
        self._engine_loop.end()
        self._engine.close()
        self._ended.set()
