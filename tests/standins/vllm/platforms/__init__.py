"""As ``vllm.platforms``: what this build computes on. ``VLLM_STANDIN_PLATFORM=cuda`` makes it one for GPUs."""

import os


class CpuPlatform:
    def is_cpu(self) -> bool:
        return os.environ.get("VLLM_STANDIN_PLATFORM", "cpu") == "cpu"


current_platform = CpuPlatform()

__all__ = ["current_platform"]
