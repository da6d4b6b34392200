"""What vLLM loads into its own processes (entry point ``vllm.general_plugins``).

vLLM begins each request at the beginning of its grammar. An answer that another worker began is part of the prompt
here, so its grammar is moved after those tokens before the first new one is drawn.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import msgspec

NAME = "penstock"  # of the entry point
ALLOWED = "VLLM_PLUGINS"  # names of the plugins that vLLM loads, comma-separated; not set: all
ACTIVE = "PENSTOCK_VLLM_PLUGIN"  # set for the engine's processes; elsewhere vLLM is left as it is
EARLIER = "penstock_earlier_tokens"  # in ``SamplingParams.extra_args``: the tokens of the answer so far
PROCESSORS = "PENSTOCK_VLLM_PROCESSORS"  # the worker's logits processors, for the engine's processes
PROCESSORS_OF = "penstock_logits_processors"  # in ``extra_args``: those of a request


class ChosenProcessors(msgspec.Struct, frozen=True, array_like=True):
    """The logits processors of a request, as JSON in ``extra_args``.

    Attributes:
        processors: name and arguments (JSON) of each, those of every request first.
        prompt_len: tokens of the client's prompt; an answer that continues has more in vLLM's.
    """

    processors: tuple[tuple[str, str], ...]
    prompt_len: int


def variables(current: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which the engine's processes load this plugin, also where a user names others."""
    found = {ACTIVE: "1"}
    if ALLOWED in current:  # then vLLM loads no other, not even with an empty list
        names = [name for name in current[ALLOWED].split(",") if name]
        found[ALLOWED] = ",".join(dict.fromkeys((*names, NAME)))
    return found


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
