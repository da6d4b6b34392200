"""A loaded model: its forward pass over packed tokens, and the shape of its KV cache."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.workers.engines.core.sequence import Sequence
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.native.model import attention
from penstock.workers.engines.native.model.parallel import RankGroup
from penstock.workers.engines.native.model.pool import KvShape

CAST = 1 << 20  # values of a weight that a CPU has as float32 at once: memory from 32 MiB on is mapped each time


class UnsupportedModel(EngineError):
    """This model cannot be served here; the text says what to change."""


class Embeddings(NamedTuple):
    """Replaces the token embeddings of some rows of a batch."""

    rows: Tensor  # (n,) int64, of the batch
    values: Tensor  # (n, hidden) in the model's dtype


class MediaPositions:
    """Positions of tokens by time, height and width, as models with M-RoPE rotate by them (Qwen2-VL).

    Those of text count on in all three. A medium's tokens have their places in its grid, and what follows begins
    after its longer side, in height and width. As ``get_rope_index`` of transformers computes them.

    Args:
        tokens_per_second: of a video, by which its steps in time are apart; None: by 1, whatever time is between them.
    """

    def __init__(self, tokens_per_second: float | None) -> None:
        self._rate = tokens_per_second

    def of(self, sequence: Sequence, start: int, end: int) -> Tensor:
        """Of a sequence's tokens from ``start`` to ``end``: (3, tokens) int64, on the CPU."""
        known, shift = self._prompt(sequence)
        parts = [known[:, start:end]] if start < known.shape[1] else []
        if end > known.shape[1]:
            parts.append(_counting(max(start, known.shape[1]) + shift, end + shift))
        return torch.cat(parts, 1)

    def shift(self, sequence: Sequence) -> int:
        """What is added to the number of a generated token."""
        return self._prompt(sequence)[1]

    def _prompt(self, sequence: Sequence) -> tuple[Tensor, int]:
        if not sequence.media:
            return _counting(0, 0), 0
        if sequence.positions is None:
            sequence.positions = self._computed(sequence)
        positions: tuple[Tensor, int] = sequence.positions  # type: ignore[assignment]
        return positions

    def _computed(self, sequence: Sequence) -> tuple[Tensor, int]:
        parts, token, place = [], 0, 0
        for span in sequence.media:
            text = span.position - token
            parts.append(_counting(place, place + text))
            place += text
            steps, rows, columns = span.grid
            # In float32, as transformers: the places of steps are rounded down.
            seconds = torch.tensor(span.seconds, dtype=torch.float32)
            apart = torch.tensor(1.0) if self._rate is None else self._rate * seconds
            axes = (torch.arange(steps) * apart).long(), torch.arange(rows), torch.arange(columns)
            parts.append(torch.stack([axis.reshape(-1) for axis in torch.meshgrid(*axes, indexing="ij")]) + place)
            token, place = span.position + span.tokens, place + max(rows, columns)
        parts.append(_counting(place, place + sequence.prompt_len - token))
        # Generated tokens count on, as the same tokens in a later prompt do: both can share blocks.
        return torch.cat(parts, 1), place - token


def _counting(start: int, end: int) -> Tensor:
    return torch.arange(start, end).expand(3, -1)


class OutputLayer(nn.Module):
    """A linear layer whose result, the logits, is float32: bfloat16 would round a logit of 20 to a multiple of 0.125.

    The product is of values of the model's dtype, and exact in float32, as its sums are.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return float32_product(x, self.weight, self.bias)


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a float32 result.

    Args:
        x: (..., in), weight: (out, in), bias: (out,), all of one dtype.
    """
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if x.is_cuda:
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    else:  # which have no such product
        parts = torch.split(weight, max(1, CAST // weight.shape[1]))
        out = torch.cat([F.linear(x.float(), part.float()) for part in parts], -1)
    return out if bias is None else out.add_(bias)


def widen_logits(model: Any) -> None:
    """Compute a model's logits in float32, of a split model also this rank's part."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(OutputLayer(head))
    elif isinstance(part := getattr(head, "lm_head", None), nn.Linear):
        head.lm_head = OutputLayer(part)


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
    heads: int  # query heads of every layer, of this rank
    multimodal: bool = False  # ``forward`` includes a vision tower
    most_positions: int = 0  # that a user may ask for, beyond ``max_positions``
    media_positions: MediaPositions | None = None  # None: a token's position is its number
    windows: tuple[int | None, ...] = ()  # of each layer: tokens that a query attends to, itself included; None: all
    expanded: tuple[int, int] = (0, 0)  # sizes of a head's key and value that are made of latents
    group: RankGroup | None = None  # the ranks over which it is split; None: it is whole

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        paged: attention.Paged,
        embeddings: Embeddings | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the model over one packed batch.

        Args:
            tokens: (tokens,) int64.
            positions: likewise, or (3, tokens) of ``MediaPositions``.
            rows: (n,) int64, those whose logits are wanted; None: all.
            hidden: (tokens, hidden), of an ``EagleHead`` only.
        Returns: (n, vocab_size) float32; of an ``EagleHead`` in the model's dtype.
        """
        token_ids = tokens.unsqueeze(0)
        if embeddings is None:
            inputs = {"input_ids": token_ids}
        else:
            embedded = self.forward.get_input_embeddings()(token_ids)
            embedded[0, embeddings.rows] = embeddings.values
            inputs = {"inputs_embeds": embedded}
        if hidden is not None:
            inputs["hidden"] = hidden
        output = self.forward(
            **inputs,
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits
