"""Logits processors in the native engine: their place among the other options, and who is touched by their errors."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import structlog
import torch

from penstock.configs.flags import parse
from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import LogitsProcessor, Sampling, Stop
from penstock.workers.engines import mock, native
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import Output, RequestError, SequenceRequest
from penstock.workers.engines.logits.registry import registry_from_settings
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.logits.support import OWN, chosen
from tests.workers.engines.native.models import run

OWN_ONES = tuple(f"{OWN}:{name}" for name in ("Plus", "RaisesHalfway", "Returns", "Spoils", "TopK"))
TEXT = "Grüße, 42 harbours!"


@cache
def model() -> modeldir.ModelDir:
    return modeldir.load(modeldir.DEMO)


def engine(apply: str = "", **options: Any) -> ScheduledEngine:
    settings = WorkerSettings(logits_processor=OWN_ONES, default_logits_processors=apply)
    processors = registry_from_settings(settings, modeldir.DEMO)
    given: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "threads": 1} | options
    return build(str(modeldir.DEMO), NativeOptions(**given), processors=processors)


@pytest.fixture(scope="module")
def demo() -> ScheduledEngine:
    return engine()


def ask(
    *processors: LogitsProcessor,
    key: object = "a",
    question: str = "What is 347 + 586?",
    count: int = 24,
    stop: dict[str, Any] | None = None,
    generated: Sequence[int] = (),
    choice: int = 0,
    **sampling: Any,
) -> SequenceRequest:
    template = model().template
    assert template is not None
    prompt = model().tokenizer.encode(template.render([{"role": "user", "content": question}], None)).ids
    options = Sampling(**{"temperature": 0.0, "logits_processors": processors, **sampling})
    return SequenceRequest(
        key=key, prompt=prompt, sampling=options, stop=Stop(count, **stop or {}), generated=generated, choice=choice
    )


def answer(engine: ScheduledEngine, request: SequenceRequest) -> list[int]:
    return ids(run(engine, [request])[request.key])


def ids(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs]


def text(tokens: Sequence[int]) -> str:
    shown: str = model().tokenizer.decode(list(tokens), skip_special_tokens=True)
    return shown


def digits() -> list[int]:
    texts = model().tokenizer.decode_batch([[token] for token in range(model().vocab_size)])
    return [token for token, shown in enumerate(texts) if shown.isdigit()]


def test_a_forced_text_comes_out_verbatim_and_ends(demo: ScheduledEngine) -> None:
    outputs = run(demo, [ask(chosen("forced_text", text=TEXT), count=60)])["a"]
    assert text(ids(outputs)) == TEXT
    assert (outputs[-1].finish, outputs[-1].stop_token) == ("stop", model().eos_token_ids[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_of_digits_leaves_only_digits(demo: ScheduledEngine, temperature: float) -> None:
    mask = chosen("allowed_tokens", tokens=digits(), end=False)
    shown = text(answer(demo, ask(mask, count=12, temperature=temperature, seed=3)))
    assert len(shown) >= 12
    assert shown.isdigit()


def test_the_temperature_processor_is_the_option_of_that_name(demo: ScheduledEngine) -> None:
    def answers(*processors: LogitsProcessor, temperature: float) -> list[list[int]]:
        told = "Tell me something."
        outputs = run(
            demo, [ask(*processors, temperature=temperature, seed=seed, key=seed, question=told) for seed in range(6)]
        )
        return [ids(outputs[seed]) for seed in range(6)]

    option = answers(temperature=2.5)
    assert option == answers(chosen("temperature", temperature=2.5), temperature=1.0)
    assert option != answers(temperature=1.0)


def test_choices_neighbours_and_preempted_sequences_answer_as_if_alone() -> None:
    def asked() -> list[SequenceRequest]:
        endless: dict[str, Any] = {"stop": {"ignore_eos": True}, "count": 60, "temperature": 1.0}
        return [
            ask(chosen("forced_text", text=TEXT * 3), key=0, **endless),
            ask(key=1, seed=1, **endless),
            ask(chosen("temperature", temperature=0.5), key=2, seed=2, **endless),
            ask(chosen("allowed_tokens", tokens=digits()), key=3, seed=3, choice=1, **endless),
            ask(chosen("RaisesHalfway"), key=4, seed=4, **endless),
        ]

    alone = engine(block_size=16, kv_blocks=64)
    expected = {each.key: answer(alone, each) for each in asked()}
    tight = engine(block_size=16, kv_blocks=16)
    together = run(tight, asked())
    assert tight.stats().preemptions
    assert {key: ids(outputs) for key, outputs in together.items()} == expected
    assert expected[4] == answer(alone, ask(key=4, seed=4, stop={"ignore_eos": True}, count=60, temperature=1.0))
    assert tight.stats().logits_errors >= 60


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_resumed_answer_continues_where_it_stopped(demo: ScheduledEngine, cut: int) -> None:
    forced = chosen("forced_text", text=TEXT)
    whole = answer(demo, ask(forced, count=60))
    assert answer(demo, ask(forced, generated=whole[:cut], count=60)) == whole[cut:]


@pytest.mark.parametrize(
    "broken",
    [chosen("RaisesHalfway"), chosen("Returns"), chosen("Spoils", value="nan"), chosen("Spoils", value="-inf")],
)
def test_a_broken_processor_changes_no_answer_is_counted_and_logged_once(broken: LogitsProcessor) -> None:
    mine = engine()
    expected = answer(mine, ask())
    with structlog.testing.capture_logs() as logged:
        again = run(mine, [ask(broken), ask(key="b")])
    assert ids(again["a"]) == ids(again["b"]) == expected
    failed = 0 if broken.name == "Returns" else len(expected)
    assert mine.stats().logits_errors == failed
    assert len([line for line in logged if line["event"] == "logits_processor_failed"]) == min(failed, 1)


def test_logprobs_are_of_what_the_processors_left(demo: ScheduledEngine) -> None:
    allowed = digits()[:3]
    mask = chosen("allowed_tokens", tokens=allowed, end=False)
    for output in run(demo, [ask(mask, count=3, logprobs=5, logit_bias={allowed[0]: 100.0})])["a"]:
        assert output.logprob is not None
        top = dict(output.logprob.top)
        assert set(top) == set(allowed)  # nothing impossible, though five were asked for
        assert float(torch.tensor(list(top.values())).logsumexp(0)) == pytest.approx(0, abs=1e-5)
        assert output.token == allowed[0]
        assert output.logprob.logprob == pytest.approx(top[output.token])


def test_other_options_come_after_the_processors(demo: ScheduledEngine) -> None:
    one, other = digits()[:2]
    mask = chosen("allowed_tokens", tokens=[one, other], end=False)
    best = answer(demo, ask(mask, count=1))[0]
    second = other if best == one else one
    assert answer(demo, ask(mask, count=1, logit_bias={best: -100.0})) == [second]
    assert answer(demo, ask(mask, count=1, logit_bias={digits()[5]: 100.0})) == [best]  # excluded stays excluded


def test_an_end_that_is_all_that_is_left_comes_before_min_tokens_and_does_not_end(demo: ScheduledEngine) -> None:
    outputs = run(demo, [ask(chosen("forced_text", text="7"), count=9, stop={"min_tokens": 5})])["a"]
    assert text(ids(outputs)) == "7"
    assert (len(outputs), outputs[-1].finish) == (6, "stop")


def test_min_tokens_holds_where_there_is_a_choice(demo: ScheduledEngine) -> None:
    mask = chosen("allowed_tokens", tokens=digits())
    answered = answer(demo, ask(mask, count=30, stop={"min_tokens": 20}))
    assert len(answered) > 20
    assert not set(answered[:20]) & set(model().eos_token_ids)


def test_a_worker_can_apply_some_to_every_request() -> None:
    everybody = engine('[{"name": "forced_text", "args": {"text": "Hello world!"}}]')
    assert text(answer(everybody, ask())) == "Hello world!"


def test_the_environment_can_force_a_text_on_a_worker_for_tests_of_what_is_around_it() -> None:
    argv = ["--device", "cpu", "--threads", "1", "--kv-blocks", "32"]
    environ = {"PENSTOCK_DEFAULT_LOGITS_PROCESSORS": '[{"name": "forced_text", "args": {"text": "Hello world!"}}]'}
    for given, words in ((environ, "Hello world!"), ({}, "933")):
        settings = parse(WorkerSettings, argv, prog="worker", environ=given)
        assert words in text(answer(native.from_settings(settings, modeldir.DEMO), ask()))


def test_names_are_reported_and_others_are_refused_without_harm(demo: ScheduledEngine) -> None:
    assert set(demo.info.logits_processors) >= {"temperature", "forced_text", "allowed_tokens", "Plus"}
    for wrong in (chosen("nobody"), chosen("temperature", temperature=0), chosen("temperature", warmth=1)):
        with pytest.raises(RequestError) as caught:
            demo.submit(ask(wrong))
        assert caught.value.code == Code.invalid_request
        assert wrong.name in caught.value.message
    assert not demo.has_work()
    assert "933" in text(answer(demo, ask()))


def test_engines_without_processors_refuse_them() -> None:
    bare = build(str(modeldir.DEMO), NativeOptions(device="cpu", kv_blocks=8))
    simulated = mock.build(mock.MockOptions(vocab_size=model().vocab_size))
    for each in (bare, simulated):
        assert each.info.logits_processors == ()
        with pytest.raises(RequestError, match="registered: none") as caught:
            each.submit(ask(chosen("temperature", temperature=1)))
        assert caught.value.code == Code.invalid_request
