"""Our logits processors as one of vLLM's own, which vLLM loads into its processes by the name of its class.

There it is vLLM's: it reads from a request's ``extra_args`` which of the worker's processors the request has chosen.
Calls that fail are logged there, once each kind, and undone.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor  # type: ignore[import-not-found, unused-ignore]

from penstock.configs.settings import WorkerSettings
from penstock.schemas.requests import LogitsProcessor
from penstock.workers.engines.logits.apply import ReadOnly, run
from penstock.workers.engines.logits.registry import Registry, registry_from_settings
from penstock.workers.engines.vllm.plugin import PROCESSORS, PROCESSORS_OF, ChosenProcessors

_decode = msgspec.json.Decoder(ChosenProcessors).decode


def registry(text: str) -> Registry:
    """The processors that the worker's flags name.

    Args:
        text: of the variable: the model's folder, ``--logits-processor`` and ``--default-logits-processors``.
    """
    path, chosen, defaults = msgspec.json.decode(text, type=tuple[str, tuple[str, ...], str])
    settings = WorkerSettings(logits_processor=chosen, default_logits_processors=defaults)
    return registry_from_settings(settings, Path(path))


class Processors(AdapterLogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Implements vLLM's interface, constructed while the engine starts."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._registry = registry(os.environ[PROCESSORS])

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], list[int], Tensor], Tensor] | None:
        """What edits the logits of one request; None: it has chosen none."""
        extra: Mapping[str, Any] = params.extra_args or {}
        if PROCESSORS_OF not in extra:
            return None
        chosen = _decode(extra[PROCESSORS_OF])
        selected = [LogitsProcessor(name, args.encode()) for name, args in chosen.processors]
        chain = self._registry.chain_of(selected, prompt_len=chosen.prompt_len)

        def edit(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            run(chain, ReadOnly([*prompt, *output]), logits)
            return logits

        return edit
