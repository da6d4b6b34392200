"""The same processors as TensorRT-LLM calls them: ``SamplingParams.logits_processor``, signature of its 1.x releases.

Names no TensorRT-LLM: its calls are told apart by their arguments. The instance is pickled into the engine's processes,
so faults are told in their logs, once for each kind and request; nothing there waits for the device.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.settings import WorkerSettings
from workers.engines.base import SequenceRequest
from workers.engines.logits import flags
from workers.engines.logits.apply import Chain, ReadOnly, run
from workers.engines.logits.registry import ProcessorError, Registry


class TrtllmProcessor:
    """A chain as one processor of TensorRT-LLM; for one request with one beam."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def __call__(
        self,
        req_id: int | Sequence[int],
        logits: Tensor,
        token_ids: Sequence[Sequence[int]],
        stream_ptr: int | None,
        client_id: int | None = None,
    ) -> None:
        """Edit in place, in the engine's stream.

        Args:
            logits: (beams, 1, vocab) on the engine's device.
            token_ids: of each beam prompt, then everything generated.
            stream_ptr: of the CUDA stream that computes the logits; None: the current one.
        """
        shape = tuple(logits.shape)
        if isinstance(req_id, Sequence) and len(req_id) != 1:
            self._tell(f"a call for {len(req_id)} requests; one at a time is supported")
        elif len(shape) != 3 or shape[1] != 1:
            self._tell(f"logits of shape {shape}; (1, 1, vocab) is supported")
        elif shape[0] != 1 or len(token_ids) != 1:
            self._tell(f"{max(shape[0], len(token_ids))} beams; beam width 1 is supported")
        else:
            with _stream(stream_ptr):
                run(self._chain, ReadOnly(token_ids[0]), logits[0, 0])

    def _tell(self, what: str) -> None:
        for name in self._chain.names:
            self._chain.faults.add(name, what, what)


def _stream(pointer: int | None) -> contextlib.AbstractContextManager[object]:
    """Inside, torch computes in this CUDA stream."""
    if pointer is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer))  # type: ignore[no-untyped-call]


class TrtllmProcessors:
    """The ``processors`` of ``trtllm.from_settings``: from one of our sequences to what goes into SamplingParams.

    Args:
        asked: the worker's flags name some, besides the examples.
    """

    def __init__(self, registry: Registry, *, asked: bool = False) -> None:
        self._registry = registry
        self._asked = asked
        self.names = registry.names  # for EngineInfo.logits_processors

    def none(self, where: str) -> "TrtllmProcessors":
        """For an engine that runs in a way in which TensorRT-LLM has none: requests for any are refused.

        Raises:
            ProcessorError: the operator had asked for some.
        """
        if self._asked:
            raise ProcessorError(
                f"TensorRT-LLM has no logits processors {where}; leave out --logits-processor and "
                "--default-logits-processors"
            )
        return TrtllmProcessors(Registry())

    def __call__(self, request: SequenceRequest) -> TrtllmProcessor | None:
        """What goes into the request's SamplingParams.

        Raises:
            RequestError: a name is not registered, or a constructor refuses its arguments.
        """
        chain = self._registry.chain(request)
        return None if chain is None else TrtllmProcessor(chain)


def from_settings(settings: WorkerSettings, path: Path) -> TrtllmProcessors:
    """What the flags of a TensorRT-LLM worker ask for. In disaggregated serving it has none, and requests for any are
    refused.

    Raises:
        ProcessorError: see ``Registry``; or there are some in disaggregated serving.
        modeldir.ModelError: the directory cannot be used.
    """
    made = TrtllmProcessors(flags.from_settings(settings, path), asked=_asked(settings))
    return made if settings.role == "aggregated" else made.none("in disaggregated serving")


def _asked(settings: WorkerSettings) -> bool:
    return bool(settings.logits_processor or settings.default_logits_processors)
