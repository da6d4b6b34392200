"""Our logits processors, and constraints, for TensorRT-LLM: ``SamplingParams.logits_processor``, as releases 1.x call
it.

Does not import TensorRT-LLM. Instances are pickled into the engine's processes, which log errors once per kind and
request; nothing there waits for the device.

TensorRT-LLM's own guided decoding begins each request at the beginning of its grammar. Where another worker began the
output, those tokens are part of the prompt here, so ``ConstraintProcessor`` follows them first.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.configs.settings import WorkerSettings
from penstock.schemas.requests import CONSTRAINT, Constraint, Stop
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, compiler
from penstock.workers.engines.constraints.token_mask import Matcher
from penstock.workers.engines.engine_protocol import RequestError, SequenceRequest
from penstock.workers.engines.logits import registry as flags
from penstock.workers.engines.logits.apply import ReadOnly, run
from penstock.workers.engines.logits.registry import Chain, ErrorCounter, ProcessorError, Registry


class TrtllmProcessor:
    """A chain as a single processor of TensorRT-LLM, for one request with one beam."""

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
        """Edit the logits in place, in the engine's CUDA stream.

        Args:
            logits: (beams, 1, vocab) on the engine's device.
            token_ids: prompt and generated tokens of each beam.
            stream_ptr: of the CUDA stream that computes the logits; None: the current one.
        """
        shape = tuple(logits.shape)
        if isinstance(req_id, Sequence) and len(req_id) != 1:
            self._log_error(f"a call for {len(req_id)} requests; one at a time is supported")
        elif len(shape) != 3 or shape[1] != 1:
            self._log_error(f"logits of shape {shape}; (1, 1, vocab) is supported")
        elif shape[0] != 1 or len(token_ids) != 1:
            self._log_error(f"{max(shape[0], len(token_ids))} beams; beam width 1 is supported")
        else:
            with _stream(stream_ptr):
                run(self._chain, ReadOnly(token_ids[0]), logits[0, 0])

    def _log_error(self, message: str) -> None:
        for name in self._chain.names:
            self._chain.errors.add(name, message, message)


def _stream(pointer: int | None) -> contextlib.AbstractContextManager[object]:
    """Have torch compute in this CUDA stream within the context."""
    if pointer is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer))  # type: ignore[no-untyped-call]


class TrtllmProcessors:
    """The ``processors`` of ``trtllm.from_settings``: from one of our sequences to its argument of SamplingParams.

    Args:
        configured: the worker's flags name processors, besides the examples.
    """

    def __init__(self, registry: Registry, *, configured: bool = False) -> None:
        self._registry = registry
        self.configured = configured
        self.names = registry.names  # for EngineInfo.logits_processors

    def without(self, where: str) -> "TrtllmProcessors":
        """For an engine in a mode without logits processors: requests for any are refused.

        Raises:
            ProcessorError: the worker's flags name some.
        """
        if self.configured:
            raise ProcessorError(
                f"TensorRT-LLM runs no logits processors {where}; remove --logits-processor and "
                "--default-logits-processors"
            )
        return TrtllmProcessors(Registry())

    def __call__(self, request: SequenceRequest) -> TrtllmProcessor | None:
        """The ``logits_processor`` of the request's SamplingParams.

        Raises:
            RequestError: a name is not registered, or a constructor refuses its arguments.
        """
        chain = self._registry.chain(request)
        return None if chain is None else TrtllmProcessor(chain)


def from_settings(settings: WorkerSettings, path: Path) -> TrtllmProcessors:
    """The processors in the flags of a TensorRT-LLM worker; with disaggregated serving, requests for any are refused.

    Raises:
        ProcessorError: see ``Registry``; or the flags name some in disaggregated serving.
        modeldir.ModelError: the directory cannot be used.
    """
    processors = TrtllmProcessors(flags.registry_from_settings(settings, path), configured=_configured(settings))
    return processors if settings.role == "aggregated" else processors.without("in disaggregated serving")


def _configured(settings: WorkerSettings) -> bool:
    return bool(settings.logits_processor or settings.default_logits_processors)


_compilers: dict[Path, ConstraintCompiler] = {}  # of this process


class ConstraintProcessor:
    """Implements ``penstock.workers.engines.logits.registry.BaseLogitsProcessor``.

    Args:
        path: of the model.
        prompt_len: tokens of the client's prompt; what follows is output.
    """

    def __init__(self, path: Path, constraint: Constraint, prompt_len: int, stop: Stop) -> None:
        self._arguments = path, constraint, prompt_len, stop
        self._matcher: Matcher | None = None

    def __call__(self, input_ids: Sequence[int], logits: Tensor) -> None:
        if self._matcher is None:
            path, constraint, prompt_len, stop = self._arguments
            self._matcher = _compiler(path).matcher(constraint, prompt_len, stop)
        self._matcher.follow(input_ids)
        bits = torch.frombuffer(self._matcher.mask(), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: len(logits)].bool()
        logits.masked_fill_(~allowed.to(logits.device), float("-inf"))


class Continuing:
    """From a sequence that another worker began to its argument of SamplingParams.

    Args:
        path: of the model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._errors = ErrorCounter()

    def __call__(self, request: SequenceRequest) -> TrtllmProcessor:
        assert request.constraint is not None
        processor = ConstraintProcessor(self._path, request.constraint, len(request.prompt), request.stop)
        return TrtllmProcessor(Chain((CONSTRAINT,), (processor,), self._errors))


def _compiler(path: Path) -> ConstraintCompiler:
    if path not in _compilers:
        found = compiler(path)
        if found is None:
            raise RequestError("unsupported", "the engine's processes have no llguidance")
        _compilers[path] = found
    return _compilers[path]
