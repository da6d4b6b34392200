"""Reads what TensorRT-LLM logs through Python, and says what it means (``symptoms``)."""

import logging
import time
from collections.abc import Callable

import structlog

from workers.engines.trtllm.symptoms import Detector

log = structlog.get_logger("engine")

LOGGERS = ("TRT-LLM", "tensorrt_llm")


class Watch(logging.Handler):
    """One diagnosis event per kind of trouble and minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._detector = Detector()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        found = self._detector.line(record.getMessage(), self._clock())
        if found is not None:
            log.error("engine_diagnosis", code=found.code, advice=found.advice)

    def attach(self) -> Callable[[], None]:
        """Start; call what it returns to stop."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

        def detach() -> None:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(self)

        return detach
