"""Which sampling options an engine applies is found by asking it."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.schemas.requests import Sampling
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.support import ALL, TORCH_SAMPLER_1_2, TRTLLM_SAMPLER, ServedOptions, problem
from tests import standins
from tests.workers.engines.trtllm.conftest import ask, run

Make = Callable[..., Any]
PROMPT = list(range(40, 90))
TORCH = '{"sampler_type": "TorchSampler"}'
GREEDY = Sampling(temperature=0.0)


def served(engine: Any) -> ServedOptions:
    found: ServedOptions = engine.adapter.follower.options.served
    return found


def test_the_sampler_that_applies_them_is_chosen(make: Make) -> None:
    engine = make()
    assert served(engine) == TRTLLM_SAMPLER
    assert engine.info.ignored_options == ()


def test_with_torch_sampler_most_are_missing(make: Make) -> None:
    engine = make(override_engine_args=TORCH)
    assert served(engine) == TORCH_SAMPLER_1_2
    assert engine.info.ignored_options == ("seed",)


def test_speculation_forbids_the_choice(make: Make) -> None:
    speculation = '{"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}}'
    assert not served(make(override_engine_args=speculation)).penalties


@pytest.mark.parametrize("quirk", ["sampler_ignores", "min_tokens_count_prompt"])
def test_it_is_the_engine_that_is_asked_and_not_its_release(make: Make, quirks: Any, quirk: str) -> None:
    setattr(quirks, quirk, False)
    found = served(make(override_engine_args=TORCH))
    assert found.penalties is found.min_p is found.seed is (quirk == "sampler_ignores")
    assert found.min_tokens == ("output" if quirk == "min_tokens_count_prompt" else "all")


@pytest.mark.parametrize("variant", ["1.3", "1.4"])
def test_later_releases_apply_all_of_them(variant: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.configs.settings import WorkerSettings
    from penstock.infra.model import modeldir

    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    with standins.installed(variant):
        from penstock.workers.engines import trtllm

        settings = WorkerSettings(engine="trtllm", block_size=16, max_model_len=512, kv_blocks=64)
        engine = trtllm.from_settings(settings, modeldir.DEMO)
        try:
            assert served(engine) == ALL
        finally:
            engine.close()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_an_option_that_has_no_effect_is_refused(make: Make, given: dict[str, float], word: str) -> None:
    engine = make(override_engine_args=TORCH)
    with pytest.raises(RequestError, match=f"{word}.*sampler_type: TRTLLMSampler") as caught:
        engine.submit(ask("a", PROMPT, 4, Sampling(**given)))
    assert caught.value.code == "unsupported"
    assert run(engine, ask("b", PROMPT, 4, Sampling(seed=4), ignore_eos=True)).tokens("b")  # a seed is not refused


def test_min_tokens_that_counts_the_prompt_is_sent_as_the_sum(make: Make) -> None:
    engine = make(override_engine_args=TORCH)
    (end,) = {engine.info.eos_token_ids[0]}
    always = Sampling(temperature=0.0, logit_bias={end: 400.0})
    assert run(engine, ask("a", PROMPT, 9, always)).tokens("a") == [end]
    late = run(engine, ask("b", PROMPT, 9, always, min_tokens=4)).tokens("b")
    assert (late.index(end), len(late)) == (4, 5)
    continued = run(engine, ask("c", PROMPT, 9, always, min_tokens=4, generated=late[:2])).tokens("c")
    assert continued == late[2:]


def test_without_an_end_token_min_tokens_bars_nothing(make: Make) -> None:
    engine = make(override_engine_args=TORCH)
    last = engine.info.vocab_size - 1
    always = Sampling(temperature=0.0, logit_bias={last: 400.0})
    assert run(engine, ask("a", PROMPT, 3, always, min_tokens=3, ignore_eos=True)).tokens("a") == [last] * 3


def test_what_is_served_is_no_problem_and_what_was_not_asked_for_neither() -> None:
    nothing = ServedOptions(penalties=False, min_p=False, seed=False, alternatives=False, min_tokens="")
    assert problem(Sampling(seed=3, logprobs=0, prompt_logprobs=5), 0, nothing) == ""
    assert "min_tokens" in problem(GREEDY, 1, nothing)
    assert problem(Sampling(min_p=0.3, logprobs=3, presence_penalty=1.0), 9, ServedOptions()) == ""
