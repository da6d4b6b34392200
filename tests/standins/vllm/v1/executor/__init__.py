"""As ``vllm.v1.executor``."""
