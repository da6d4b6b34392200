"""The reference does not know whether 1.2.1 exports ``update_llm_args_with_extra_options`` from here, too."""

from tensorrt_llm._standin.variant import LATER

if LATER:
    from tensorrt_llm.llmapi.llm_args import update_llm_args_with_extra_options

    __all__ = ["update_llm_args_with_extra_options"]
