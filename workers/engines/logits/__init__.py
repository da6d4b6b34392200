"""Logits processors: code that edits the logits of one sequence before its next token is drawn.

A processor is any class with ``__call__(input_ids, logits)`` (``BaseLogitsProcessor``); the same class runs in the
native engine and, through ``trtllm_form``, in TensorRT-LLM. Workers register classes by name: the examples always,
others by ``--logits-processor name=module:Class``. Requests choose them by name, with arguments for the constructor::

    {"logits_processors": [{"name": "temperature", "args": {"temperature": 0.7}}]}

and ``--default-logits-processors`` (the same list) chooses for every request of a worker. No request ever names code.

Order, as in TensorRT-LLM: the model's logits; the processors, the worker's own first, then the request's in their
order; then everything else, as if the model itself had said what they left: log probabilities, bias, min_tokens,
penalties, temperature, min_p, top_k, top_p. What a processor excludes (minus infinity) stays excluded; stop tokens that
are all it left may come before min_tokens.

A processor that raises, or leaves nothing to draw from (no finite maximum), has not happened: the logits are as before
it, the others go on. That is counted (``penstock_worker_logits_errors``) and logged once for each kind of error.

What ``flags.from_settings`` returns goes to the engine. Only ``apply``, ``examples`` and ``trtllm_form`` import torch.
"""

from workers.engines.logits.base import BaseLogitsProcessor
from workers.engines.logits.registry import Facts, ProcessorError, Registry

__all__ = ["BaseLogitsProcessor", "Facts", "ProcessorError", "Registry"]
