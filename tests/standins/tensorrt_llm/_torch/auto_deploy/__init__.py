from tensorrt_llm._torch.auto_deploy.llm import LLM
from tensorrt_llm._torch.auto_deploy.llm_args import LlmArgs

__all__ = ["LLM", "LlmArgs"]
