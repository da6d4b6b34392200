"""Logits processors: code that edits the logits of one sequence before its next token is drawn.

A processor is any class with ``__call__(input_ids, logits)`` (``BaseLogitsProcessor``). The same class runs in the
native engine and, through ``trtllm.logits_processors``, in TensorRT-LLM. A worker registers classes by name: the
examples always, others with ``--logits-processor name=module:Class``. A request selects them by name, with constructor
arguments::

    {"logits_processors": [{"name": "temperature", "args": {"temperature": 0.7}}]}

and ``--default-logits-processors`` (a list of the same form) applies to every request of a worker. A request never
names code.

Order, as in TensorRT-LLM: the model's logits; the worker's default processors, then the request's, in the given order;
then everything else, as if the model had returned the edited logits: log probabilities, bias, min_tokens, penalties,
temperature, min_p, top_k, top_p. A token that a processor excludes (minus infinity) stays excluded. If it leaves only
stop tokens, one of them may be drawn before min_tokens.

A processor that raises, or leaves no token to draw (no finite maximum), is undone: the logits are restored and the
other processors still run. ``penstock_worker_logits_errors_total`` counts this, and each kind of error is logged once.

``registry_from_settings`` returns the registry for the engine. Only ``apply``, ``examples`` and
``trtllm.logits_processors`` import torch.
"""

from penstock.workers.engines.logits.registry import BaseLogitsProcessor, ModelInfo, ProcessorError, Registry

__all__ = ["BaseLogitsProcessor", "ModelInfo", "ProcessorError", "Registry"]
