"""Speculation with a draft model: a small model of the same vocabulary that runs ahead of the target.

Its KV lies in a pool of its own under the target's block numbers, and it computes every token that the target computes,
so a block found in the prefix cache serves both. Blocks that another worker filled lack it: proposals after them are
worse, and the output stays exact. It draws with the target's noise, so that near distributions give the same token.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.native.model.attention import ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.eagle import head_config, load_head
from penstock.workers.engines.native.model.loading import load
from penstock.workers.engines.native.model.model import Model, UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import KvPool, device_errors
from penstock.workers.engines.native.model.sampler import choose


@dataclass(slots=True)
class DraftProgress:
    """Of one sequence since its last admission; kept in ``Sequence.drafter_state``."""

    blocks: list[int]  # those of the admission
    computed: int  # leading tokens whose KV is in the draft pool
    proposed: list[int]  # after ``computed``; all but the last of them are computed, too

    def settle(self, tokens: list[int]) -> None:
        """Keep the KV of proposals that were accepted."""
        for token in self.proposed[:-1]:
            if self.computed >= len(tokens) or tokens[self.computed] != token:
                break
            self.computed += 1
        self.proposed = []


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of one sequence from position ``start`` on, the last of them with a draw."""

    sequence: Sequence
    start: int
    tokens: list[int]


class DraftModel:
    """Implements ``penstock.workers.engines.core.engine.Drafter``. Owns model and pool."""

    def __init__(self, model: Model, pool: KvPool) -> None:
        self._model: Model | None = model
        self._pool: KvPool | None = pool

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        assert self._model is not None, "closed"
        with device_errors(), torch.inference_mode():
            return self._propose(plan, limits)

    def _propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in plan]
        progress = [progress_of(scheduled) for scheduled in plan]
        runs = []
        for scheduled, each in zip(plan, progress, strict=True):
            end = scheduled.start + scheduled.count
            runs.append(_Run(scheduled.sequence, each.computed, scheduled.sequence.tokens[each.computed : end]))
            each.computed = end
        left = list(range(len(plan)))  # by run: its number in the plan
        for count in range(1, max(limits, default=0) + 1):
            drawing = [run for run, number in enumerate(left) if limits[number] >= count]
            for run, token in zip(drawing, self._run(runs, drawing), strict=True):
                drafts[left[run]].append(token)
            left = [number for number in left if limits[number] > count]
            runs = [
                _Run(plan[number].sequence, plan[number].start + plan[number].count + count - 1, drafts[number][-1:])
                for number in left
            ]
        if not any(limits):
            self._run(runs, [])
        for each, draft in zip(progress, drafts, strict=True):
            each.proposed = list(draft)
        return drafts

    def _run(self, runs: list[_Run], drawing: list[int]) -> list[int]:
        """Compute all tokens, and draw one after each run of ``drawing``."""
        assert self._model is not None
        assert self._pool is not None
        tokens: list[int] = []
        positions: list[int] = []
        spans, ends = [], []
        for run in runs:
            spans.append(TokenSpan(len(tokens), run.start, len(run.tokens), run.sequence.blocks))
            tokens += run.tokens
            positions += range(run.start, run.start + len(run.tokens))
            ends.append(len(tokens) - 1)
        device = self._model.device
        rows = [ends[number] for number in drawing]
        inputs, places, wanted = (torch.tensor(n, device=device) for n in (tokens, positions, rows or [0]))
        logits = self._model.logits(inputs, places, wanted, ReferenceAttention(self._pool, spans))
        if not rows:
            return []
        drawn = [runs[number] for number in drawing]
        lengths = [run.start + len(run.tokens) for run in drawn]
        chosen: list[int] = choose(logits, [run.sequence for run in drawn], lengths).tokens.tolist()
        return chosen

    def close(self) -> None:
        """Free weights and pool."""
        self._model = self._pool = None


def progress_of(scheduled: ScheduledSequence) -> DraftProgress:
    """Of a scheduled sequence, before its tokens are computed."""
    sequence = scheduled.sequence
    progress = sequence.drafter_state
    if not isinstance(progress, DraftProgress) or progress.blocks is not sequence.blocks:
        progress = sequence.drafter_state = DraftProgress(sequence.blocks, scheduled.start, [])
    progress.settle(sequence.tokens)
    progress.computed = min(
        progress.computed, scheduled.start + scheduled.count - 1
    )  # the last token's logits are needed
    return progress


def load_draft(options: NativeOptions, target: Model) -> Model:
    """The draft model or EAGLE-3 head that the options name.

    Raises:
        UnsupportedModel: it is not one for this target, or cannot be loaded.
    """
    name = options.speculative_model
    if (written := head_config(name)) is not None:
        return load_head(name, written, target)
    draft = load(name, device=target.device, dtype=options.dtype)
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft model {name!r} has {draft.vocab_size} tokens, the model has {target.vocab_size}; a draft model "
            "needs the same tokenizer"
        )
    return draft
