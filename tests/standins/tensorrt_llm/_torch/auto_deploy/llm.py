from __future__ import annotations

from typing import Any

from tensorrt_llm.llmapi.llm import LLM as TorchLLM


class LLM(TorchLLM):
    """The AutoDeploy back end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["backend"] = "_autodeploy"
        super().__init__(*args, **kwargs)
