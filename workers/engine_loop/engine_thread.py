"""The thread of an engine, apart from the event loop's: a step may take long."""

import threading
from collections.abc import Callable

import structlog

from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engines.engine_protocol import Engine

log = structlog.get_logger("engine")


class EngineThread:
    """Owns an engine from its construction to its end.

    Args:
        build: makes the engine, in a thread of its own.
        engine_loop: what is done with the engine.
        failed: called in the engine thread, once, when the engine is broken.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        engine_loop: EngineLoop,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._engine_loop = engine_loop
        self._failed = failed
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

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
        except BaseException as error:
            self._error = error
            self._ended.set()
            self._ready.set()
            return
        self._ready.set()
        try:
            while not self._engine_loop.stopped:
                pause = self._engine_loop.advance(engine)
                if pause != 0:
                    self._engine_loop.run_command(engine, pause)
        except BaseException as error:
            log.error("engine_failed", error=repr(error), exc_info=True)
            self._failed(error)
        finally:
            self._engine_loop.end()
            engine.close()
            self._ended.set()
