"""Models with sliding windows: blocks behind a window are freed, and the output stays transformers'."""

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.transfer import KV, WINDOWS
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.loading import load
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pools import SlidingLayers, make_pools, pool_sizes, sliding_layers
from penstock.workers.kv_transfer.transport_protocol import Transport
from penstock.workers.kv_transfer.transport_thread import open_transport
from tests.properties import some
from tests.workers.engines.native.models import drain, expected, prompt, request, run, tokens
from tests.workers.kv_transfer.loopback import LoopbackNetwork, open_loopback
from tests.workers.kv_transfer.support import needs_nixl

COUNT = 180
ROOT = root("revision")


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


def handed_off(
    directory: Path, length: int, opened: Callable[..., Transport] | None = None, **source_options: object
) -> None:
    """What two engines answer, one of the prompt and one behind it, is what ``generate`` does.

    The second computes nothing of the prompt, and of the sliding layers only a window has moved.
    """
    words, count = prompt(length), COUNT // 3
    source, target = engine(directory, **source_options), engine(directory, kv_blocks=56)
    run(source, [request("before", prompt(11, salt=3), 5)])
    opened = opened or partial(open_loopback, LoopbackNetwork())
    owner, reader = (opened(name, made.memory()) for name, made in (("owner", source), ("reader", target)))
    assert reader.connect(owner.endpoint).result(20) is None
    windows = source.scheduler.kv_cache.windows
    assert windows is not None
    source.submit(request("a", words, 1, root=ROOT, pin=True))
    results = drain(source)
    (pinned,) = (each for result in results for each in result.pinned)
    (first,) = (output.token for result in results for output in result.outputs)
    assert len(pinned.windows.rows) == -(-length // 8) - windows.first_block(length)
    digests = split(chain(pack_tokens(array("I", words)), 8, ROOT))
    assert target.kv_transfer is not None
    reservation = target.kv_transfer.reserve(digests, int(length % 8 > 0), 1, length)
    assert reservation is not None
    pools, into = source.memory(), reservation.blocks + reservation.tails
    for pool, theirs, mine, generations in (
        (KV, pinned.blocks, into, pinned.generations),
        (WINDOWS, pinned.windows.rows, [fill.row for fill in reservation.fills], pinned.windows.generations),
    ):
        if pools[pool].block_bytes:
            moved = reader.read(owner.endpoint, pool, theirs, mine, generations=generations).result(20)
            assert moved.bytes == len(mine) * pools[pool].block_bytes
    target.kv_transfer.adopt(reservation)
    assert source.release_pinned("a")
    target.submit(request("a", words, count, root=ROOT, digests=digests, generated=[first], reservation=reservation))
    results = drain(target)
    assert results[0].started[0].cached_tokens == length
    assert results[0].computed_tokens == 1
    answer = [first, *(output.token for result in results for output in result.outputs)]
    assert answer == expected(directory, words, count)
    again = tokens(run(target, [request("b", words, count, root=ROOT)]))["b"]
    assert again == answer, "from the prefix cache"
    for each in (owner, reader):
        each.close()


@pytest.mark.parametrize("name", some(["gemma2", "gemma3", "gpt_oss", "mistral"], "gpt_oss", "mistral"))
@pytest.mark.parametrize("length", some([5, 40, 77], 5, 77))
def test_a_prompt_prefilled_elsewhere_comes_with_its_window(
    name: str, length: int, model_dir: Callable[[str], Path]
) -> None:
    handed_off(model_dir(name), length)


def test_workers_with_host_memory_pair_with_those_without(model_dir: Callable[[str], Path]) -> None:
    handed_off(model_dir("gemma3"), 77, kv_offloading_size=4 / 1024)


@needs_nixl
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_windows_move_over_nixl(name: str, model_dir: Callable[[str], Path]) -> None:
    """Of sliding layers only, too, where the other pool has no bytes."""
    handed_off(model_dir(name), 77, lambda agent, pools: open_transport("nixl", f"{name}-{agent}", pools))


@pytest.mark.parametrize(("name", "bound"), some([("gemma3", 6), ("gpt_oss", 6), ("mistral", 7)], ("gemma3", 6)))
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


def test_what_a_token_takes_is_that_of_the_layers_without_windows(model_dir: Callable[[str], Path]) -> None:
    loaded, block = load(str(model_dir("gemma3")), device=torch.device("cpu"), dtype="float32"), 8 * 2 * 2 * 16 * 4
    options = NativeOptions(block_size=8, kv_blocks=48)
    one, two = (make_pools(loaded, options, 512, hybrid=hybrid).described() for hybrid in (False, True))
    assert one == {"tokens": 384, "bytes": 48 * 3 * block, "bytes_per_token": 3 * block // 8, "bytes_of_windows": 0}
    assert (two["bytes_per_token"], two["bytes_of_windows"]) == (block // 8, 2 * 2 * block)
    assert two["tokens"] > one["tokens"]
    assert 0.9 * one["bytes"] < two["bytes"] <= one["bytes"]


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
