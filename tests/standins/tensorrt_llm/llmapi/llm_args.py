"""Arguments of ``LLM``: sections 1.2 to 1.7 of the reference. Unknown keys are refused on every level."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from tensorrt_llm._standin.variant import LATER, LATEST, QUIRKS
from tensorrt_llm.lora_helper import LoraConfig


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_assignment=False)


class CapacitySchedulerPolicy(enum.StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(enum.StrEnum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class LoadFormat(enum.Enum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


if LATER:

    class DynamicBatchConfig(StrictBaseModel):
        enable_batch_size_tuning: bool = True
        enable_max_num_tokens_tuning: bool = False
        dynamic_batch_moving_average_window: int = 128

else:

    class DynamicBatchConfig(StrictBaseModel):  # type: ignore[no-redef]
        enable_batch_size_tuning: bool
        enable_max_num_tokens_tuning: bool
        dynamic_batch_moving_average_window: int


class SchedulerConfig(StrictBaseModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: int = 32
    if LATER:
        use_kv_cache_manager_v2: bool = False

    @field_validator("free_gpu_memory_fraction")
    @classmethod
    def _fraction(cls, value: float | None) -> float | None:
        if value is not None and not 0 <= value <= 1:
            raise ValueError("kv_cache_config.free_gpu_memory_fraction must be a float between 0 and 1")
        return value

    @field_validator("max_attention_window")
    @classmethod
    def _windows(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (not value or min(value) < 1):
            raise ValueError("kv_cache_config.max_attention_window must be a list of positive integers")
        return value

    @field_validator("max_gpu_total_bytes")
    @classmethod
    def _bytes(cls, value: int) -> int:
        if value < 0:
            raise ValueError("kv_cache_config.max_gpu_total_bytes must be non-negative")
        return value


class CacheTransceiverConfig(StrictBaseModel):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = Field(default=None, gt=0)
    kv_transfer_sender_future_timeout_ms: int | None = Field(default=1000, gt=0)


class CudaGraphConfig(StrictBaseModel):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False

    @model_validator(mode="after")
    def _sizes(self) -> CudaGraphConfig:
        if self.max_batch_size < 0:
            raise ValueError("cuda_graph_config.max_batch_size must be non-negative")
        if self.batch_sizes and self.max_batch_size and self.max_batch_size != max(self.batch_sizes):
            raise ValueError("cuda_graph_config.max_batch_size must be the largest of batch_sizes if both are given")
        return self


class AttentionDpConfig(StrictBaseModel):
    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class MoeConfig(StrictBaseModel):
    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "AUTO"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class TorchCompileConfig(StrictBaseModel):
    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = True
    max_num_streams: int = Field(default=1, ge=1)


class KvCacheConnectorConfig(StrictBaseModel):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class PeftCacheConfig(StrictBaseModel):
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1 << 30
    lora_prefetch_dir: str | None = None


class DecodingBaseConfig(StrictBaseModel):
    """Of speculation. ``decoding_type`` is no field: only instances and ``from_dict`` say which kind it is."""

    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | Path | None = Field(default=None, alias="speculative_model_dir")
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False

    decoding_type: ClassVar[str] = ""
    backends: ClassVar[tuple[str, ...]] = ("pytorch",)
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @field_validator("draft_len_schedule")
    @classmethod
    def _schedule(cls, value: dict[int, int] | None) -> dict[int, int] | None:
        if value is not None and 1 not in value:
            raise ValueError("draft_len_schedule must include key 1")
        return value

    @model_validator(mode="after")
    def _first(self) -> DecodingBaseConfig:
        if self.draft_len_schedule is not None and self.draft_len_schedule[1] != self.max_draft_len:
            raise ValueError("draft_len_schedule[1] must equal max_draft_len")
        return self

    if not LATER:

        @classmethod
        def from_dict(cls, data: dict[str, Any]) -> DecodingBaseConfig:
            kind = data.pop("decoding_type", None)  # as the real one: out of the caller's own dict
            found = {each.decoding_type: each for each in _all(DecodingBaseConfig)}
            if kind not in found:
                raise ValueError(f"Invalid decoding type: {kind}")
            return found[kind](**data)

    def validate_engine(self) -> None:
        """What is checked once the engine's arguments are known."""


def _all(cls: type[DecodingBaseConfig]) -> list[type[DecodingBaseConfig]]:
    return [each for child in cls.__subclasses__() for each in (child, *_all(child))]


def _tag(kind: type[DecodingBaseConfig]) -> str:
    """In 1.3, where the tag is a field."""
    return {"DraftTarget": "Draft_Target", "UserProvided": "User_Provided"}.get(kind.decoding_type, kind.decoding_type)


class EagleDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "Eagle"
    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"

    def validate_engine(self) -> None:
        if not self.max_draft_len or self.max_draft_len < 1:
            raise ValueError("max_draft_len must be > 0 for Eagle")
        if self.speculative_model is None:
            raise ValueError("Path to EAGLE-3 weights must be specified: speculative_model")


if LATER:

    class Eagle3DecodingConfig(EagleDecodingConfig):
        decoding_type: ClassVar[str] = "Eagle3"


class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "MTP"
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799


class NGramDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "NGram"
    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True

    def validate_engine(self) -> None:
        if not self.max_draft_len or self.max_draft_len < 1 or self.max_matching_ngram_size < 1:
            raise ValueError("max_draft_len and max_matching_ngram_size must be > 0 for NGram")


class DraftTargetDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "DraftTarget"
    backends: ClassVar[tuple[str, ...]] = ("pytorch", "_autodeploy")

    def validate_engine(self) -> None:
        if not self.max_draft_len or self.max_draft_len < 1 or self.speculative_model is None:
            raise ValueError("max_draft_len and speculative_model must be given for DraftTarget")


class UserProvidedDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "UserProvided"
    drafter: Any = None
    resource_manager: Any = None


class AutoDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "AUTO"


class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "SaveState"
    output_directory: str = ""
    write_interval: int = 20
    file_prefix: str = "data"


class MedusaDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "Medusa"
    backends: ClassVar[tuple[str, ...]] = ("tensorrt",)
    medusa_choices: list[list[int]] | None = None
    num_medusa_heads: int | None = None


class LookaheadDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "Lookahead"
    backends: ClassVar[tuple[str, ...]] = ("tensorrt",)
    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4


class BaseSparseAttentionConfig(StrictBaseModel):
    algorithm: ClassVar[str] = ""
    seq_len_threshold: int | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BaseSparseAttentionConfig:
        kind = data.pop("algorithm", None)
        found = {each.algorithm: each for each in BaseSparseAttentionConfig.__subclasses__()}
        if kind not in found:
            raise ValueError(f"Invalid algorithm: {kind}")
        return found[kind](**data)


class RocketSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: ClassVar[str] = "rocket"
    window_size: int | None = 32
    kernel_size: int | None = 63
    topr: int | float | None = 128
    topk: int | None = 64
    prompt_budget: int | None = 2048
    page_size: int | None = 4
    kt_cache_dtype: str | None = None


class DeepSeekSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: ClassVar[str] = "dsa"
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    indexer_max_chunk_size: int | None = None
    skip_indexer_for_short_seqs: bool = True


class BaseLlmArgs(StrictBaseModel):
    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: dict[str, Any] | None = Field(default_factory=dict)
    load_format: LoadFormat = LoadFormat.AUTO
    fail_fast_on_attention_window_too_large: bool = False
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: Any = None
    speculative_config: Any = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    otlp_traces_endpoint: str | None = None
    backend: str | None = None
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None

    _world: int = PrivateAttr(default=1)

    @field_validator("load_format", mode="before")
    @classmethod
    def _format(cls, value: Any) -> Any:
        return LoadFormat[value.upper()] if isinstance(value, str) else value

    @field_validator("env_overrides", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return {str(key): str(each) for key, each in value.items()} if isinstance(value, dict) else value

    @field_validator("speculative_config")
    @classmethod
    def _speculation(cls, value: Any) -> Any:
        if LATER and isinstance(value, dict):  # a union whose tag decides
            fields = dict(value)
            kind = fields.pop("decoding_type", None)
            found = {_tag(each): each for each in _all(DecodingBaseConfig)}
            if kind not in found:
                raise ValueError(
                    f"Input tag {kind!r} found using 'decoding_type' does not match any of {sorted(found)}"
                )
            return found[kind](**fields)
        if value is not None and not isinstance(value, DecodingBaseConfig):
            raise ValueError("speculative_config must be an instance of a decoding config (the union has no tag)")
        return value

    @field_validator("sparse_attention_config")
    @classmethod
    def _sparse(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, BaseSparseAttentionConfig):
            raise ValueError("sparse_attention_config must be an instance of a sparse attention config")
        return value

    @model_validator(mode="after")
    def _whole(self) -> BaseLlmArgs:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        self._world = self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        if self.speculative_config is not None:
            kind = "_autodeploy" if self.backend == "_autodeploy" else "pytorch"
            if kind not in self.speculative_config.backends:
                raise ValueError(f"Speculation type {self.speculative_config.decoding_type} is not for back end {kind}")
            self.speculative_config.validate_engine()
        return self

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> BaseLlmArgs:
        unknown = [key for key in kwargs if key not in cls.model_fields]
        if unknown:
            raise ValueError(f"{cls.__name__} got invalid argument: {', '.join(unknown)}")
        return cls(**kwargs)


class TorchLlmArgs(BaseLlmArgs):
    enable_layerwise_nvtx_marker: bool = False
    ray_worker_extension_cls: str | None = None
    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    attn_backend: str = "TRTLLM"
    if not LATEST:  # with 1.4 goes the choice
        sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    perf_metrics_max_requests: int = 0
    max_stats_len: int = 1000
    batch_wait_timeout_ms: float = Field(default=0, ge=0)
    batch_wait_timeout_iters: int = Field(default=0, ge=0)
    batch_wait_max_tokens_ratio: float = Field(default=0, ge=0, le=1)
    stream_interval: int = Field(default=1, ge=1)
    torch_compile_config: TorchCompileConfig | None = None
    enable_autotuner: bool = True
    enable_min_latency: bool = False
    force_dynamic_quantization: bool = False
    disable_flashinfer_sampling: bool = False
    allreduce_strategy: Literal[
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"
    ] = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: KvCacheConnectorConfig | None = None
    mm_encoder_only: bool = False
    enable_sleep: bool = False

    @field_validator("backend")
    @classmethod
    def _backend(cls, value: str | None) -> str | None:
        if value not in (None, "pytorch"):
            raise ValueError(f"the PyTorch LLM does not take backend={value!r}")
        return value

    @model_validator(mode="after")
    def _stats(self) -> TorchLlmArgs:
        if self.enable_iter_req_stats and not self.enable_iter_perf_stats:
            raise ValueError("enable_iter_req_stats needs enable_iter_perf_stats")
        return self


def visible_gpus() -> int:
    return QUIRKS.gpus
