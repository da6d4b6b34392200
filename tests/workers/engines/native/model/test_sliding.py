"""Models with sliding windows: blocks behind a window are freed, and the output stays transformers'."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pools import SlidingLayers, pool_sizes, sliding_layers
from tests.workers.engines.native.models import expected, prompt, request, run, tokens

COUNT = 180


def engine(directory: Path, **options: object) -> ScheduledEngine:
    defaults = {"block_size": 8, "kv_blocks": 48, "device": "cpu", "max_running": 4, "max_batched_tokens": 32}
    return build(str(directory), NativeOptions(**defaults | options))  # type: ignore[arg-type]


def steps(native: ScheduledEngine, count: int) -> tuple[list[int], int]:
    """Tokens of one answer, and the most rows it held."""
    rows, found = native.scheduler.kv_cache.windows, []
    assert rows is not None
    most = 0
    native.submit(request("a", prompt(50), count))
    while native.has_work():
        found += [output.token for output in native.step().outputs]
        most = max(most, rows.used_blocks)
    return found, most


@pytest.mark.parametrize(("name", "bound"), [("gemma3", 6), ("gpt_oss", 6), ("mistral", 7)])
def test_a_long_answer_holds_no_more_than_window_and_prompt_chunk(
    name: str, bound: int, model_dir: Callable[[str], Path]
) -> None:
    """The bound: 32 tokens of a chunk in 4 blocks of 8, and a window of 8 (12) tokens before them."""
    answer, most = steps(engine(model_dir(name)), COUNT)
    assert answer == expected(model_dir(name), prompt(50), COUNT)
    assert most <= bound


def test_a_model_of_sliding_layers_only_answers_beyond_its_pool(model_dir: Callable[[str], Path]) -> None:
    native = engine(model_dir("mistral"), kv_blocks=10)
    assert native.info.total_blocks == 10  # 80 tokens
    answer, _ = steps(native, COUNT)
    assert answer == expected(model_dir("mistral"), prompt(50), COUNT)
    stats = native.stats()
    assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == 10


def test_a_hybrid_model_has_room_for_more_tokens_in_the_same_memory(model_dir: Callable[[str], Path]) -> None:
    one, two = (engine(model_dir("gemma3"), hybrid_kv_cache=hybrid) for hybrid in (False, True))
    assert two.info.total_blocks > one.info.total_blocks
    requests = [request(n, prompt(50, salt=n), 60) for n in range(6)]
    assert tokens(run(one, requests)) == tokens(run(two, requests))


def test_windows_beyond_the_longest_sequence_are_none(model_dir: Callable[[str], Path]) -> None:
    assert engine(model_dir("gemma3"), max_model_len=8).scheduler.kv_cache.windows is None
    assert sliding_layers((None, None), 100) is None


@pytest.mark.parametrize("blocks", [40, 1000, 100_000])
@pytest.mark.parametrize("model_len", [600, 8192, 131_072])
def test_both_pools_fit_into_the_memory_of_one(blocks: int, model_len: int) -> None:
    layers = sliding_layers([512] * 5 + [None], model_len)
    assert isinstance(layers, SlidingLayers)
    sizes = pool_sizes(layers, blocks, block_size=32, max_running=256, model_len=model_len)
    assert sizes.blocks * layers.full + sizes.rows * layers.sliding <= blocks * 6
    assert sizes.blocks >= blocks
    assert sizes.rows >= 17
