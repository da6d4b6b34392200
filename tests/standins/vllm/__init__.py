"""A stand-in for vLLM's V1 engine, made from the source of 0.32.0 and 0.33.0 (their wheels on PyPI): ``AsyncLLM`` with
its arguments, sampling parameters, outputs, KV events and NIXL handoff; see ``tests/standins``. No GPU, no CUDA.

It refuses unknown fields and whatever the real one is known to refuse, and drives a real small model.
``tests/standins/vllm_signatures.py`` compares it with the real package.
"""

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

__version__ = "0.33.0"

__all__ = ["AsyncEngineArgs", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]
