"""Speculation with a draft model on CUDA: its steps follow each other on the device, without waiting for tokens."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from penstock.workers.engines.core.sequence import PendingStep, ScheduledSequence, Sequence
from penstock.workers.engines.native.cuda.copies import Upload, new_event
from penstock.workers.engines.native.cuda.executor import CudaExecutor, batch_sizes
from penstock.workers.engines.native.cuda.packing import TableRow
from penstock.workers.engines.native.cuda.prompt_graphs import CAPTURE
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.draft import progress_of
from penstock.workers.engines.native.model.eagle import AuxiliaryStates, HeadRun, HeadRuns
from penstock.workers.engines.native.model.pool import device_errors

log = structlog.get_logger("engine")

ALIGN = 16
PADDING = -1  # position of a row that computes nothing


class DraftRow(NamedTuple):
    """A sequence that is drafted.

    Attributes:
        start: position of the token that the executor has sampled last for this sequence.
        steps: tokens to propose after it.
    """

    sequence: Sequence
    table_row: TableRow
    start: int
    steps: int


class DraftLoop:
    """Runs up to ``steps`` steps of ``executor``'s model without the host. Not thread-safe.

    Args:
        executor: its graphs must have been captured; its last step must have sampled a token for each row.
        rows: maximum number of sequences.
    """

    def __init__(self, executor: CudaExecutor, rows: int, steps: int) -> None:
        self._executor, self._steps = executor, steps
        self._width = width = -(-rows // ALIGN) * ALIGN
        device = executor.device
        # table rows, targets, temperatures, then positions of each step, then keys (two integers) of each step
        self._upload = Upload((3 + 3 * steps) * width + ALIGN, device)
        self._unknown = torch.full((width,), -1, dtype=torch.int32, device=device)
        self._sampled = torch.zeros((steps, width), dtype=torch.int32, device=device)
        self._host = torch.zeros((steps, width), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sizes = batch_sizes(rows)
        self._graphs: dict[int, Any] = {}

    def capture(self) -> None:
        """Capture a graph for each of ``batch_sizes``. A model that cannot be captured is launched step by step."""
        pool = None
        try:
            with torch.inference_mode():
                for size in reversed(self._sizes):
                    self._run(size)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE):
                        self._run(size)
                    pool = graph.pool()
                    self._graphs[size] = graph
        except RuntimeError as error:
            self._graphs.clear()
            torch.cuda.synchronize()
            log.warning("drafts_without_graphs", reason=str(error).strip().splitlines()[0])

    def _run(self, size: int) -> None:
        table_rows, targets, temperatures = (self._part(number)[:size] for number in range(3))
        continued = self._executor.continued
        if continued is not None:
            continued.follow()
        for step in range(self._steps):
            positions = self._part(3 + step)[:size]
            start = (3 + self._steps + 2 * step) * self._width
            keys = self._upload.device[start : start + 2 * size].view(torch.int64)
            logits = self._executor.forward(self._unknown[:size], table_rows, positions)
            self._executor.sampler.sample_random(
                logits, targets, temperatures.view(torch.float32), keys, self._sampled[step]
            )
            if continued is not None:
                continued.keep(targets)

    def _part(self, number: int) -> Tensor:
        return self._upload.device[number * self._width : (number + 1) * self._width]

    def suits(self, rows: list[DraftRow]) -> bool:
        """Whether a graph computes these rows: their sampling needs nothing but a temperature."""
        return len(rows) <= max(self._graphs, default=0) and all(
            row.table_row.plain and row.start + 1 >= row.sequence.stoppable for row in rows
        )

    def launch(self, rows: list[DraftRow]) -> "LaunchedLoop":
        """Start the steps."""
        size = next(size for size in self._sizes if size >= len(rows))
        width, count = self._width, len(rows)
        upload = self._upload
        upload.begin()
        table_rows, targets = np.zeros(size, np.int32), np.full(size, self._executor.spare_target, np.int32)
        temperatures = np.zeros(size, np.float32)
        positions = np.full((self._steps, size), PADDING, np.int32)
        keys = np.zeros((self._steps, size), np.uint64)
        for number, (sequence, table_row, start, steps) in enumerate(rows):
            table_rows[number] = targets[number] = table_row.index
            positions[:steps, number] = range(start, start + steps)
            if table_row.random:
                temperatures[number] = max(sequence.sampling.temperature, 1e-5)
                for step in range(steps):
                    behind = start + step + 1 - sequence.prompt_len
                    keys[step, number] = sampler.key(sequence.sampling.seed, sequence.choice, behind)
        for number, values in enumerate((table_rows, targets, temperatures.view(np.int32), *positions)):
            upload.put(values, number * width)
        for step in range(self._steps):
            upload.put(keys[step].view(np.int32), (3 + self._steps + 2 * step) * width)
        upload.send()
        self._graphs[size].replay()
        self._host.copy_(self._sampled, non_blocking=True)
        event = new_event()
        event.record()
        return LaunchedLoop(self._host[:, :count], event)

    def close(self) -> None:
        self._graphs.clear()


class LaunchedLoop(NamedTuple):
    """Steps that were launched. ``host``: (steps, rows) int32, complete after ``event``."""

    host: Tensor
    event: torch.cuda.Event

    def tokens(self) -> list[list[int]]:
        """Wait for the device; the tokens of each row."""
        self.event.synchronize()
        tokens: list[list[int]] = self.host.t().tolist()
        return tokens


class CudaDraftModel:
    """Implements ``penstock.workers.engines.core.engine.Drafter``. Owns the executor.

    Args:
        executor: of the draft model, over a pool under the target's block numbers; as many steps as tokens are proposed
            may be in flight.
        loop: computes all steps after the first at once where it can; None: each is launched.
    """

    def __init__(self, executor: CudaExecutor, loop: DraftLoop | None = None) -> None:
        self._executor, self._loop = executor, loop

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        progress = [progress_of(scheduled) for scheduled in plan]
        plans = []
        for scheduled, each, limit in zip(plan, progress, limits, strict=True):
            end = scheduled.start + scheduled.count
            plans.append(ScheduledSequence(scheduled.sequence, each.computed, end - each.computed, limit > 0))
            each.computed = end
        drafts = self.draft(plans, limits)
        for each, draft in zip(progress, drafts, strict=True):
            each.proposed = list(draft)
        return drafts

    def draft(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        """Compute a plan, and ``limits[i]`` tokens after ``plan[i]``; it samples if these are any."""
        drafts: list[list[int]] = [[] for _ in plan]
        launched = [([n for n, limit in enumerate(limits) if limit], self._executor.launch(plan))]
        rows = self._rows(plan, limits)
        loop = self._loop
        if loop is not None and rows and loop.suits(list(rows.values())):
            following = loop.launch(list(rows.values()))
            _take(drafts, launched)
            for number, row, tokens in zip(rows, rows.values(), following.tokens(), strict=True):
                drafts[number] += tokens[: row.steps]
        else:
            _take(drafts, launched + self._launch_each(plan, limits))
        return drafts

    def _launch_each(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[tuple[list[int], PendingStep]]:
        """Launch the steps after the first."""
        launched: list[tuple[list[int], PendingStep]] = []
        if self._executor.continued is not None:
            self._executor.continued.follow()
        for count in range(2, max(limits, default=0) + 1):
            left = [number for number, limit in enumerate(limits) if limit >= count]
            plans = [
                ScheduledSequence(plan[n].sequence, plan[n].start + plan[n].count + count - 2, 1, True) for n in left
            ]
            launched.append((left, self._executor.launch(plans)))
        return launched

    def _rows(self, plan: list[ScheduledSequence], limits: Seq[int]) -> dict[int, DraftRow]:
        """The sequences for which more than one token is proposed, by their numbers in the plan."""
        return {
            number: DraftRow(
                scheduled.sequence,
                self._executor.table_row(scheduled.sequence),
                scheduled.start + scheduled.count,
                limit - 1,
            )
            for number, (scheduled, limit) in enumerate(zip(plan, limits, strict=True))
            if limit > 1
        }

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._executor.close()


class CudaEagle:
    """Implements ``penstock.workers.engines.core.engine.Drafter`` with an EAGLE-3 head. Owns executor and states.

    Args:
        executor: of the head, over views of the sequences (``HeadView.shifted``).
        loop: as of ``CudaDraftModel``.
    """

    def __init__(
        self, executor: CudaExecutor, loop: DraftLoop | None, auxiliary: AuxiliaryStates, runs: HeadRuns
    ) -> None:
        self._executor, self.auxiliary, self._runs = executor, auxiliary, runs
        self._drafts = CudaDraftModel(executor, loop)

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in plan]
        if runs := self._runs.take(plan, limits, self.auxiliary.first_rows()):
            self._begin(runs)
            slots = [ScheduledSequence(run.view.shifted, run.start, run.slots, run.limit > 0) for run in runs]
            for run, draft in zip(runs, self._drafts.draft(slots, [run.limit for run in runs]), strict=True):
                if run.limit:
                    drafts[run.number] = draft
        self._runs.planned(plan, drafts)
        return drafts

    def _begin(self, runs: list[HeadRun]) -> None:
        assert self._executor.continued is not None
        table_row = self._executor.table_row
        with device_errors(), torch.inference_mode():
            self._executor.continued.begin(
                max(run.row + run.slots for run in runs),
                {table_row(run.view.shifted).index: run.row - run.start for run in runs},
            )

    def close(self) -> None:
        self._drafts.close()
        self.auxiliary.close()


def _take(drafts: list[list[int]], launched: Seq[tuple[list[int], PendingStep]]) -> None:
    """Wait for steps and append their tokens to the drafts that each has computed."""
    for left, pending in launched:
        if not left:  # a step of prompts alone
            continue
        for number, (token, _) in zip(left, pending.result(), strict=True):
            drafts[number].append(token)
