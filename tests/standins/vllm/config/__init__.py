"""As ``vllm.config``: the configurations that adapters write, and what they read of the rest."""

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

ROLES = ("kv_producer", "kv_both", "kv_consumer")


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_role: str | None = None
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"

    def __post_init__(self) -> None:
        if self.engine_id is None:
            self.engine_id = str(uuid.uuid4())
        if self.kv_role is not None and self.kv_role not in ROLES:
            raise ValueError(f"Unsupported kv_role: {self.kv_role}. Supported roles are {ROLES}")
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError("Please specify kv_role when kv_connector is set")
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise ValueError("kv_load_failure_policy: Input should be 'recompute' or 'fail'")


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = None  # type: ignore[assignment]
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


@dataclass
class StructuredOutputsConfig:
    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False


@dataclass
class CacheConfig:
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


@dataclass
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass
class ModelConfig:
    model: str
    max_model_len: int
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    logits_processors: list[str] | None = None
    enable_mm_embeds: bool = False
    enable_sleep_mode: bool = False


@dataclass
class ParallelConfig:
    world_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    distributed_timeout_seconds: int | None = None


@dataclass
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    kv_transfer_config: KVTransferConfig | None
    kv_events_config: KVEventsConfig | None
    structured_outputs_config: StructuredOutputsConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    lora_config: dict[str, int] | None = None


__all__ = ["KVEventsConfig", "KVTransferConfig", "StructuredOutputsConfig", "VllmConfig"]
