from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm._standin.variant import LATER

TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """What crosses between the phases of one request; see section 4.1 of the reference."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def get_request_type(self) -> str:
        if self.request_type is None:
            raise ValueError("Unknown request type: None")
        return self.request_type

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in TYPES:
                raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {', '.join(TYPES)}")
        handles = self.multimodal_embedding_handles
        if handles is not None:
            assert len(handles) > 0, "multimodal_embedding_handles must not be empty"
            if self.multimodal_hashes is not None:
                assert len(self.multimodal_hashes) == len(handles), "one hash per embedding handle"
                assert all(len(words) == 8 for words in self.multimodal_hashes), "hashes are 8 int32 words"
        both = (self.mrope_position_ids_handle is None, self.mrope_position_deltas_handle is None)
        assert both[0] == both[1], "both mrope handles or neither"


if LATER:
    _Older = DisaggregatedParams

    @dataclass(slots=True, kw_only=True)
    class DisaggregatedParams(_Older):  # type: ignore[no-redef]
        disagg_request_id: int | None = None
        ctx_dp_rank: int | None = None
        ctx_info_endpoint: str | None = None
        schedule_style: str | None = None
        conversation_id: str | None = None
        first_gen_log_probs: list[Any] | None = None
        first_gen_logits: Any = None
