"""Steps with short prompts as inputs of a graph: what fits, and what lies where."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.workers.engines.native.cuda import prompt_graphs
from penstock.workers.engines.native.cuda.copies import Upload
from penstock.workers.engines.native.cuda.packing import Packed
from penstock.workers.engines.native.cuda.prompt_graphs import (
    DECODES,
    MOST_DECODES,
    PROMPTS,
    SMALL,
    GraphInputs,
    PromptGraphs,
    unowned,
)

OFFSET, TILE = 64, 128
CPU = torch.device("cpu")


@pytest.fixture
def upload() -> Upload:
    return Upload(1 << 14, CPU)


@pytest.fixture
def graphs(upload: Upload) -> PromptGraphs:
    made = PromptGraphs(upload, OFFSET, TILE, 512, 256)
    captured: Any = None
    made.graphs = dict.fromkeys(made.sizes, captured)
    return made


def step(decodes: int, *prompts: int) -> Packed:
    packed = Packed(decodes=decodes)
    tokens = decodes + sum(prompts)
    packed.tokens, packed.table_rows = list(range(1000, 1000 + tokens)), [3] * tokens
    packed.positions = [50] * decodes
    packed.drawn = list(range(decodes))
    for prompt in prompts:
        row = len(packed.positions)
        packed.positions += range(prompt)
        packed.drawn.append(row + prompt - 1)
        packed.tiles += [(row + at, at, min(TILE, prompt - at), 3) for at in range(0, prompt, TILE)]
    return packed


def test_the_smallest_graph_with_enough_rows_computes_a_step(graphs: PromptGraphs) -> None:
    assert [graphs.fit(step(1, tokens)) for tokens in (1, 31, 32, 200, 511, 512)] == [32, 32, 64, 256, 512, 0]


def test_a_step_with_more_than_a_graph_has_room_for_is_computed_without_one(graphs: PromptGraphs) -> None:
    assert graphs.fit(step(MOST_DECODES, 250))
    assert not graphs.fit(step(MOST_DECODES + 1, 250))
    assert graphs.fit(step(0, *[10] * PROMPTS))
    assert not graphs.fit(step(0, *[1] * (2 * PROMPTS + 1)))
    image = step(0, 40)
    image.media = [(3, 0)]
    assert not graphs.fit(image)


def test_many_decoded_rows_beside_a_prompt_take_a_graph_of_twice_as_many(graphs: PromptGraphs) -> None:
    steps = (step(DECODES, 40), step(DECODES + 1, 40), step(130, 20), step(200, 20))
    assert [graphs.fit(each) for each in steps] == [128, 192, 320, 448]
    few: Any = PromptGraphs(Upload(1 << 14, CPU), OFFSET, TILE, 512, 16)  # that many can run at once
    assert [len(few.inputs(size).decode_positions) for size in (32, 512)] == [16, 16]


def test_steps_of_a_few_hundred_tokens_each_fit_a_graph_until_computing_takes_longer_than_launching() -> None:
    made = PromptGraphs(Upload(1 << 16, CPU), OFFSET, TILE, 8192, 256)
    captured: Any = None
    made.graphs = dict.fromkeys(made.sizes, captured)
    assert [made.fit(step(0, *[258] * 8)), made.fit(step(50, *[140] * 15)), made.fit(step(0, 2561))] == [2176, 2176, 0]


def test_a_model_that_was_not_captured_has_no_graph(graphs: PromptGraphs) -> None:
    graphs.clear()
    assert not graphs.fit(step(0, 40))


def test_what_a_step_does_not_use_is_padding(graphs: PromptGraphs, upload: Upload) -> None:
    packed = step(2, 150)
    upload.begin()
    graphs.put(packed, 192)
    upload.send()
    inputs = graphs.inputs(192)
    assert inputs.tokens.tolist() == packed.tokens + [0] * 40
    assert inputs.positions.tolist() == packed.positions + [-1] * 40
    assert inputs.decode_positions.tolist() == [50, 50] + [-1] * (192 // 2 - 2)
    assert inputs.wanted.tolist()[:3] == [0, 1, 151]
    assert inputs.tiles.tolist()[:3] == [[2, 0, 128, 3], [130, 128, 22, 3], [0, 0, 0, 0]]
    assert not inputs.tiles[2:].any()


def test_inputs_lie_behind_those_of_other_graphs_and_do_not_overlap(graphs: PromptGraphs) -> None:
    parts = graphs.inputs(512)
    ends = [part.storage_offset() + part.numel() for part in parts]
    assert parts.tokens.storage_offset() == OFFSET
    assert all(part.storage_offset() >= end for part, end in zip(parts[1:], ends, strict=False))
    assert ends[-1] <= OFFSET + graphs.size


def test_graphs_whose_activations_would_take_too_much_memory_are_left_out() -> None:
    made = PromptGraphs(Upload(1 << 16, CPU), OFFSET, TILE, 8192, 256)
    made.bound(1300)
    assert made.sizes[-1] == 1280
    made.bound(0)
    assert made.sizes[-1] == SMALL


def test_what_activations_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of experts are several times as wide as any product."""
    row_bytes, held, computed = 50_000, 9 << 30, list[int]()
    monkeypatch.setattr(prompt_graphs, "free_bytes", lambda device: 8 * 1300 * row_bytes)
    for name, value in (("memory_allocated", held), ("max_memory_allocated", held + SMALL * row_bytes)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    made = PromptGraphs(Upload(1 << 16, CPU), OFFSET, TILE, 8192, 256)
    assert made.affordable(lambda inputs: computed.append(len(inputs.tokens)) or inputs.tokens) == 1300
    assert computed == [SMALL]
    assert not PromptGraphs(Upload(1 << 10, CPU), OFFSET, TILE, 16, 4).affordable(lambda inputs: inputs.tokens)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_captured_before_is_not_computed_first(
    graphs: PromptGraphs, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    sizes = list[int]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs.clear()
    graphs.capture(
        lambda inputs: sizes.append(len(inputs.tokens)) or inputs.tokens, None, [(64, False), (32, False)], again=again
    )
    assert sizes == ([64, 32] if again else [64, 64, 32, 32])
    assert [len(logits) for _, logits in graphs.graphs.values()] == [64, 32]


@pytest.mark.parametrize("all_or_none", [False, True])
def test_graphs_that_the_memory_is_too_small_for_are_left_out_and_the_others_kept(
    graphs: PromptGraphs, monkeypatch: pytest.MonkeyPatch, all_or_none: bool
) -> None:
    """Except among ranks, which would wait for the one that lacks it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs.clear()
    tried: list[tuple[int, bool]] = []

    def variants() -> Iterator[tuple[int, bool]]:
        for size in reversed(graphs.sizes):
            for adapted in (False, True):
                tried.append((size, adapted))
                yield size, adapted

    def forward(inputs: GraphInputs) -> torch.Tensor:
        if len(inputs.tokens) == 512 or (len(inputs.tokens) == 448 and tried[-1][1]):
            raise torch.OutOfMemoryError("out of memory")
        return inputs.tokens

    if all_or_none:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.capture(forward, None, variants(), all_or_none=True)
        return
    assert graphs.capture(forward, None, variants()) == "2 sizes, 512 rows: out of memory"
    assert graphs.sizes == [32, 64, 96, 128, 192, 256, 320, 384]
    assert graphs.graphs.keys() == {(size, adapted) for size in graphs.sizes for adapted in (False, True)}
    assert [graphs.fit(step(1, tokens)) for tokens in (380, 440)] == [384, 0]


def test_results_of_graphs_keep_no_memory() -> None:
    """Those of 50 graphs with a large vocabulary would take a gigabyte."""
    whole = torch.arange(24.0).view(4, 6)
    found, memory = unowned(whole[1:, :5]), StorageWeakRef(whole.untyped_storage())
    whole += 100
    assert found.tolist() == whole[1:, :5].tolist()
    del whole
    assert memory.expired()


def test_an_executor_whose_steps_are_shorter_than_every_graph_has_none() -> None:
    assert not PromptGraphs(Upload(1 << 10, CPU), OFFSET, TILE, 16, 4).sizes
