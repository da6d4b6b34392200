"""The protocol of logits processors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import structlog

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Edits the logits of one sequence, in place. One instance per sequence.

    The constructor gets the request's ``args`` by keyword. It also gets those of the following that it has as
    parameters; requests cannot set them:

    - ``tokenizer``: the model's tokenizers.Tokenizer. Use it in the constructor, do not keep it (see below);
    - ``prompt_len``: how many tokens of ``input_ids`` are the prompt;
    - ``vocab_size``: width of the logits;
    - ``eos_token_ids``: the tokens that end an answer of this model.

    It runs in the engine thread, so it must be fast. For invalid arguments it raises ValueError or TypeError, and the
    request is refused with that message.

    An instance may keep what it derives from its arguments, but its edits must depend on ``input_ids`` only: a sequence
    that continues on another worker gets a new instance in the middle of its output. TensorRT-LLM pickles it, so its
    class must be importable there, without locks, sockets or device tensors before the first call. Each rank of a
    tensor-parallel group runs a copy.
    """

    def __call__(self, input_ids: Sequence[int], logits: "Tensor") -> None:
        """
        Args:
            input_ids: the prompt and all generated tokens; read-only.
            logits: (vocab,) of the next token, a view that is edited in place. Return values are ignored.
        """


log = structlog.get_logger("engine")


class ErrorCounter:
    """The failures of one engine. ``count``: calls that were undone."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[tuple[str, str]] = set()

    def add(self, name: str, kind: str, error: str) -> None:
        """Count a failure. ``kind`` decides whether it is logged, since the text may contain changing numbers."""
        self.count += 1
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            log.error("logits_processor_failed", processor=name, error=error, action="logits left as they were")
