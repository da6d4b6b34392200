"""What vLLM loads into its own processes (entry point ``vllm.general_plugins``).

vLLM begins each request at the beginning of its grammar. An answer that another worker began is part of the prompt
here, so its grammar is moved behind those tokens before the first new one is drawn.
"""

import importlib
import os
from typing import Any

ACTIVE = "PENSTOCK_VLLM_PLUGIN"  # set for the engine's processes; elsewhere vLLM is left as it is
EARLIER = "penstock_earlier_tokens"  # in ``SamplingParams.extra_args``: the tokens of the answer so far


def register() -> None:
    """Called by vLLM once in each of its processes."""
    if not os.environ.get(ACTIVE):
        return
    manager_class = importlib.import_module("vllm.v1.structured_output").StructuredOutputManager
    create = manager_class._create_grammar
    if getattr(create, ACTIVE, False):
        return

    def create_behind(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        earlier = (request.sampling_params.extra_args or {}).get(EARLIER)
        if earlier and not grammar.accept_tokens(request.request_id, list(earlier)):
            raise ValueError("the tokens so far do not match the constraint")
        return grammar

    setattr(create_behind, ACTIVE, True)
    manager_class._create_grammar = create_behind
