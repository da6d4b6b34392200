"""How a planned step is computed on CUDA: launched without waiting; its tokens stay on the device for the next step.

A step of single tokens replays a graph that was captured for its number of rows; one with prompts runs the model
as it is. Tokens are drawn after the forward pass, remain on the device by lane, and go to the host in one copy.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from schemas.transfer import Memory
from workers.engines.base import EngineError
from workers.engines.core.sequence import Sampled, Slot, scored_to
from workers.engines.native import sampler
from workers.engines.native.cuda import rows
from workers.engines.native.cuda.draws import Draws
from workers.engines.native.cuda.lanes import Lane, Lanes
from workers.engines.native.cuda.modules import Rotation
from workers.engines.native.cuda.paged import Batch, PagedAttention, Scratch, tile_rows
from workers.engines.native.cuda.upload import Upload, new_event
from workers.engines.native.executor import media_rows, score_slots
from workers.engines.native.model import Embeddings, Model
from workers.engines.native.pool import Pool, out_of_memory
from workers.engines.native.vision import TorchVisionEncoder

log = structlog.get_logger("engine")

RETURNS = 4  # steps whose tokens may be on their way to the host


def batch_sizes(most: int) -> list[int]:
    """Rows that graphs are captured for: close where a step is short."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 32)]
    return [*(size for size in steps if size < most), most]


class Pending:
    """A step that was launched."""

    def __init__(self, finish: Callable[[], list[Sampled]]) -> None:
        self._finish = finish

    def result(self) -> list[Sampled]:
        """Wait for the device.

        Raises:
            EngineError: the device is lost.
        """
        with _failing():
            return self._finish()


class _failing:
    """Failures of the device are those of the engine."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise EngineError(out_of_memory(error)) from error
        if isinstance(error, RuntimeError):  # torch has no narrower type for a lost device
            raise EngineError(f"the step failed: {error}") from error


class CudaExecutor:
    """``OverlapExecutor`` over a rewritten model and a pool. Owns both; used from one thread.

    Args:
        rotation: of the model's attention, from ``rewrite``.
        width: blocks that a sequence may have.
        max_batched_tokens: of a step.
        encoder: of the model, if it has any; they belong to the engine.
    """

    def __init__(
        self,
        model: Model,
        pool: Pool,
        rotation: Rotation,
        *,
        width: int,
        max_running: int,
        max_batched_tokens: int,
        encoder: TorchVisionEncoder | None = None,
    ) -> None:
        device = model.device
        self._model: Model | None = model
        self._pool: Pool | None = pool
        self._rotation, self._encoder, self._device = rotation, encoder, device
        self._rows = max_running
        self._tile_rows = tile_rows(model.dtype)
        self._lanes = Lanes(2 * max_running + 1, width)
        self._tables = torch.zeros((2 * max_running + 1, width), dtype=torch.int32, device=device)
        self._latest = torch.zeros(2 * max_running + 1, dtype=torch.int32, device=device)
        self._scratch = Scratch(max_running, pool.shape.kv_heads, model.heads, pool.shape.head_dim, device)
        aligned = -(-max_running // 16) * 16
        self._fixed = tuple(aligned * number for number in range(4))  # told tokens, lanes, positions, targets
        self._upload = Upload(12 * aligned + 8 * max_batched_tokens + (1 << 16), device)
        self._draws = Draws(model.vocab_size, max_running, self._upload, self._latest)
        pinned = device.type == "cuda"
        self._returns = [torch.zeros(max_running, dtype=torch.int32, pin_memory=pinned) for _ in range(RETURNS)]
        self._turn = 0
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        self._sizes: list[int] = []

    # -- graphs ----------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture a graph for each of some numbers of rows; models that cannot be captured run without."""
        assert self._pool is not None
        pool = None
        try:
            with torch.inference_mode():
                for size in reversed(batch_sizes(self._rows)):
                    self._static(size)  # compiles, and lets libraries choose
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        logits = self._static(size)
                    pool = graph.pool()
                    self._graphs[size] = (graph, logits)
        except RuntimeError as error:
            self._graphs.clear()
            torch.cuda.synchronize()
            log.warning("decode_without_graphs", reason=str(error).strip().splitlines()[0])
        self._sizes = sorted(self._graphs)

    def _static(self, size: int) -> Tensor:
        """A decode step of ``size`` rows over the fixed places of the upload."""
        told, lanes, positions = (self._upload.device[start : start + size] for start in self._fixed[:3])
        return self._forward(told, lanes, Batch(self._tables, lanes, positions, size), None, None)

    def _forward(
        self, told: Tensor, lanes: Tensor, batch: Batch, wanted: Tensor | None, embeddings: Embeddings | None
    ) -> Tensor:
        assert self._model is not None
        assert self._pool is not None
        count = len(told)
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        rows.fetch[(-(-count // 256),)](told, lanes, self._latest, tokens, count, BLOCK=256, num_warps=2)
        paged = PagedAttention(self._pool, self._scratch, self._rotation, batch)
        places = batch.positions.clamp(min=0).to(torch.int64)
        return self._model.logits(tokens, places, wanted, paged, embeddings)

    # -- one step --------------------------------------------------------------------------------------------

    def execute(self, plan: list[Slot], scoring: Seq[Slot] = ()) -> list[Sampled]:
        return self.launch(plan, scoring).result()

    def launch(self, plan: list[Slot], scoring: Seq[Slot] = ()) -> Pending:
        """Start a step; the one before may still run. See ``OverlapExecutor``."""
        with _failing(), torch.inference_mode():
            if not scoring and len(plan) <= self._rows and all(_single(slot) for slot in plan):
                return self._decode(plan)
            return self._mixed(plan, scoring)

    def _decode(self, plan: list[Slot]) -> Pending:
        told, lanes, positions, used = [], [], [], []
        for sequence, start, _, _ in plan:
            lane = self._lanes.of(sequence)
            used.append(lane)
            tokens = sequence.tokens
            told.append(tokens[start] if start < len(tokens) else -1)
            lanes.append(lane.index)
            positions.append(start)
        count = len(plan)
        size = next((size for size in self._sizes if size >= count), 0)
        padding = [0] * (size - count)
        upload = self._upload
        upload.begin()
        fixed = self._fixed
        told_at = upload.put(told + padding, fixed[0])
        lanes_at = upload.put(lanes + padding, fixed[1])
        positions_at = upload.put(positions + [-1] * len(padding), fixed[2])
        targets_at = upload.put(lanes, fixed[3])
        parameters = self._draws.parameters(plan, used)
        self._send()
        if size:
            graph, logits = self._graphs[size]
            graph.replay()
            logits = logits[:count]
        else:
            logits = self._forward(told_at, lanes_at, Batch(self._tables, lanes_at, positions_at, count), None, None)
        drawn = self._draws.draw(logits, plan, used, targets_at, parameters)
        return self._give(drawn, None, None)

    def _mixed(self, plan: list[Slot], scoring: Seq[Slot]) -> Pending:
        """Single tokens first, then prompts."""
        ordered = [slot for slot in plan if slot.count == 1]
        decodes = len(ordered)
        ordered += [slot for slot in plan if slot.count > 1]
        told: list[int] = []
        lanes: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        scored: list[int] = []
        seen: list[tuple[int, int]] = []
        tiles: list[tuple[int, int, int, int]] = []
        drawing: list[Slot] = []
        used: list[Lane] = []
        for slot in ordered:
            sequence, start, count, samples = slot
            lane = self._lanes.of(sequence)
            row, end = len(told), start + count
            if sequence.media and self._encoder is not None:
                seen += media_rows(slot, row, self._encoder.slot_tokens)
            if scoring and slot in scoring:
                first = row - start - 1
                scored += range(first + sequence.score, first + scored_to(slot))
            known = sequence.tokens[start:end]
            told += known
            if len(known) < count:
                told.append(-1)
            lanes += [lane.index] * count
            positions += range(start, end)
            if count > 1:
                for at in range(0, count, self._tile_rows):
                    tiles.append((row + at, start + at, min(self._tile_rows, count - at), lane.index))
            if samples:
                wanted.append(row + count - 1)
                drawing.append(slot)
                used.append(lane)
        tiles.sort(key=lambda tile: -tile[1])  # the longest first
        return self._run(told, lanes, positions, wanted, scored, seen, tiles, decodes, plan, drawing, used, scoring)

    def _run(
        self,
        told: list[int],
        lanes: list[int],
        positions: list[int],
        wanted: list[int],
        scored: list[int],
        seen: list[tuple[int, int]],
        tiles: list[tuple[int, int, int, int]],
        decodes: int,
        plan: list[Slot],
        drawing: list[Slot],
        used: list[Lane],
        scoring: Seq[Slot],
    ) -> Pending:
        upload = self._upload
        upload.begin()
        told_at, lanes_at, positions_at = upload.put(told), upload.put(lanes), upload.put(positions)
        targets_at = upload.put([lane.index for lane in used])
        wanted_at = upload.put(wanted + scored or [0])
        tiles_at = upload.put(np.array(tiles, np.int32).reshape(-1)).view(-1, 4) if tiles else None
        parameters = self._draws.parameters(drawing, used)
        self._send()
        batch = Batch(self._tables, lanes_at, positions_at, decodes, tiles_at)
        embeddings = _rows_of(seen, self._encoder, self._device) if seen else None
        logits = self._forward(told_at, lanes_at, batch, wanted_at.to(torch.int64), embeddings)
        drawn = self._draws.draw(logits[: len(drawing)], drawing, used, targets_at, parameters) if drawing else None
        place = {slot.sequence: row for row, slot in enumerate(drawing)}
        order = [place[slot.sequence] for slot in plan if slot.samples]
        after = None
        if scored:
            rest = logits[len(wanted) :]

            def after() -> None:
                with torch.inference_mode():
                    score_slots(rest, scoring)

        return self._give(drawn, order, after)

    def _send(self) -> None:
        places, values = self._lanes.taken()
        upload, count = self._upload, len(places)
        pairs = None
        if count and 2 * count <= upload.left():
            pairs = upload.put(places + values)
        upload.send()
        if count:
            if pairs is None:
                pairs = sampler.place(places + values, torch.int32, self._device)
            rows.scatter[(-(-count // 256),)](pairs, self._tables, count, BLOCK=256, num_warps=2)

    # -- tokens ----------------------------------------------------------------------------------------------

    def _give(
        self,
        drawn: "Tensor | sampler.Chosen | None",
        order: list[int] | None,
        after: Callable[[], None] | None,
    ) -> Pending:
        """Send the step's tokens to the host. ``order``: their rows in the order of the plan; None: they are in it."""
        if isinstance(drawn, sampler.Chosen):
            drawn = drawn.moved()
        elif drawn is not None:
            self._turn = (self._turn + 1) % RETURNS
            here = self._returns[self._turn][: len(drawn)]
            here.copy_(drawn, non_blocking=True)
            drawn = here
        event = new_event() if self._device.type == "cuda" else None
        if event is not None:
            event.record()

        def finish() -> list[Sampled]:
            if event is not None:
                event.synchronize()
            if after is not None:
                after()
            if drawn is None:
                return []
            if isinstance(drawn, sampler.Chosen):
                sampled = drawn.sampled()
            else:
                sampled = [Sampled(token) for token in drawn.tolist()]
            return sampled if order is None else [sampled[row] for row in order]

        return Pending(finish)

    def memory(self) -> dict[str, Memory]:
        """The pool of KV blocks."""
        assert self._pool is not None, "closed"
        return {"kv": self._pool.memory()}

    def close(self) -> None:
        """Give weights, graphs and pool back."""
        self._graphs.clear()
        self._model = self._pool = self._encoder = None


def _single(slot: Slot) -> bool:
    return slot.count == 1 and slot.samples and not slot.sequence.media


def _rows_of(seen: list[tuple[int, int]], encoder: TorchVisionEncoder | None, device: torch.device) -> Embeddings:
    assert encoder is not None
    columns: Iterator[list[int]] = (list(column) for column in zip(*seen, strict=True))
    where, places = (sampler.place(column, torch.int64, device) for column in columns)
    return Embeddings(where, encoder.take(places))
