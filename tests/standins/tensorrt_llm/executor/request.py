from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm._standin.variant import LATER


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and (not self.lora_path or not Path(self.lora_path).exists()):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', got '{self.lora_ckpt_source}'")


if LATER:
    DEFAULT_REQUEST_PRIORITY = 0.5

    @dataclass(slots=True, kw_only=True)
    class ConversationParams:
        conversation_id: str | None = None
