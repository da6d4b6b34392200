"""The arguments of TensorRT-LLM 1.2.1: names, types, ranges and defaults, as in its API reference.

``rules`` check combinations. A default of None means that the engine chooses; the properties at the end give its
choice. Sections without a documented structure are passed on unchecked (``Free``).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Free = dict[str, Any]

TransceiverBackend = Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]
MoeBackend = Literal["AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"]
Policy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
Chunking = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the tree."""


class KvCacheConfig(Section, frozen=True, kw_only=True):
    enable_block_reuse: bool = True
    max_tokens: Positive | None = None
    free_gpu_memory_fraction: Fraction | None = 0.9  # of the free memory after the weights are loaded
    max_attention_window: Annotated[tuple[Positive, ...], Meta(min_length=1)] | None = None  # cyclic over layers
    sink_token_length: Count | None = None
    use_uvm: bool = False
    host_cache_size: Count | None = None  # bytes
    onboard_blocks: bool = True
    cross_kv_cache_fraction: Share | None = None
    secondary_offload_min_priority: Annotated[int, Meta(ge=0, le=100)] | None = None
    event_buffer_max_size: Count = 0  # events; 0: none
    attention_dp_events_gather_period_ms: Positive = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_gpu_total_bytes: Count = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: Positive = 32


class DynamicBatchConfig(Section, frozen=True, kw_only=True):
    """All three are required in 1.2.1."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: Positive


class SchedulerConfig(Section, frozen=True, kw_only=True):
    capacity_scheduler_policy: Policy = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Chunking | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class CacheTransceiverConfig(Section, frozen=True, kw_only=True):
    backend: TransceiverBackend | None = None  # None: no KV transfer
    max_tokens_in_buffer: Positive | None = None
    kv_transfer_timeout_ms: Positive | None = None  # None: no timeout
    kv_transfer_sender_future_timeout_ms: Positive = 1000


class CudaGraphConfig(Section, frozen=True, kw_only=True):
    batch_sizes: tuple[Positive, ...] | None = None
    max_batch_size: Count = 0  # 0: 128
    enable_padding: bool = False


class AttentionDpConfig(Section, frozen=True, kw_only=True):
    enable_balance: bool = False
    timeout_iters: Count = 50
    batching_wait_iters: Count = 10


class MoeLoadBalancer(Section, frozen=True, kw_only=True):
    num_slots: Positive
    initial_global_assignments: dict[int, tuple[Count, ...]] | None = None
    layer_updates_per_iter: Count = 0  # 0: the placement never changes


class MoeConfig(Section, frozen=True, kw_only=True):
    backend: MoeBackend = "AUTO"
    max_num_tokens: Positive | None = None
    load_balancer: MoeLoadBalancer | str | None = None  # str: a YAML file with the same keys
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class TorchCompileConfig(Section, frozen=True, kw_only=True):
    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: tuple[Positive, ...] | None = None
    enable_userbuffers: bool = True
    max_num_streams: Positive = 1


class KvConnectorConfig(Section, frozen=True, kw_only=True):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class Speculation(Section, frozen=True, kw_only=True, tag_field="decoding_type"):
    """What all kinds of speculative decoding share."""

    max_draft_len: Count | None = None
    max_total_draft_tokens: Count | None = None
    speculative_model: str | None = None
    speculative_model_dir: str | None = None  # the same under its older name
    max_concurrency: Count | None = None
    draft_len_schedule: dict[Positive, Count] | None = None
    load_format: str | None = None
    acceptance_window: Count | None = None
    acceptance_length_threshold: Annotated[float, Meta(ge=0)] | None = None
    allow_advanced_sampling: bool = False

    @property
    def draft_model(self) -> str | None:
        return self.speculative_model or self.speculative_model_dir

    @property
    def draft_tokens(self) -> int:
        """Tokens proposed per step."""
        return self.max_draft_len or 0


class Eagle(Speculation, frozen=True, kw_only=True, tag="Eagle"):
    """Covers EAGLE-3. The tree's settings are read from the main line: 1.2.1 does not draft trees yet."""

    eagle_choices: tuple[tuple[int, ...], ...] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: Positive | None = None  # spelled as the engine spells it
    num_eagle_layers: Positive | None = None
    max_non_leaves_per_layer: Positive | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"


class Mtp(Speculation, frozen=True, kw_only=True, tag="MTP"):
    num_nextn_predict_layers: Positive = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: Positive = 1
    relaxed_delta: Annotated[float, Meta(ge=0)] = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    begin_thinking_phase_token: Count = 128798
    end_thinking_phase_token: Count = 128799

    @property
    def draft_tokens(self) -> int:
        return self.num_nextn_predict_layers


class NGram(Speculation, frozen=True, kw_only=True, tag="NGram"):
    max_matching_ngram_size: Count = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class DraftTarget(Speculation, frozen=True, kw_only=True, tag="DraftTarget"):
    pass


class Auto(Speculation, frozen=True, kw_only=True, tag="AUTO"):
    pass


class Medusa(Speculation, frozen=True, kw_only=True, tag="Medusa"):
    """TensorRT engines only; known so that the rules can say so."""

    medusa_choices: tuple[tuple[int, ...], ...] | None = None
    num_medusa_heads: Positive | None = None


class Lookahead(Speculation, frozen=True, kw_only=True, tag="Lookahead"):
    """TensorRT engines only."""


AnySpeculation = Eagle | Mtp | NGram | DraftTarget | Auto | Medusa | Lookahead


class EngineArgs(Section, frozen=True, kw_only=True):
    """Keyword arguments of ``tensorrt_llm.LLM`` of the PyTorch backend."""

    model: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    load_format: Literal["auto", "AUTO", "dummy", "DUMMY", "vision_only", "VISION_ONLY"] | int = "auto"
    checkpoint_format: str | None = None
    backend: str | None = None
    # parallelism
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    context_parallel_size: Positive = 1
    gpus_per_node: Positive | None = None  # None: what rank 0 sees
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    attention_dp_config: AttentionDpConfig | None = None
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: tuple[Positive, ...] | None = None
    cp_config: Free = {}
    allreduce_strategy: str = "AUTO"
    orchestrator_type: Literal["rpc", "ray"] | None = None
    # limits
    max_batch_size: Positive | None = None  # per attention-DP rank
    max_num_tokens: Positive | None = 8192
    max_seq_len: Positive | None = None
    max_input_len: Positive | None = None
    max_beam_width: Positive | None = None
    enable_chunked_prefill: bool = False
    # memory and scheduling
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cache_transceiver_config: CacheTransceiverConfig | None = None
    kv_connector_config: KvConnectorConfig | None = None
    disable_overlap_scheduler: bool = False
    batch_wait_timeout_ms: Count = 0
    batch_wait_timeout_iters: Count = 0
    batch_wait_max_tokens_ratio: Share = 0.0
    stream_interval: Positive = 1
    enable_sleep: bool = False
    garbage_collection_gen0_threshold: Positive = 20000
    ray_worker_extension_cls: str | None = None
    enable_layerwise_nvtx_marker: bool = False
    # computing
    speculative_config: AnySpeculation | None = None
    sparse_attention_config: Free | None = None
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    torch_compile_config: TorchCompileConfig | None = None
    moe_config: MoeConfig = MoeConfig()
    attn_backend: str = "TRTLLM"
    sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    enable_autotuner: bool = True
    enable_min_latency: bool = False
    force_dynamic_quantization: bool = False
    disable_flashinfer_sampling: bool = False
    gather_generation_logits: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    mm_encoder_only: bool = False
    fail_fast_on_attention_window_too_large: bool = False
    # LoRA
    enable_lora: bool = False
    lora_config: Free | None = None
    peft_cache_config: Free | None = None
    # observing
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    max_stats_len: Positive = 1000
    iter_stats_max_iterations: Positive | None = None
    request_stats_max_iterations: Positive | None = None
    return_perf_metrics: bool = False
    perf_metrics_max_requests: Count = 0
    otlp_traces_endpoint: str | None = None
    num_postprocess_workers: Count = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    env_overrides: dict[str, str | int | float | bool] | None = None

    @property
    def gpus(self) -> int:
        """World size: GPUs of the engine, on all nodes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def batch_size(self) -> int:
        """Sequences per step and attention-DP rank."""
        return self.max_batch_size or 2048

    @property
    def beam_width(self) -> int:
        return self.max_beam_width or 1

    @property
    def moe_parallel(self) -> tuple[int, int]:
        """(tensor, expert) parallel sizes of the experts; what is not given is what is left of the tensor ranks."""
        ranks = self.tensor_parallel_size // max(1, self.moe_cluster_parallel_size or 1)
        tensor, expert = self.moe_tensor_parallel_size or -1, self.moe_expert_parallel_size or -1
        if tensor < 1 and expert < 1:
            return ranks, 1
        if tensor < 1:
            return max(1, ranks // expert), expert
        return tensor, expert if expert >= 1 else max(1, ranks // tensor)

    @property
    def attention_ranks(self) -> int:
        """Ranks that share one sequence's attention; the others of the tensor ranks work on other sequences."""
        return 1 if self.enable_attention_dp else self.tensor_parallel_size

    @property
    def draft_tokens(self) -> int:
        return self.speculative_config.draft_tokens if self.speculative_config else 0

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes with a CUDA graph, ascending; empty: none.

        Source: ``CudaGraphConfig._generate_cuda_graph_batch_sizes`` of the main line.
        """
        graphs = self.cuda_graph_config
        if graphs is None:
            return ()
        if graphs.batch_sizes:
            return tuple(sorted(set(graphs.batch_sizes)))
        largest = graphs.max_batch_size or 128
        sizes = [1, 2, 4, *range(8, 129, 8)] if graphs.enable_padding else [*range(1, 33), 64, 128]
        power = 256
        while power < largest:
            sizes.append(power)
            power *= 2
        return tuple(sorted({*(size for size in sizes if size <= largest), largest}))


class AutoDeployArgs(EngineArgs, frozen=True, kw_only=True):
    """Keyword arguments of the AutoDeploy backend (``backend: _autodeploy``)."""

    model_factory: str = "AutoModelForCausalLM"
    model_kwargs: Free = {}
    tokenizer_kwargs: Free = {}
    skip_loading_weights: bool = False
    world_size: Positive = 1  # instead of the parallel sizes
    runtime: Literal["trtllm", "demollm"] = "trtllm"
    mode: Literal["graph", "transformers"] = "graph"
    transforms: Free = {}
    compile_backend: str = "torch-cudagraph"

    @property
    def gpus(self) -> int:
        return self.world_size
