from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm._standin.variant import LATER

if LATER:

    @dataclass(slots=True, kw_only=True)
    class ConversationParams:
        conversation_id: str | None = None
