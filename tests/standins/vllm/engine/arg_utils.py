"""As ``vllm.engine.arg_utils``: the arguments, of which the stand-in heeds the few that its engine has a use for."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from tensorrt_llm._standin.model import load
from vllm._standin.fields import FIELDS
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.platforms import current_platform

_DEFAULTS = {
    "model": "Qwen/Qwen3-0.6B",
    "skip_tokenizer_init": False,
    "enable_mm_embeds": False,
    "enable_sleep_mode": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "disable_log_stats": False,
    "enable_log_requests": False,
    "dtype": "auto",
    "max_logprobs": 20,
    "stream_interval": 1,
}
_Fields: Any = dataclasses.make_dataclass(
    "_Fields", [(name, Any, dataclasses.field(default=_DEFAULTS.get(name))) for name in FIELDS]
)


class AsyncEngineArgs(_Fields):  # type: ignore[misc]
    """A dataclass: an unknown keyword is a TypeError."""

    def create_engine_config(self, usage_context: object = None, headless: bool = False) -> VllmConfig:
        model = load(Path(self.model))
        length = self.max_model_len or model.max_positions
        if length > model.max_positions and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
            raise ValueError(f"User-specified max_model_len ({length}) is greater than the derived max_model_len")
        if not self.skip_tokenizer_init and not (Path(self.model) / "tokenizer.json").is_file():
            raise OSError(f"Can't load tokenizer for {self.model!r}")
        cpu = current_platform.is_cpu()
        if cpu and self.enable_sleep_mode:
            raise ValueError("Sleep mode is not supported on current platform.")
        size = self.block_size or (128 if cpu else 16)
        if size < 1:
            raise ValueError("block_size: Input should be greater than 0")
        if any(key.startswith("mamba") for key in json.loads((Path(self.model) / "config.json").read_text())):
            size = max(size, 1056)
            if 0 < (self.long_prefill_token_threshold or 0) < size:
                raise AssertionError(f"long_prefill_token_threshold must be at least the block size ({size})")
        seqs, tokens = self.max_num_seqs or 256, self.max_num_batched_tokens or 8192
        chunked = self.enable_chunked_prefill is not False
        if tokens < length and not chunked:
            raise ValueError(f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}).")
        if tokens < seqs:
            raise ValueError(f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}).")
        outputs = self.structured_outputs_config
        configs = (self.kv_transfer_config, self.kv_events_config, outputs)
        for given, kind in zip(configs, (KVTransferConfig, KVEventsConfig, StructuredOutputsConfig), strict=True):
            if given is not None and not isinstance(given, kind):
                raise ValueError(f"Input should be a dictionary or an instance of {kind.__name__}")
        caching = self.enable_prefix_caching is not False
        events = self.kv_events_config
        if events is not None and events.enable_kv_cache_events and not caching:
            raise ValueError("KV cache events need prefix caching")
        if cpu and self.kv_cache_memory_bytes is None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            raise AssertionError("0.92 of the machine's memory would be taken: no test may ask for that")
        lora = None
        if self.enable_lora:
            if self.max_lora_rank not in (1, 8, 16, 32, 64, 128, 256, 320, 512):
                raise ValueError(f"max_lora_rank ({self.max_lora_rank}) must be one of 1, 8, 16, ...")
            if self.max_cpu_loras < self.max_loras:
                raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras ({self.max_loras}).")
            lora = {"max_lora_rank": self.max_lora_rank}
        return VllmConfig(
            ModelConfig(
                self.model,
                length,
                self.max_logprobs,
                self.skip_tokenizer_init,
                self.logits_processors,
                self.enable_mm_embeds,
                self.enable_sleep_mode,
            ),
            CacheConfig(size, self.num_gpu_blocks_override or 2049, caching),
            SchedulerConfig(seqs, tokens),
            self.kv_transfer_config,
            events,
            outputs or StructuredOutputsConfig(),
            self._parallel(),
            lora,
        )

    def _parallel(self) -> ParallelConfig:
        world = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.nnodes > 1:
            if world % self.nnodes:
                raise ValueError(f"`--nnodes {self.nnodes}` must evenly divide the total world size ({world}).")
            if not 0 <= self.node_rank < self.nnodes:
                raise ValueError(f"`--node-rank` must be between 0 and {self.nnodes - 1}; got {self.node_rank}")
            if self.distributed_executor_backend not in (None, "mp"):
                raise ValueError("nnodes > 1 is only supported with the mp executor")
        return ParallelConfig(
            world, self.nnodes, self.node_rank, self.master_addr, self.master_port, self.distributed_timeout_seconds
        )


EngineArgs = AsyncEngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
