"""As ``sglang.srt.managers.tokenizer_control_mixin``: what is asked of all schedulers."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.load_snapshot import LoadSnapshot


class TokenizerControlMixin:
    schedulers: list[Any]

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[LoadSnapshot]:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        return [each.load() for each in self.schedulers if dp_rank in (None, each.rank)]

    async def flush_cache(self, timeout_s: float | None = None) -> SimpleNamespace:
        self.auto_create_handle_loop()  # type: ignore[attr-defined]
        done = [each.flush() for each in self.schedulers]
        return SimpleNamespace(success=all(done))
