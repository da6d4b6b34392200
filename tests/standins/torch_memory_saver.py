"""As ``torch_memory_saver``, which SGLang needs to free memory: it is there."""
