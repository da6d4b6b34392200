"""The processes of an SGLang engine: whether they still run, and what they do when one has ended.

SGLang would end the whole worker with SIGQUIT or SIGKILL as soon as a scheduler fails. Instead the worker looks after
them, gives its requests back, and exits in order.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from penstock.workers.engines.engine_protocol import EngineError


class Processes:
    """
    Args:
        llm: a ``sglang.Engine``. Its own watchdog, which raises SIGQUIT in this process, is stopped.
    """

    def __init__(self, llm: Any) -> None:
        self._pids: Collection[int] = sorted(llm.get_all_child_pids())
        stop_watchdog(llm)

    def check(self) -> None:
        """
        Raises:
            EngineError: one of them has ended.
        """
        for pid in self._pids:
            if not runs(pid):
                raise EngineError(f"a process of SGLang (pid {pid}: a scheduler or its detokenizer) has ended")


def stop_watchdog(llm: Any) -> None:
    watchdog = getattr(llm.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])
