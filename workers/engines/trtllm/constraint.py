"""A constraint as a logits processor of TensorRT-LLM, for outputs that another worker began.

TensorRT-LLM's own guided decoding begins each request at the beginning of its grammar, and those tokens are part of the
prompt here. This follows them first. It runs in the engine's processes and is pickled on its way there.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.schemas.requests import CONSTRAINT, Constraint, Stop
from penstock.workers.engines.base import RequestError, SequenceRequest
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, compiler
from penstock.workers.engines.constraints.matcher import Matcher
from penstock.workers.engines.logits.apply import Chain
from penstock.workers.engines.logits.error_counter import ErrorCounter
from penstock.workers.engines.trtllm.logits_processors import TrtllmProcessor

_compilers: dict[Path, ConstraintCompiler] = {}  # of this process


class ConstraintProcessor:
    """Implements ``penstock.workers.engines.logits.base.BaseLogitsProcessor``.

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
    """
    Raises:
        RequestError: llguidance is not installed in the engine's environment.
    """
    if path not in _compilers:
        found = compiler(path)
        if found is None:
            raise RequestError("unsupported", "the engine's processes have no llguidance")
        _compilers[path] = found
    return _compilers[path]
