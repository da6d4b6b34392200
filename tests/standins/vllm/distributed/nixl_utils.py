"""As ``vllm.distributed.nixl_utils``: NIXL's agent class, or None without the package ``nixl``."""

import os


def __getattr__(name: str) -> type | None:
    if name != "NixlWrapper":
        raise AttributeError(name)
    return None if os.environ.get("VLLM_STANDIN_NIXL") == "none" else object
