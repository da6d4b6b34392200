"""Greedy output equals transformers' own generate(), token for token, however the work is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.attention import ReferenceAttention, TokenSpan
from penstock.workers.engines.native.model.loading import load
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.native.model.pool import KvPool
from tests.properties import some
from tests.workers.engines.native.models import CONFIGS, drain, expected, prompt, reference, request, run, tokens

LENGTHS = (1, 9, 13, 16, 33, 47)  # around block borders and windows (8 and 12), and far beyond
COUNT = 24


# One of each kind of layers that a cut of the work may touch.
CUT = ("deepseek_v2", "gemma3", "gpt_oss", "llama", "qwen3_moe")
# What the others have, but for how they choose experts.
WHOLE = (*CUT, "deepseek_v3", "gemma2", "glm4_moe", "mistral", "phi3", "qwen3")


@pytest.fixture(params=some(sorted(CONFIGS), *WHOLE))
def each_directory(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> Path:
    return model_dir(request.param)


@pytest.fixture(params=some(sorted(CONFIGS), *CUT))
def directory(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> Path:
    return model_dir(request.param)


def engine(directory: Path, **options: Any) -> ScheduledEngine:
    return build(str(directory), NativeOptions(**{"block_size": 8, "kv_blocks": 64, "device": "cpu", **options}))


def wanted(directory: Path) -> dict[object, list[int]]:
    return {n: expected(directory, prompt(n), COUNT) for n in LENGTHS}


def test_one_at_a_time(each_directory: Path) -> None:
    native = engine(each_directory)
    answers = {n: tokens(run(native, [request(n, prompt(n), COUNT)]))[n] for n in LENGTHS}
    assert answers == wanted(each_directory)
    assert any(len(set(answer)) > COUNT // 2 for answer in answers.values())  # not one token over and over


def test_all_in_one_batch(directory: Path) -> None:
    assert tokens(run(engine(directory), [request(n, prompt(n), COUNT) for n in LENGTHS])) == wanted(directory)


def test_again_from_the_prefix_cache(directory: Path) -> None:
    native = engine(directory, kv_blocks=128)
    requests = [request(n, prompt(n), COUNT) for n in LENGTHS]
    run(native, requests)
    for item in requests:
        native.submit(item)
    results = drain(native)
    cached = {start.key: start.cached_tokens for result in results for start in result.started}
    assert cached == {n: (n - 1) // 8 * 8 for n in LENGTHS}
    answers: dict[object, list[int]] = {}
    for output in (output for result in results for output in result.outputs):
        answers.setdefault(output.key, []).append(output.token)
    assert answers == wanted(directory)


def test_in_chunks_of_seven_tokens(directory: Path) -> None:
    native = engine(directory, max_batched_tokens=7)
    assert tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS])) == wanted(directory)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_in_a_pool_too_small_for_all(directory: Path, prefix_cache: bool) -> None:
    native = engine(directory, kv_blocks=14, prefix_cache=prefix_cache)
    assert tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS])) == wanted(directory)
    assert native.stats().preemptions > 0


def test_requests_that_come_while_others_run(directory: Path) -> None:
    native, answers = engine(directory, max_batched_tokens=20), {}
    waiting = list(LENGTHS)
    while waiting or native.has_work():
        if waiting:
            n = waiting.pop()
            native.submit(request(n, prompt(n), COUNT))
        for output in native.step().outputs:
            answers.setdefault(output.key, []).append(output.token)
    assert answers == wanted(directory)


def test_continued_from_any_token(directory: Path) -> None:
    whole = expected(directory, prompt(33), COUNT)
    for cut in (1, 7, COUNT - 1):
        rest = run(engine(directory), [request(0, prompt(33), COUNT, generated=whole[:cut])])
        assert tokens(rest)[0] == whole[cut:]


def test_what_earlier_owners_left_in_a_block_reaches_nobody(directory: Path) -> None:
    native = engine(directory, prefix_cache=False)
    executor: Any = native.executor
    executor.pool.data.fill_(float("nan"))
    assert tokens(run(native, [request(n, prompt(n), COUNT) for n in LENGTHS])) == wanted(directory)


def test_long_prefill_in_tiles_of_queries(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.engines.native.model.attention.TILE_SCORES", 1)
    native = engine(directory, max_batched_tokens=60)
    answer = tokens(run(native, [request(0, prompt(150), COUNT)]))
    assert answer[0] == expected(directory, prompt(150), COUNT)


def test_rows_of_a_step_differ_from_a_plain_forward_by_rounding_only(each_directory: Path) -> None:
    model = load(str(each_directory), device=torch.device("cpu"))
    pool = KvPool(model.shape, 16, 8, model.dtype, model.device)
    words = torch.tensor(prompt(41))
    with torch.inference_mode():
        paged = ReferenceAttention(pool, [TokenSpan(0, 0, 41, [9, 3, 11, 0, 7, 15])])
        ours = model.logits(words, torch.arange(41), torch.arange(41), paged)
        theirs = reference(each_directory)(words[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
