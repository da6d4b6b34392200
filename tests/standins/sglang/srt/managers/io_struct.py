"""As ``sglang.srt.managers.io_struct``: what the engine sends to its schedulers, as far as adapters do."""

from typing import Any

import msgspec


class UpdateWeightFromDiskReqInput(msgspec.Struct, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True
    manifest: dict[str, Any] | None = None


class ReleaseMemoryOccupationReqInput(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqInput(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None
