"""How one planned step is computed: slots packed into one batch, one forward pass, one draw per finished slot."""

from collections.abc import Iterator

import torch

from workers.engines.base import EngineError
from workers.engines.core.sequence import Sampled, Slot
from workers.engines.native.attention import ReferenceAttention, Span
from workers.engines.native.model import Model
from workers.engines.native.pool import Pool
from workers.engines.native.sampler import sample


class TorchExecutor:
    """``Executor`` over a loaded model and a pool. Owns both; used from one thread."""

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model: Model | None = model
        self._pool: Pool | None = pool

    def execute(self, plan: list[Slot]) -> list[Sampled]:
        assert self._model is not None, "closed"
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except torch.OutOfMemoryError as error:
            raise EngineError(out_of_memory(error)) from error
        except RuntimeError as error:  # torch has no narrower type for a lost device or a full host
            if "allocate memory" in str(error):
                raise EngineError(out_of_memory(error)) from error
            raise EngineError(f"the step failed on {self._model.device}: {error}") from error

    def _execute(self, plan: list[Slot]) -> list[Sampled]:
        assert self._model is not None
        assert self._pool is not None
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for slot in plan:
            end = slot.start + slot.count
            tokens += slot.sequence.tokens[slot.start : end]
            positions += range(slot.start, end)
            if slot.samples:
                rows.append(len(tokens) - 1)
        inputs, places, last = (torch.tensor(n, device=self._model.device) for n in (tokens, positions, rows or [0]))
        logits = self._model.logits(inputs, places, last, ReferenceAttention(self._pool, _spans(plan)))
        return sample(logits, [slot.sequence for slot in plan if slot.samples]) if rows else []

    def close(self) -> None:
        """Give weights and pool back."""
        self._model = self._pool = None


def _spans(plan: list[Slot]) -> Iterator[Span]:
    row = 0
    for slot in plan:
        yield Span(row, slot.start, slot.count, slot.sequence.blocks)
        row += slot.count


def out_of_memory(error: Exception) -> str:
    return (
        "out of memory: lower max_batched_tokens (activations), max_running (logits) or kv_blocks (the pool) "
        f"({str(error).strip().splitlines()[0]})"
    )
