"""A stand-in for TensorRT-LLM's LLM API; see ``tests/standins`` and ``_standin/variant.py``. No GPU, no CUDA."""

from tensorrt_llm._standin.variant import VARIANT
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.mm_encoder import MultimodalEncoder
from tensorrt_llm.logger import logger
from tensorrt_llm.sampling_params import SamplingParams

__version__ = {"1.2.1": "1.2.1", "1.3": "1.3.0rc29", "1.4": "1.4.0rc2"}[VARIANT]

__all__ = ["LLM", "VARIANT", "MultimodalEncoder", "SamplingParams", "__version__", "logger"]
