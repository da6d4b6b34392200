"""What a logits processor is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Edits the logits of one sequence, in place. One instance per sequence.

    The constructor gets the request's ``args`` by keyword, and what it names of these, which no request can set:

    - ``tokenizer``: tokenizers.Tokenizer of the model. Encode in the constructor, do not keep it (see below);
    - ``prompt_len``: tokens of ``input_ids`` that are the prompt;
    - ``vocab_size``: width of the logits;
    - ``eos_token_ids``: what ends an answer of this model.

    It runs in the engine's thread, so it has to be quick, and raises ValueError or TypeError for arguments that it does
    not take: the request is refused with that text.

    An instance may keep what it derives from its arguments, but what it does must depend on ``input_ids`` only: a
    sequence that another worker goes on with, or the next stage of it, gets a new instance in the middle of its answer.
    TensorRT-LLM pickles it (its class has to be importable there: no locks, sockets or device tensors before the first
    call), and each rank of a tensor parallel group runs a copy.
    """

    def __call__(self, input_ids: Sequence[int], logits: "Tensor") -> None:
        """
        Args:
            input_ids: prompt, then everything generated. Read only.
            logits: (vocab,) of the next token, a view; edited in place. What is returned is ignored.
        """
