"""The native engine with proposed tokens answers as without, on real models."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import Output, SequenceRequest
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from tests.properties import some
from tests.workers.engines.native.models import drain, expected, prompt, request, run, tokens

DRAFT = str(modeldir.DEMO.parent / "demo-draft")
QUESTION = tuple(range(300, 340))
PLAIN: dict[str, Any] = {"device": "cpu", "kv_blocks": 96, "block_size": 16, "dtype": "float32"}


@cache
def demo(name: str, **options: Any) -> ScheduledEngine:
    return build(str(modeldir.DEMO), NativeOptions(**PLAIN | {"speculative_model": name} | options))


@cache
def undisturbed(tag: str) -> dict[object, list[Output]]:
    """Answers without speculation."""
    return run(demo(""), asked(tag=tag))


def asked(count: int = 28, **more: Any) -> list[SequenceRequest]:
    """Greedy and seeded, of different lengths, with and without EOS."""
    return [
        SequenceRequest(
            key=(n, more.get("tag")),
            prompt=[*QUESTION[: 10 + n], 17 * n],
            sampling=Sampling(temperature=0.7 * (n % 2), seed=n, top_p=0.9, logprobs=2 if n == 3 else None),
            stop=Stop(count - n, min_tokens=n, ignore_eos=n > 3),
            choice=n,
            generated=more.get("generated", ()),
        )
        for n in range(6)
    ]


def same(found: dict[object, list[Output]], wanted: dict[object, list[Output]]) -> None:
    assert tokens(found) == tokens(wanted)
    for key, outputs in wanted.items():
        assert [(each.finish, each.stop_token) for each in outputs] == [
            (each.finish, each.stop_token) for each in found[key]
        ]
        for one, other in zip(outputs, found[key], strict=True):
            if one.logprob is not None:
                assert other.logprob is not None
                assert other.logprob.logprob == pytest.approx(one.logprob.logprob, abs=1e-4)
                assert [token for token, _ in other.logprob.top] == [token for token, _ in one.logprob.top]


@pytest.mark.parametrize("name", [DRAFT, "ngram"])
@pytest.mark.parametrize(
    "options",
    some(
        [{}, {"max_batched_tokens": 11}, {"kv_blocks": 9}, {"prefix_cache": False}, {"num_speculative_tokens": 9}],
        {},
        {"kv_blocks": 9},
    ),
    ids=str,
)
def test_answers_are_those_without_speculation(name: str, options: dict[str, Any]) -> None:
    native = build(str(modeldir.DEMO), NativeOptions(**PLAIN | {"speculative_model": name} | options))
    wanted = undisturbed("a")
    same(run(native, asked(tag="a")), wanted)
    same(run(native, asked(tag="a")), wanted)  # from the prefix cache
    stats = native.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    assert ("kv_blocks" in options) == (stats.preemptions > 0)


def test_the_draft_model_is_mostly_right_and_its_cache_hits_too() -> None:
    native = build(str(modeldir.DEMO), NativeOptions(**PLAIN | {"speculative_model": DRAFT}))
    steps = []
    for turn in range(2):
        native.submit(SequenceRequest(turn, list(QUESTION), Sampling(temperature=0), Stop(33, ignore_eos=True)))
        steps.append(len(drain(native)))
    assert max(steps) < 20
    assert native.stats().hit_tokens > 0


def test_an_answer_continues_on_another_engine() -> None:
    whole = [output.token for output in run(demo(""), asked()[1:2])[1, None]]
    (rest,) = run(demo(DRAFT), asked(generated=whole[:7])[1:2]).values()
    assert [output.token for output in rest] == whole[7:]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9, seed=4, repetition_penalty=1.3),
        Sampling(temperature=0.9, seed=4, presence_penalty=0.5, frequency_penalty=0.2),
        Sampling(temperature=0.9, seed=4, logit_bias={17: 4.0, 18: -4.0}, top_k=20, min_p=0.01),
    ],
)
def test_sampling_options_keep_their_effect(sampling: Sampling) -> None:
    item = SequenceRequest("a", list(QUESTION), sampling, Stop(30, ignore_eos=True))
    assert tokens(run(demo(DRAFT), [item])) == tokens(run(demo(""), [item]))


@pytest.mark.parametrize(
    ("name", "proposes", "blocks"),
    some([
        ("gemma2", "another", 64), ("gemma3", "itself", 14), ("gemma3", "ngram", 64), ("gpt_oss", "another", 14),
        ("gpt_oss", "ngram", 64), ("mistral", "itself", 64), ("mistral", "itself", 14), ("mistral", "ngram", 14),
    ], ("gemma3", "itself", 14), ("gpt_oss", "ngram", 64)),
)  # fmt: skip
def test_models_with_sliding_windows_verify_proposals(
    name: str, proposes: str, blocks: int, model_dir: Callable[[str], Path]
) -> None:
    """Also after preemptions, and with host memory."""
    drafts = {"itself": model_dir(name), "another": model_dir("llama")}
    options = NativeOptions(
        device="cpu", block_size=8, kv_blocks=blocks, speculative_model=str(drafts.get(proposes, proposes)),
        prompt_lookup_min=1, kv_offloading_size=0.0 if blocks == 64 else 4 / 1024, max_batched_tokens=64,
    )  # fmt: skip
    native = build(str(model_dir(name)), options)
    assert native.scheduler.kv_cache.windows is not None
    lengths = (9, 33, 47)
    wanted = {n: expected(model_dir(name), prompt(n), 60) for n in lengths}
    for _ in range(2):
        assert tokens(run(native, [request(n, prompt(n), 60) for n in lengths])) == wanted
    stats = native.stats()
    assert stats.draft_tokens > 0
    assert proposes != "itself" or blocks < 64 or stats.accepted_tokens == stats.draft_tokens


def test_a_model_with_latents_verifies_ngrams(model_dir: Callable[[str], Path]) -> None:
    directory = model_dir("deepseek_v3")
    options = NativeOptions(device="cpu", block_size=8, kv_blocks=64, speculative_model="ngram", prompt_lookup_min=1)
    native = build(str(directory), options)
    found = tokens(run(native, [request(n, prompt(n), 60) for n in (9, 33, 47)]))
    assert found == {n: expected(directory, prompt(n), 60) for n in (9, 33, 47)}
    assert native.stats().draft_tokens > 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_model_drafts_for_itself_without_a_wrong_proposal(name: str, model_dir: Callable[[str], Path]) -> None:
    directory = model_dir(name)
    native = build(str(directory), NativeOptions(device="cpu", kv_blocks=40, speculative_model=str(directory)))
    run(native, [request(n, prompt(20, n), 50, Sampling(temperature=0.8, seed=n)) for n in range(3)])
    stats = native.stats()
    assert stats.draft_tokens == stats.accepted_tokens > 100


def test_drafts_that_cannot_be_used_are_refused(model_dir: Callable[[str], Path]) -> None:
    for model, options, message in (
        (model_dir("llama"), {"speculative_model": DRAFT}, "same tokenizer"),
        (model_dir("llama"), {"speculative_model": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min"),
        (model_dir("llama"), {"speculative_model": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
    ):
        with pytest.raises((UnsupportedModel, ValueError), match=message):
            build(str(model), NativeOptions(device="cpu", kv_blocks=10, **options))  # type: ignore[arg-type]
