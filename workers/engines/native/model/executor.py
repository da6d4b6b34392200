"""Computes a planned step in plain torch: one packed batch, one forward pass, one draw per sampling sequence."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence, Sequence, scored_to
from penstock.workers.engines.native.model.adapters import SlotRows, TorchAdapters
from penstock.workers.engines.native.model.attention import Paged, ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.masks import TokenMasks
from penstock.workers.engines.native.model.model import Embeddings, Model
from penstock.workers.engines.native.model.pool import KvPool, device_errors
from penstock.workers.engines.native.model.pools import HybridAttention, SlidingPool, shown
from penstock.workers.engines.native.model.sampler import choose, score
from penstock.workers.engines.native.model.vision import TorchVisionEncoder


class StepSink(Protocol):
    """The other ranks of a group."""

    def send(self, plan: list[ScheduledSequence], tokens: list[int], wanted: list[int]) -> None:
        """Have them compute a step, as this one does now.

        Args:
            tokens: those of the plan, in its order, with proposed ones.
            wanted: rows whose logits are wanted.
        Raises:
            EngineError: one of them is gone.
        """


class TorchExecutor:
    """``Executor`` over a loaded model and a pool. Owns both; used from one thread.

    Args:
        encoder: the model's vision encoder, if any; owned by the engine.
        sliding: the pool of its sliding-window layers, if that is not ``pool``.
        adapters: the model's LoRA adapters, if it has any.
        others: the other ranks of a model that is split.
    Attributes:
        model, pool: None once it is closed.
    """

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        encoder: TorchVisionEncoder | None = None,
        sliding: SlidingPool | None = None,
        adapters: TorchAdapters | None = None,
        others: StepSink | None = None,
    ) -> None:
        self._others = others
        self.model: Model | None = model
        self.pool: KvPool | None = pool
        self._encoder = encoder
        self._sliding = sliding
        self._adapters = adapters
        self._masks = TokenMasks(model.vocab_size)

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        assert self.model is not None, "closed"
        with device_errors(), torch.inference_mode():
            return self._execute(plan, scoring)

    def _execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence]) -> list[Sampled]:
        assert self.model is not None
        assert self.pool is not None
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        drawing: list[Sequence] = []  # by row
        lengths: list[int] = []
        scored: list[int] = []  # rows of prompt tokens to be scored, at most ``Scheduler.max_scored_tokens``
        seen: list[tuple[int, int]] = []
        for scheduled in plan:
            end = scheduled.start + scheduled.count
            if scheduled.sequence.media:
                assert self._encoder is not None
                seen += media_rows(scheduled, len(tokens), self._encoder.slot_tokens)
            if scoring and scheduled in scoring:
                first = len(tokens) - scheduled.start - 1
                scored += range(first + scheduled.sequence.score, first + scored_to(scheduled))
            tokens += scheduled.sequence.tokens[scheduled.start : end]
            tokens += scheduled.sequence.draft
            positions += range(scheduled.start, end)
            if scheduled.samples:
                rows += range(len(tokens) - 1 - len(scheduled.sequence.draft), len(tokens))
                drawing += [scheduled.sequence] * (1 + len(scheduled.sequence.draft))
                lengths += range(end - len(scheduled.sequence.draft), end + 1)
        wanted = rows + scored or [0]
        if self._others is not None:
            self._others.send(plan, tokens, wanted)
        masks = self._masks.start(drawing)
        if self._adapters is not None:
            self._adapters.begin(_slot_rows(plan))
        inputs, places, last = (torch.tensor(n, device=self.model.device) for n in (tokens, positions, wanted))
        if self.model.media_positions is not None and any(each.sequence.media for each in plan):
            of = self.model.media_positions.of
            parts = [of(each.sequence, each.start, each.start + each.count) for each in plan]
            places = torch.cat(parts, 1).to(self.model.device)
        spans = _spans(plan, [scheduled.sequence.blocks for scheduled in plan])
        paged = paged_attention(self.pool, spans, self._sliding, self._sliding_spans(plan))
        logits = self.model.logits(inputs, places, last, paged, self._embeddings(seen) if seen else None)
        if scored:
            set_scores(logits[len(rows) :], scoring)
        if rows:  # copying the tokens to the host waits for the KV writes, too
            allowed = masks.allowed(self.model.device) if masks is not None else None
            return choose(logits[: len(rows)], drawing, lengths, allowed).sampled()
        if self.model.device.type == "cuda":  # blocks are named next, and other processes may read named blocks
            torch.cuda.synchronize(self.model.device)
        return []

    def _sliding_spans(self, plan: list[ScheduledSequence]) -> Iterator[TokenSpan]:
        return _spans(plan, [scheduled.sequence.rows for scheduled in plan])

    def _embeddings(self, seen: list[tuple[int, int]]) -> Embeddings:
        assert self.model is not None
        assert self._encoder is not None
        rows, places = (torch.tensor(column, device=self.model.device) for column in zip(*seen, strict=True))
        return Embeddings(rows, self._encoder.take(places))

    def memory(self) -> dict[str, Memory]:
        """The pool of KV blocks; none if each block is in two pools."""
        assert self.pool is not None, "closed"
        return shown(self.pool, self._sliding)

    def close(self) -> None:
        """Free weights and pool."""
        self.model = self.pool = self._encoder = self._sliding = self._adapters = None
        self._masks.close()


def paged_attention(
    pool: KvPool, spans: Iterable[TokenSpan], sliding: SlidingPool | None, sliding_spans: Iterable[TokenSpan]
) -> Paged:
    """The attention of a step over one pool, or over that of the sliding layers, too."""
    full = ReferenceAttention(pool, spans)
    if sliding is None:
        return full
    return HybridAttention(sliding.layers, full, ReferenceAttention(sliding.pool, sliding_spans))


def media_rows(scheduled: ScheduledSequence, row: int, size: int) -> Iterator[tuple[int, int]]:
    """Per placeholder token of a sequence: its row in the batch (from ``row`` on) and its row in the embedding pool.

    Args:
        size: tokens of a slot of the embedding pool.
    """
    end = scheduled.start + scheduled.count
    for span in scheduled.sequence.media:
        for at in range(max(span.position, scheduled.start), min(span.position + span.tokens, end)):
            part, offset = divmod(at - span.position, size)
            yield row + at - scheduled.start, span.slots[part] * size + offset


def set_scores(logits: Tensor, scoring: Seq[ScheduledSequence]) -> None:
    """Store the scores in the sequences of ``scoring``; ``logits``: (positions of all of them, vocab), in order."""
    at = 0
    for scheduled in scoring:
        sequence = scheduled.sequence
        tokens = sequence.tokens[sequence.score : scored_to(scheduled)]
        sequence.scores += score(logits[at : at + len(tokens)], tokens, sequence.sampling.prompt_logprobs or 0)
        at += len(tokens)


def _slot_rows(plan: list[ScheduledSequence]) -> Iterator[SlotRows]:
    row = 0
    for scheduled in plan:
        yield SlotRows(scheduled.sequence.adapter_slot, row, scheduled.count)
        row += scheduled.count


def _spans(plan: list[ScheduledSequence], tables: list[list[int]]) -> Iterator[TokenSpan]:
    row = 0
    for scheduled, table in zip(plan, tables, strict=True):
        yield TokenSpan(row, scheduled.start, scheduled.count, table)
        row += scheduled.count
