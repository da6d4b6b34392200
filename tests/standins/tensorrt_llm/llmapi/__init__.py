"""The names of ``llmapi`` that adapters look for."""

from tensorrt_llm._standin.variant import LATER
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import CacheTransceiverConfig, KvCacheConfig, TorchLlmArgs
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "TorchLlmArgs",
]

if LATER:
    from tensorrt_llm.executor.request import ConversationParams

    __all__ += ["ConversationParams"]
