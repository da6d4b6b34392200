"""What bodies are prepared for: the model, and what holds where a client says nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.parsers.registry import ParserNames
from infra.model.modeldir import ModelDir


class PrepareContext(NamedTuple):
    """The model a body is prepared for, and what holds where the client says nothing.

    Attributes:
        names: what clients may call it; the first is canonical.
        gateway: whose token subject gets the answer.
        max_model_len: prompt + output in tokens, if the fleet's limit is below the model's; 0: the model's.
        revision: that serves now; "": no worker is known, and block names are made as the model directory says.
        max_images: images and embedding files per request.
        processors: logits processors that some worker has; None: no worker is known.
        parsers: of thoughts and tool calls in chats; None: the answers are text.
        plain: text of control tokens in messages stays text.
    """

    model: ModelDir
    names: Sequence[str]
    gateway: str
    block_size: int = 32
    default_max_tokens: int = 512
    default_deadline_s: float = 600.0
    max_model_len: int = 0
    revision: str = ""
    max_images: int = 16
    processors: frozenset[str] | None = None
    parsers: ParserNames | None = None
    plain: bool = True

    @property
    def limit(self) -> int:
        """Prompt + output, tokens."""
        own = self.model.max_model_len
        return min(own, self.max_model_len) if self.max_model_len else own
