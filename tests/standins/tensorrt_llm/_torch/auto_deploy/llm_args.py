"""Arguments of AutoDeploy, read from the main line of early 2026; see section 1.7 of the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from tensorrt_llm.llmapi.llm_args import BaseLlmArgs, StrictBaseModel

REJECTED = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
    "build_config",
    "gpus_per_node",
)


class BuildConfig(StrictBaseModel):
    """Of TensorRT engines."""

    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192


class LlmArgs(BaseLlmArgs):
    build_config: BuildConfig | None = None
    model_factory: Literal["AutoModelForCausalLM", "AutoModelForImageTextToText"] = "AutoModelForCausalLM"
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    skip_loading_weights: bool = False
    world_size: int = Field(default=1, ge=0)
    runtime: Literal["trtllm", "demollm"] = "trtllm"
    mode: Literal["graph", "transformers"] = "graph"
    transforms: dict[str, Any] = Field(default_factory=dict)
    compile_backend: Literal["torch-simple", "torch-compile", "torch-cudagraph", "torch-opt"] = "torch-cudagraph"
    attn_backend: str = "flashinfer"
    device: str = "cuda"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    disable_overlap_scheduler: bool = False
    max_stats_len: int = 1000
    stream_interval: int = 1
    backend: str | None = "_autodeploy"

    @model_validator(mode="after")
    def _auto(self) -> LlmArgs:
        for name in REJECTED:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) != default:
                raise ValueError(f"{name} is not supported in AutoDeploy; use world_size or leave it out")
        if (self.max_beam_width or 1) > 1:
            raise ValueError("max_beam_width > 1 is not supported in AutoDeploy")
        if self.device != "cuda" or self.backend != "_autodeploy":
            raise ValueError("device and backend are fixed in AutoDeploy")
        self._world = max(1, self.world_size)
        return self
