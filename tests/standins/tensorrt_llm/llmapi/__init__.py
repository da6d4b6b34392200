"""The names of 1.2.1's ``llmapi`` that the reference lists."""

from tensorrt_llm._standin.variant import LATER
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    AttentionDpConfig,
    AutoDecodingConfig,
    BuildConfig,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    LlmArgs,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    MoeConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SaveHiddenStatesDecodingConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
    TrtLlmArgs,
    UserProvidedDecodingConfig,
)
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "AutoDecodingConfig",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LlmArgs",
    "LoRARequest",
    "LookaheadDecodingConfig",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "MoeConfig",
    "MultimodalEncoder",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SaveHiddenStatesDecodingConfig",
    "SchedulerConfig",
    "SchedulingParams",
    "TorchCompileConfig",
    "TorchLlmArgs",
    "TrtLlmArgs",
    "UserProvidedDecodingConfig",
]

if LATER:
    del BuildConfig
    from tensorrt_llm.executor.request import ConversationParams

    __all__ += ["ConversationParams"]
else:
    __all__ += ["BuildConfig"]
