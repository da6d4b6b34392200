"""Counts the failures of logits processors, and logs each kind once."""

import structlog

log = structlog.get_logger("engine")


class ErrorCounter:
    """The failures of one engine. ``count``: calls that were undone."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[tuple[str, str]] = set()

    def add(self, name: str, kind: str, error: str) -> None:
        """Count a failure. ``kind`` decides whether it is logged, since the text may contain changing numbers."""
        self.count += 1
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            log.error("logits_processor_failed", processor=name, error=error, action="logits left as they were")
