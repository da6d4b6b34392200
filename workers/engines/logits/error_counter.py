"""Processors that went wrong: all counted, each kind logged once."""

import structlog

log = structlog.get_logger("engine")


class Faults:
    """Of one engine. ``count``: calls that had no effect."""

    def __init__(self) -> None:
        self.count = 0
        self._told: set[tuple[str, str]] = set()

    def add(self, name: str, kind: str, error: str) -> None:
        """One more. The text of an error may hold numbers that change: it is told apart by ``kind``."""
        self.count += 1
        if (name, kind) not in self._told:
            self._told.add((name, kind))
            log.error("logits_processor_failed", processor=name, error=error, action="logits left as they were")
