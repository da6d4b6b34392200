"""Log-probabilities of prompts equal those of a plain forward pass, however the work is cut."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.schemas.requests import Sampling
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import Engine, SequenceRequest
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model import sampler
from penstock.workers.engines.native.model.options import NativeOptions
from tests.properties import some
from tests.workers.engines.native.models import CONFIGS, drain, prompt, reference, request, run

LENGTHS = (1, 2, 9, 16, 33, 47)
TOP = 4


@pytest.fixture(params=some(sorted(CONFIGS), "deepseek_v2", "gemma3", "gpt_oss", "llama", "qwen3_moe"))
def directory(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> Path:
    return model_dir(request.param)


def engine(directory: Path, **options: Any) -> Engine:
    return build(str(directory), NativeOptions(**{"block_size": 8, "kv_blocks": 64, "device": "cpu", **options}))


def asked(length: int, *, top: int = TOP, score: int = 1, **more: Any) -> SequenceRequest:
    sampling = Sampling(temperature=0, prompt_logprobs=top)
    return request(length, prompt(length), 3, sampling, score=score, **more)


def scored(engine: Engine, *requests: SequenceRequest) -> dict[object, list[Logprob]]:
    for item in requests:
        engine.submit(item)
    found: dict[object, list[Logprob]] = {}
    for result in drain(engine):
        for key, first, logprobs in result.scored:
            assert first == 1 + len(found.setdefault(key, []))
            found[key] += logprobs
    return found


def check(values: Sequence[Logprob], directory: Path, words: Sequence[int], top: int = TOP, first: int = 1) -> None:
    """Against one forward pass of transformers over the whole prompt."""
    with torch.inference_mode():
        wanted = reference(directory)(torch.tensor([words])).logits[0].log_softmax(-1)
    assert len(values) == len(words) - first
    for position, value in enumerate(values, first):
        row = wanted[position - 1]
        assert value.logprob == pytest.approx(float(row[words[position]]), abs=1e-4)
        assert value.rank == int((row > row[words[position]]).sum()) + 1
        best = row.topk(top)
        assert [token for token, _ in value.top] == best.indices.tolist()
        assert [each for _, each in value.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_whole_and_many_in_one_batch_beside_some_that_do_not_ask(directory: Path) -> None:
    native = engine(directory)
    found = scored(native, *(asked(n) for n in LENGTHS), request("plain", prompt(20, 1), 8))
    assert set(found) == set(LENGTHS) - {1}
    for n in LENGTHS[1:]:
        check(found[n], directory, prompt(n))


@pytest.mark.parametrize("chunk", [1, 7])
def test_in_chunks(directory: Path, chunk: int) -> None:
    found = scored(engine(directory, max_batched_tokens=chunk), *(asked(n) for n in (9, 33)))
    for n in (9, 33):
        check(found[n], directory, prompt(n))


def test_with_the_prompt_cached_before(directory: Path) -> None:
    native = engine(directory)
    plain = run(native, [request(47, prompt(47), 3)])
    native.submit(asked(47))
    results = drain(native)
    assert [started.cached_tokens for result in results for started in result.started] == [0]
    check([each for result in results for part in result.scored for each in part.logprobs], directory, prompt(47))
    assert [o.token for result in results for o in result.outputs] == [o.token for o in plain[47]]


def test_from_where_an_earlier_attempt_was_on_what_is_cached(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("llama")
    native = engine(directory)
    run(native, [request(47, prompt(47), 3)])
    native.submit(asked(47, score=30))
    results = drain(native)
    assert [started.cached_tokens for result in results for started in result.started] == [24]
    values = [each for result in results for part in result.scored for each in part.logprobs]
    check(values, directory, prompt(47), first=30)


def test_logits_exist_in_pieces_only(model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no more rows than the scheduler's limit, and float32 copies of a few of them at a time."""
    directory = model_dir("llama")
    native: Any = engine(directory, max_batched_tokens=400)
    native.scheduler.scoring.max_tokens = 100
    rows, shapes = [], []
    inner, softmax = native.executor.model.forward.lm_head.forward, torch.Tensor.log_softmax

    def seen(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[1])
        return inner(hidden)

    def softened(self: torch.Tensor, dim: int) -> torch.Tensor:
        shapes.append(self.shape[0])
        return softmax(self, dim=dim)

    monkeypatch.setattr(native.executor.model.forward.lm_head, "forward", seen)
    monkeypatch.setattr(torch.Tensor, "log_softmax", softened)
    found = scored(native, asked(301))
    monkeypatch.undo()
    assert max(rows) == 100
    assert max(shapes) == sampler._SCORED_ROWS
    check(found[301], directory, prompt(301))


@pytest.mark.parametrize("top", [0, 1, 20])
def test_as_many_of_the_best_as_wanted(model_dir: Callable[[str], Path], top: int) -> None:
    directory = model_dir("qwen3")
    check(scored(engine(directory), asked(33, top=top))[33], directory, prompt(33), top)


def test_sampling_options_leave_the_prompt_s_alone(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("llama")
    hot = Sampling(temperature=1.5, seed=3, logit_bias={7: 50.0}, repetition_penalty=1.5, prompt_logprobs=TOP)
    native = engine(directory)
    native.submit(request(33, prompt(33), 3, hot, score=1))
    values = [each for result in drain(native) for part in result.scored for each in part.logprobs]
    check(values, directory, prompt(33))


def test_who_does_not_ask_has_no_row_more(model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    native: Any = engine(model_dir("llama"))
    rows = []
    inner = native.executor.model.forward.lm_head.forward

    def seen(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[1])
        return inner(hidden)

    monkeypatch.setattr(native.executor.model.forward.lm_head, "forward", seen)
    run(native, [request(33, prompt(33), 3)])
    assert rows == [1, 1, 1]
