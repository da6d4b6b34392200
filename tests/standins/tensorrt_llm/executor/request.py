from __future__ import annotations

import os
from dataclasses import dataclass

from tensorrt_llm._standin.variant import LATER


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


if LATER:

    @dataclass(slots=True, kw_only=True)
    class ConversationParams:
        conversation_id: str | None = None
