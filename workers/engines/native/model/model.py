"""A loaded model: its forward pass over packed tokens, and the shape of its KV cache."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.pool import KvShape


class UnsupportedModel(EngineError):
    """This model cannot be served here; the text says what to change."""


class Embeddings(NamedTuple):
    """Replaces the token embeddings of some rows of a batch."""

    rows: Tensor  # (n,) int64, of the batch
    values: Tensor  # (n, hidden) in the model's dtype


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. ``forward`` is transformers' own; tokens of all sequences are packed into one row."""

    forward: Any  # (input_ids or inputs_embeds, position_ids, use_cache, logits_to_keep, paged) -> with ``logits``
    shape: KvShape
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    heads: int  # query heads of every layer
    multimodal: bool = False  # ``forward`` includes a vision tower
    most_positions: int = 0  # that a user may ask for, beyond ``max_positions``
    windows: tuple[int | None, ...] = ()  # of each layer: tokens that a query attends to, itself included; None: all

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        paged: attention.Paged,
        embeddings: Embeddings | None = None,
    ) -> Tensor:
        """Run the model over one packed batch.

        Args:
            tokens, positions: (tokens,) int64.
            rows: (n,) int64, those whose logits are wanted; None: all.
        Returns: (n, vocab_size) in the model's dtype.
        """
        token_ids = tokens.unsqueeze(0)
        if embeddings is None:
            inputs = {"input_ids": token_ids}
        else:
            embedded = self.forward.get_input_embeddings()(token_ids)
            embedded[0, embeddings.rows] = embeddings.values
            inputs = {"inputs_embeds": embedded}
        output = self.forward(
            **inputs,
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits
