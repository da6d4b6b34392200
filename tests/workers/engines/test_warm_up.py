"""No client waits for an engine's first request: it was made before there was an engine to register."""

import functools
from typing import Any

import pytest

from tests.workers.engines.contract import MODEL, SUBJECTS


def test_vllm_has_answered_once_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    (subject,) = [subject for subject in SUBJECTS if subject.name == "vllm"]
    if subject.real:
        pytest.skip("what the real one is asked is not ours to replace")
    asked: list[str] = []
    with subject.present():
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found, unused-ignore]

        real = AsyncLLM.generate

        @functools.wraps(real)
        def generate(self: Any, prompt: Any, params: Any, request_id: str, **more: Any) -> Any:
            asked.append(request_id)
            return real(self, prompt, params, request_id, **more)

        monkeypatch.setattr(AsyncLLM, "generate", generate)
        engine = subject.make(subject.settings(), MODEL)
        try:
            assert asked == ["penstock-warm-up"]
            assert not engine.has_work()
        finally:
            engine.close()
