"""Reads its level from the environment when it is imported; what is set there cannot be changed later."""

import logging
import os
from typing import Any

VARIABLE = "TLLM_LOG_LEVEL"
LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}


class Logger:
    def __init__(self) -> None:
        given = os.environ.get(VARIABLE)
        self._given = given is not None
        self.level = (given or "error").lower()
        self._logger = logging.getLogger("TRT-LLM")
        self._logger.propagate = False
        self._logger.setLevel(LEVELS[self.level])

    def warning(self, *words: Any) -> None:
        self._logger.warning(" ".join(["[TRT-LLM] [W]", *map(str, words)]))

    def set_level(self, level: str) -> None:
        if self._given:
            self.warning(f"the level comes from the environment; {level} is discarded")
            return
        self.level = level
        self._logger.setLevel(LEVELS[level])


logger = Logger()


def set_level(level: str) -> None:
    logger.set_level(level)
