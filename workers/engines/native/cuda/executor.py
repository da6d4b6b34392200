"""Computes planned steps on CUDA without waiting for them.

A step that only decodes replays a CUDA graph captured for its number of rows, and so does one with short prompts; a
step with longer ones runs the model eagerly. Tokens are sampled after the forward pass, stay on the device for the next
step, and reach the host in one copy.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.sequence import Sampled, ScheduledSequence, Sequence
from penstock.workers.engines.native.cuda import packing, rows
from penstock.workers.engines.native.cuda.adapters import CudaAdapters
from penstock.workers.engines.native.cuda.copies import (
    HostCopies,
    LateStep,
    Pending,
    Upload,
    Written,
    WrittenLayers,
    new_event,
)
from penstock.workers.engines.native.cuda.dense import DenseAttention
from penstock.workers.engines.native.cuda.device_sampler import DeviceSampler, DrawParameters
from penstock.workers.engines.native.cuda.latent import make_scratch, paged_attention
from penstock.workers.engines.native.cuda.modules import Linear, Rotation
from penstock.workers.engines.native.cuda.paged import PagedBatch, tile_rows
from penstock.workers.engines.native.cuda.prompt_graphs import (
    CAPTURE,
    DECODES,
    SPLITS,
    GraphInputs,
    PromptGraphs,
    unowned,
)
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.attention import Paged
from penstock.workers.engines.native.model.eagle import EagleHead
from penstock.workers.engines.native.model.executor import set_scores
from penstock.workers.engines.native.model.masks import TokenMasks
from penstock.workers.engines.native.model.model import Embeddings, Model
from penstock.workers.engines.native.model.pool import KvPool, device_errors, free_bytes
from penstock.workers.engines.native.model.pools import HybridAttention, SlidingPool, shown
from penstock.workers.engines.native.model.vision import TorchVisionEncoder

log = structlog.get_logger("engine")

OWN = -(1 << 30)


def batch_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for. They are closer together where a step takes less time."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 32)]
    return [*(size for size in steps if size < max_rows), max_rows]


class ContinuedStates:
    """The hidden states that an EAGLE-3 head continues from, on the device.

    Those of rows of the target's last step come first, joined by ``fc``; after them is, for each target of sampled
    tokens, the head's own at the slot before.

    Args:
        states: of the target.
        rows: the most that the head computes logits of at once.
        targets: of sampled tokens.
    """

    def __init__(self, head: EagleHead, states: Tensor, *, rows: int, targets: int) -> None:
        device, hidden = states.device, head.config.hidden_size
        self._head, self._auxiliary, self._own = head, states, len(states)
        self._states = torch.zeros((len(states) + targets, hidden), dtype=head.dtype, device=device)
        head.out = torch.zeros((rows, hidden), dtype=head.dtype, device=device)
        # Of each table row: its row in the target's step, less the position; OWN: it continues from the head's.
        self._origins = torch.full((targets,), OWN, dtype=torch.int32, device=device)
        self._pinned = torch.full((targets,), OWN, dtype=torch.int32, pin_memory=device.type == "cuda")

    def begin(self, count: int, origins: dict[int, int]) -> None:
        """Continue from the target's states.

        Args:
            count: leading rows of its last step that are used.
            origins: of a table row, the target's row for position 0 (it can be negative).
        """
        self._states[:count] = self._head.fc(self._auxiliary[:count])
        numbers = self._pinned.numpy()
        numbers.fill(OWN)
        for table_row, origin in origins.items():
            numbers[table_row] = origin
        self._origins.copy_(self._pinned, non_blocking=True)

    def follow(self) -> None:
        """Continue from the head's own states. A CUDA graph can contain it, and ``of`` and ``keep``."""
        self._origins.fill_(OWN)

    def of(self, table_rows: Tensor, positions: Tensor) -> Tensor:
        """(rows, hidden), of (rows,) int32 each."""
        origins = self._origins.index_select(0, table_rows)
        places = torch.where(origins == OWN, self._own + table_rows, origins + positions)
        return self._states.index_select(0, places.clamp_(min=0))

    def keep(self, targets: Tensor, drawn: Tensor | None = None) -> None:
        """Keep the head's states of rows whose tokens are sampled.

        Args:
            targets: (n,) int32.
            drawn: (n,) int32, those rows; None: the first.
        """
        assert self._head.out is not None
        states = self._head.out[: len(targets)] if drawn is None else self._head.out.index_select(0, drawn)
        self._states.index_copy_(0, targets.to(torch.int64) + self._own, states)


class PromptTiles(NamedTuple):
    """The prompts of a batch; see ``paged.PagedBatch``."""

    tiles: Tensor | None = None
    long: tuple[packing.Group, ...] = ()
    rest: Tensor | None = None
    decode_positions: Tensor | None = None
    splits: int = 0


NO_TILES = PromptTiles()


class CudaExecutor:
    """Implements ``OverlapExecutor`` and ``Executor`` over a rewritten model and its pools. Not thread-safe; owns both.

    Args:
        rotation: passes cosines and sines from the model to its attention; made by ``rewrite``.
        width: maximum number of blocks per sequence.
        max_batched_tokens: maximum number of tokens per step.
        tokens_per_sequence: rows that a sequence can have in a decode step: one, plus the proposed tokens.
        singles: see ``Packing``.
        encoder: the model's vision encoder, if any. The engine owns it.
        sliding: the pool of the sliding-window layers, if they do not use ``pool``.
        in_flight: maximum number of launched steps whose results have not been read.
        adapters: the model's LoRA adapters, if it has any.
        invariant: compute each sequence independently of the rest of the batch. The model must have been rewritten
            with the same setting.
        others: sends a step to the other ranks of a model that is split, which ``compute`` it; those have none.
        continued: hidden states that an EAGLE-3 head continues from; None: the model is none.
    Attributes:
        continued: likewise.
        model, pool: None once it is closed.
    """

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        rotation: Rotation,
        *,
        width: int,
        max_running: int,
        max_batched_tokens: int,
        tokens_per_sequence: int = 1,
        singles: int = 1,
        encoder: TorchVisionEncoder | None = None,
        sliding: SlidingPool | None = None,
        in_flight: int = 4,
        invariant: bool = False,
        adapters: CudaAdapters | None = None,
        others: Callable[[packing.PackedStep], None] | None = None,
        continued: Tensor | None = None,
    ) -> None:
        device = model.device
        self._others = others
        self._launched: tuple[list[ScheduledSequence], dict[Sequence, int]] = ([], {})
        self.model: Model | None = model
        self.pool: KvPool | None = pool
        self._sliding = sliding
        self._rotation, self._encoder, self._device = rotation, encoder, device
        self._rows = max_rows = max_running * tokens_per_sequence
        table_rows = 2 * max_running + 1
        places, tables = model.media_positions, 1 + (sliding is not None)
        self._table_rows = packing.TableRows(
            table_rows, width, sliding=sliding is not None, shift=None if places is None else places.shift
        )
        self._least = packing.STEP if layer_weights(model) >= packing.LARGE or pool.shape.latent else packing.LONG
        self._packing = packing.Packing(
            self._table_rows,
            tile_rows=tile_rows(model.dtype),
            singles=singles,
            spare=table_rows,
            media_tokens=0 if encoder is None else encoder.slot_tokens,
            by_position=invariant,
            least=self._least,
        )
        numbers = torch.zeros(table_rows * (tables * width + 1), dtype=torch.int32, device=device)
        self._tables = numbers[:-table_rows].view(tables, table_rows, width)
        self._shifts = None if places is None else numbers[-table_rows:]
        self._latest = torch.zeros(table_rows + 1, dtype=torch.int32, device=device)
        self._scratch = make_scratch(
            pool.shape, model.heads, max_rows, device, invariant, parts=min(DECODES, max_rows) * SPLITS
        )
        aligned = -(-max_rows // 16) * 16
        self._fixed_offsets = tuple(aligned * number for number in range(4))  # tokens, table rows, positions, targets
        self._adapters = adapters
        self._upload = Upload(12 * aligned + 10 * max_batched_tokens + (1 << 16), device)
        self._prompt_graphs = PromptGraphs(
            self._upload, 4 * aligned, tile_rows(model.dtype), 0 if invariant else max_batched_tokens, max_rows
        )
        self.continued: ContinuedStates | None = None
        if continued is not None:
            most = max(max_rows, self._prompt_graphs.wanted(max_batched_tokens))
            self.continued = ContinuedStates(model.forward, continued, rows=most, targets=table_rows + 1)
        if adapters is not None:
            most = max(max_rows, *self._prompt_graphs.sizes, 0)
            adapters.place(self._upload, 4 * aligned + self._prompt_graphs.size, most)
        self._masks = TokenMasks(model.vocab_size)
        self._late: LateStep | None = None
        self._waypoints: list[Written] | None = None  # of the step that is being launched; None: not needed
        self._sampler = DeviceSampler(model.vocab_size, max_rows, self._upload, self._latest)
        self._host_copies = HostCopies(max_rows, in_flight, device)
        self._most_tokens = max_batched_tokens
        self._dense = DenseAttention(device, enabled=not invariant)
        self._graphs: dict[tuple[int, bool], tuple[Any, Tensor]] = {}  # by rows, and whether some have an adapter
        self._graph_sizes: list[int] = []

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def sampler(self) -> DeviceSampler:
        return self._sampler

    @property
    def spare_target(self) -> int:
        """A target of sampled tokens that no step reads."""
        return len(self._latest) - 1

    def table_row(self, sequence: Sequence) -> packing.TableRow:
        """The table row of a sequence of the last step."""
        return self._table_rows.of(sequence)

    def first_rows(self) -> list[int]:
        """The first row of each sequence in the last step, in the order of its plan."""
        plan, rows_of = self._launched
        return [rows_of.get(scheduled.sequence, number) for number, scheduled in enumerate(plan)]

    # -- graphs ----------------------------------------------------------------------------------------------

    def capture(self, *, again: bool = False) -> None:
        """Capture a graph for each of ``batch_sizes``, and for short prompts. A model that cannot be runs eagerly.

        Args:
            again: another executor of this process had graphs of the same modules, so that kernels are compiled and
                libraries have chosen theirs: nothing is computed before it is captured.
        """
        assert self.model is not None
        assert self.pool is not None
        pool, began, free = None, time.perf_counter(), free_bytes(self._device)
        try:
            with torch.inference_mode():
                for size, adapted in self._variants(batch_sizes(self._rows)):
                    if not again:
                        self.run_fixed(size)  # compiles kernels and lets libraries choose theirs
                        torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE):
                        logits = self.run_fixed(size)
                    pool = graph.pool()
                    logits = unowned(logits)
                    self._graphs[size, adapted] = (graph, logits)
        except RuntimeError as error:
            self._graphs.clear()
            torch.cuda.synchronize()
            if again:
                self.capture()
                return
            log.warning("decode_without_graphs", reason=str(error).strip().splitlines()[0])
        if not self._on_all_ranks(bool(self._graphs)):
            self._graphs.clear()
        self._graph_sizes = sorted({size for size, _ in self._graphs})
        if self._graphs:
            self._capture_prompts(pool, again)
            graphs = len(self._graphs) + len(self._prompt_graphs.graphs)
            rows = max((size for size, _ in self._prompt_graphs.graphs), default=0)
            taken, took = (free - free_bytes(self._device)) >> 20, round(time.perf_counter() - began, 2)
            log.info("graphs_captured", graphs=graphs, prompt_rows=rows, mib=taken, seconds=took)
        shape, model = self.pool.shape, self.model
        longest = min(self._tables.shape[2] * self.pool.block_size, self._most_tokens)
        planned = list(packing.shapes(longest, self._most_tokens, self._least))
        if shape.latent:
            keys, values = model.expanded
            self._dense.warm(planned, model.heads, model.heads, keys, model.dtype, values)
        else:
            self._dense.warm(planned, model.heads, shape.kv_heads, shape.head_dim, model.dtype)

    def _variants(self, sizes: Seq[int]) -> Iterator[tuple[int, bool]]:
        """The graphs to capture, the largest first: without adapters, and with them if there are any."""
        for size in reversed(sizes):
            for adapted in (False, True) if self._adapters is not None else (False,):
                if self._adapters is not None:
                    self._adapters.fix(size, active=adapted)
                yield size, adapted
        if self._adapters is not None:
            self._adapters.fix(0, active=False)

    def _capture_prompts(self, pool: Any, again: bool) -> None:
        assert self.model is not None
        graphs, group = self._prompt_graphs, self.model.group

        def forward(inputs: GraphInputs) -> Tensor:
            decodes, wanted = len(inputs.decode_positions), inputs.wanted.to(torch.int64)
            splits = SPLITS if decodes <= DECODES else 1
            tiles = PromptTiles(inputs.tiles, decode_positions=inputs.decode_positions, splits=splits)
            return self._forward(inputs.tokens, inputs.table_rows, inputs.positions, decodes, tiles, wanted)

        try:
            with torch.inference_mode():
                rows = graphs.affordable(forward)
                graphs.bound(rows if group is None else group.least(rows, self._device))
                missing = graphs.capture(
                    forward, pool, self._variants(graphs.sizes), again=again, all_or_none=group is not None
                )
            if missing:
                log.warning("prompts_without_graphs", reason=missing.strip().splitlines()[0])
        except RuntimeError as error:
            graphs.clear()
            torch.cuda.synchronize()
            if again:
                self._capture_prompts(pool, again=False)
                return
            log.warning("prompts_without_graphs", reason=str(error).strip().splitlines()[0])
        if not self._on_all_ranks(bool(graphs.graphs)):
            graphs.clear()

    def _on_all_ranks(self, captured: bool) -> bool:
        """Whether all ranks have captured graphs: otherwise they would exchange results of different sizes."""
        assert self.model is not None
        group = self.model.group
        return captured if group is None else bool(group.least(int(captured), self._device))

    def run_fixed(self, size: int) -> Tensor:
        """A decode step of ``size`` rows whose inputs lie at fixed offsets of the upload buffer."""
        tokens, table_rows, positions = (self._upload.device[start : start + size] for start in self._fixed_offsets[:3])
        return self.forward(tokens, table_rows, positions)

    def forward(self, known: Tensor, table_rows: Tensor, positions: Tensor) -> Tensor:
        """Logits of rows that are decoded one by one; see ``_forward``. A CUDA graph can contain it."""
        return self._forward(known, table_rows, positions, len(known))

    def _forward(
        self,
        known: Tensor,
        table_rows: Tensor,
        positions: Tensor,
        decodes: int,
        tiles: PromptTiles = NO_TILES,
        wanted: Tensor | None = None,
        embeddings: Embeddings | None = None,
        placed: Seq[tuple[int, Sequence, int, int]] = (),
    ) -> Tensor:
        """Run the model over one batch.

        Args:
            known: (rows,) int32 token ids; -1: the last token sampled for the row's sequence.
            wanted: (n,) int64, the rows whose logits are returned; None: all.
            placed: of ``Packed``.
        """
        assert self.model is not None
        count = len(known)
        if self.model.group is not None:
            self.model.group.spread(self._latest)  # rank 0 alone draws tokens
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        rows.fetch[(-(-count // 256),)](known, table_rows, self._latest, tokens, count, BLOCK=256, num_warps=2)
        token_positions = positions.to(torch.int64)
        if self._shifts is not None:
            token_positions = token_positions + self._shifts.index_select(0, table_rows)
        token_positions = token_positions.clamp(min=0)
        if placed and self.model.media_positions is not None:
            token_positions = token_positions.repeat(3, 1)
            for row, sequence, start, stop in placed:
                places = self.model.media_positions.of(sequence, start, stop)
                token_positions[:, row : row + stop - start] = places.to(self._device)
        paged = self._paged(table_rows, positions, decodes, tiles)
        hidden = None if self.continued is None else self.continued.of(table_rows, positions)
        return self.model.logits(tokens, token_positions, wanted, paged, embeddings, hidden)

    def _note(self, layers: int) -> None:
        """The step that is being launched has written the KV of so many leading layers here; 0: of all."""
        event = new_event() if self._device.type == "cuda" else None
        if event is not None:
            event.record()
        assert self._waypoints is not None
        self._waypoints.append(Written(layers, event))

    def _paged(self, table_rows: Tensor, positions: Tensor, decodes: int, tiles: PromptTiles) -> Paged:
        assert self.pool is not None

        def over(pool: KvPool, table: Tensor) -> Paged:
            batch = PagedBatch(table, table_rows, positions, decodes, *tiles)
            return paged_attention(pool, self._scratch, self._rotation, batch, self._dense)

        full = over(self.pool, self._tables[0])
        if self._waypoints is not None:
            full = WrittenLayers(full, self.pool.shape.layers, self._note, others=self._sliding is not None)
        if self._sliding is None:
            return full
        return HybridAttention(self._sliding.layers, full, over(self._sliding.pool, self._tables[1]))

    # -- one step --------------------------------------------------------------------------------------------

    def execute(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> list[Sampled]:
        return self.launch(plan, scoring).result()

    def launch(self, plan: list[ScheduledSequence], scoring: Seq[ScheduledSequence] = ()) -> Pending | LateStep:
        """Launch a step; the previous one may still be running. See ``OverlapExecutor``."""
        with device_errors(), torch.inference_mode():
            if self._late is not None:
                self._late.draw()
                self._late = None
            if not scoring and len(plan) <= self._rows and all(_is_single_token(scheduled) for scheduled in plan):
                packed = self._pack_single(plan)
            else:
                packed = self._packing.pack(plan, scoring)
                if self._others is None and any(each.samples and each.sequence.pin for each in plan):
                    self._waypoints = []
            self._launched = plan, packed.first_rows
            changes = self._table_rows.take_changes()
            if self._others is not None:
                self._others(packing.packed_step(packed, changes, eager=bool(scoring)))
            try:
                return self._launch(packed, changes, scoring, eager=bool(scoring))
            finally:
                self._waypoints = None

    def compute(self, step: packing.PackedStep) -> None:
        """Launch this rank's part of a step that rank 0 has sent.

        Raises:
            EngineError: the device is lost.
        """
        packed, changes, eager = packing.unpacked_step(step)
        with device_errors(), torch.inference_mode():
            self._launch(packed, changes, (), eager=eager)

    def _launch(
        self,
        packed: packing.Packed,
        changes: tuple[list[int], list[int]],
        scoring: Seq[ScheduledSequence],
        *,
        eager: bool,
    ) -> Pending | LateStep:
        if packed.single and len(packed.tokens) <= self._rows:
            return self._decode(packed, changes)
        if not eager and (size := self._prompt_graphs.fit(packed)):
            return self._replay_prompts(packed, changes, size)
        return self._mixed(packed, changes, scoring)

    def _pack_single(self, plan: list[ScheduledSequence]) -> packing.Packed:
        """``Packing.pack`` for a plan of single tokens, but faster: with small models the GPU waits for it."""
        packed = packing.Packed()
        for scheduled in plan:
            sequence, start = scheduled.sequence, scheduled.start
            table_row = self._table_rows.of(sequence)
            tokens = sequence.tokens
            packed.tokens.append(tokens[start] if start < len(tokens) else packing.UNKNOWN)
            packed.table_rows.append(table_row.index)
            packed.slots.append(sequence.adapter_slot)
            packed.positions.append(start)
            packed.draws.append(packing.Draw(sequence, table_row, start + 1, table_row.index))
        packed.decodes = len(plan)
        return packed

    def _decode(self, packed: packing.Packed, changes: tuple[list[int], list[int]]) -> Pending | LateStep:
        """Compute a step without chunks of prompts."""
        count, draws = packed.decodes, packed.draws
        size = next((size for size in self._graph_sizes if size >= count), 0)
        padding = [0] * (size - count)
        upload = self._upload
        upload.begin()
        offsets = self._fixed_offsets
        tokens = upload.put(packed.tokens + padding, offsets[0])
        table_rows = upload.put(packed.table_rows + padding, offsets[1])
        positions = upload.put(packed.positions + [-1] * len(padding), offsets[2])
        targets = upload.put([draw.target for draw in draws], offsets[3])
        adapted = self._put_adapters(packed, size)
        sampled_rows = upload.put(packed.drawn) if len(draws) < count and draws else None
        parameters = self._sampler.parameters(draws)
        self._send(changes)
        if size:
            graph, logits = self._graphs[size, adapted]
            graph.replay()
            logits = logits[:count]
        else:
            logits = self._forward(tokens, table_rows, positions, count)
        if sampled_rows is not None:
            logits = logits.index_select(0, sampled_rows)
        return self._drawn(logits, packed, targets, parameters, drawn=sampled_rows)

    def _replay_prompts(
        self, packed: packing.Packed, changes: tuple[list[int], list[int]], size: int
    ) -> Pending | LateStep:
        """Compute a step with short prompts by the graph of this many rows."""
        upload, draws = self._upload, packed.draws
        upload.begin()
        self._prompt_graphs.put(packed, size)
        adapted = self._put_adapters(packed, size)
        targets = upload.put([draw.target for draw in draws])
        parameters = self._sampler.parameters(draws)
        self._send(changes)
        return self._drawn(self._prompt_graphs.replay(size, adapted), packed, targets, parameters)

    def _mixed(
        self, packed: packing.Packed, changes: tuple[list[int], list[int]], scoring: Seq[ScheduledSequence]
    ) -> Pending | LateStep:
        upload, draws = self._upload, packed.draws
        upload.begin()
        tokens, table_rows, positions = (
            upload.put(values) for values in (packed.tokens, packed.table_rows, packed.positions)
        )
        targets = upload.put([draw.target for draw in draws])
        wanted = upload.put(packed.drawn + packed.scored or [0])
        tiles = PromptTiles(
            self._put_tiles(packed.tiles), tuple(packed.long), self._put_tiles(packed.rest if packed.long else [])
        )
        parameters = self._sampler.parameters(draws)
        self._put_adapters(packed, 0)
        self._send(changes)
        embeddings = self._embeddings(packed.media) if packed.media else None
        logits = self._forward(
            tokens, table_rows, positions, packed.decodes, tiles, wanted.to(torch.int64), embeddings, packed.placed
        )
        after = _scores(logits[len(draws) :], scoring) if scoring and packed.scored else None
        return self._drawn(logits, packed, targets, parameters, after)

    def _drawn(
        self,
        logits: Tensor,
        packed: packing.Packed,
        targets: Tensor,
        parameters: DrawParameters | None,
        after: Callable[[], None] | None = None,
        drawn: Tensor | None = None,
    ) -> Pending | LateStep:
        """Draw a step's tokens, at once or later, and copy them to the host.

        Args:
            logits: those of ``packed.draws`` first.
            after: called when the step has ended.
            drawn: the rows of ``packed.draws`` among those that the model computed logits of; None: the first.
        """
        draws = packed.draws
        if not draws:
            return self._host_copies.start(None, packed.order, after)
        if self._waypoints is not None and all(waypoint.layers for waypoint in self._waypoints):
            self._note(0)  # the step replayed a graph, or wrote to two pools
        waypoints = self._waypoints or ()
        if self.continued is not None:
            self.continued.keep(targets, drawn)

        def draw() -> Pending:
            masks = self._masks.start([draw.sequence for draw in draws])
            sampled = self._sampler.sample(logits[: len(draws)], draws, targets, parameters, masks)
            return self._host_copies.start(sampled, packed.order, after)

        step: Pending | LateStep
        if all(draw.sequence.constraint is None for draw in draws):
            step = draw()
        else:
            step = self._late = LateStep(draw)
        step.waypoints = waypoints
        return step

    def _put_tiles(self, tiles: list[tuple[int, int, int, int]]) -> Tensor | None:
        return self._upload.put([number for tile in tiles for number in tile]).view(-1, 4) if tiles else None

    def _put_adapters(self, packed: packing.Packed, size: int) -> bool:
        """Say which rows of a step have which adapter; False: none has one.

        Before lists without a place of their own are put: they follow this one.

        Args:
            size: rows of the graph that computes it; 0: none does.
        """
        return self._adapters is not None and self._adapters.put(packed.slots, size)

    def _embeddings(self, media: list[tuple[int, int]]) -> Embeddings:
        assert self._encoder is not None
        batch_rows, slots = (
            sampler.place(list(column), torch.int64, self._device) for column in zip(*media, strict=True)
        )
        return Embeddings(batch_rows, self._encoder.take(slots))

    def _send(self, changes: tuple[list[int], list[int]]) -> None:
        """Copy the step's lists and the changes to the block tables to the device."""
        entries, values = changes
        upload, count = self._upload, len(entries)
        pairs = None
        if count and 2 * count <= upload.room():
            pairs = upload.put(entries + values)
        upload.send()
        if count:
            if pairs is None:
                pairs = sampler.place(entries + values, torch.int32, self._device)
            rows.scatter[(-(-count // 256),)](pairs, self._tables, count, BLOCK=256, num_warps=2)

    def memory(self) -> dict[str, Memory]:
        """The KV pool; empty if blocks are spread over two pools."""
        assert self.pool is not None, "closed"
        return shown(self.pool, self._sliding)

    def close(self) -> None:
        """Free weights, graphs and pools."""
        self._graphs.clear()
        self._prompt_graphs.clear()
        self.model = self.pool = self._encoder = self._sliding = self._adapters = None
        self._masks.close()


def layer_weights(model: Model) -> int:
    """Weights of a layer's products, on average; experts do not count."""
    return sum(part.weight.numel() for part in body_linears(model)) // model.shape.layers


def body_linears(model: Model) -> Iterator[Linear]:
    """The products of a model's layers."""
    body = getattr(model.forward, "model", model.forward)
    return (part for part in body.modules() if isinstance(part, Linear))


def _is_single_token(scheduled: ScheduledSequence) -> bool:
    sequence = scheduled.sequence
    return scheduled.count == 1 and scheduled.samples and not sequence.media and scheduled.start >= sequence.prompt_len


def _scores(logits: Tensor, scoring: Seq[ScheduledSequence]) -> Callable[[], None]:
    def finish() -> None:
        with torch.inference_mode():
            set_scores(logits, scoring)

    return finish
