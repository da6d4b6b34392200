"""The contract of all engines; see ``contract.py``. Run it on real hardware with ``make test-trtllm``."""

import contextlib
import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.infra.constraints.constraint_grammar import CHOICE, LARK, REGEX
from penstock.infra.model import modeldir
from penstock.infra.model.adapter import read_adapter
from penstock.schemas.block_hashes import root
from penstock.schemas.errors import Code
from penstock.schemas.fleet import adapter_id
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK, Constraint, Sampling
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import PinnedPrompt, RequestError, WeightsEngine
from tests import standins
from tests.adapters import other_weights, write_adapter
from tests.properties import some
from tests.workers.engines.contract import (
    ALTERNATIVES,
    BARRED,
    BIAS,
    BLOCK,
    BUDGET,
    CONSTRAINTS,
    CONTINUED,
    ENDING,
    EOS,
    HANDOFF,
    LIMIT,
    MIN_P,
    MODEL,
    PENALTIES,
    POOL,
    RANKS,
    SEEDED_RESUME,
    SEEDS,
    SLOTS,
    SMALL_POOL,
    SUBJECTS,
    TENANTS,
    WORDS,
    Driver,
    Subject,
    ask,
    carried_on,
    copy_blocks,
    fold,
    made,
    names,
    prefilled,
)

PROMPT = WORDS[5:105]
DRAWN = Sampling(temperature=0.9, seed=11)
TENANT = b"another tenant's"
Make = Callable[..., Driver]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.slow if each.variant else ()) for each in SUBJECTS],
    ids=lambda subject: subject.label,
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found: Subject = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with found.present(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path_factory.mktemp("kv")))
        yield found
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first and last layer: its tokenizer and sizes, in a third of the time."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {name.replace(".7.", ".1."): weights[name] for name in weights if not re.search(r"layers\.[1-6]\.", name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(subject: Subject, shallow: Path) -> Path:
    """For tests with constraints and scores, whose words matter."""
    return MODEL if subject.real else shallow


@pytest.fixture(scope="module")
def shared(subject: Subject, model: Path) -> Iterator[Driver]:
    """For tests that leave nothing behind but cached blocks: no test may depend on what is cached."""
    with made(subject, model) as driver:
        yield driver


@pytest.fixture
def make(subject: Subject) -> Iterator[Make]:
    """An engine of the test's own."""
    if subject.single and subject.real:
        pytest.skip("a process has one engine of this package at a time")
    with contextlib.ExitStack() as open_ones:
        yield lambda **options: open_ones.enter_context(made(subject, **options))


def needs(subject: Subject, clause: str) -> None:
    if clause in subject.lacks:
        pytest.skip(subject.lacks[clause])


def other_than(tokens: list[int], after: int) -> int:
    """A token that an answer has behind position ``after`` and not before."""
    return next(token for token in tokens[after:] if token not in tokens[:after])


# -- what it says of itself


def test_info_has_the_sizes_that_were_asked_for(shared: Driver) -> None:
    info = shared.engine.info
    assert (info.block_size, info.max_model_len, info.slots, info.vocab_size) == (BLOCK, LIMIT, SLOTS, 1280)
    assert (info.total_blocks, info.max_batched_tokens) == (POOL, BUDGET)
    assert info.eos_token_ids
    assert info.kv_events


# -- weights that change


ROOT_2 = b"another revision"


@pytest.fixture(scope="module")
def trained(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of ``make`` with other weights."""
    return other_weights(subject.quick, tmp_path_factory.mktemp("trained") / "model")


def changing(
    subject: Subject, make: Make, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Driver, WeightsEngine]:
    """An engine of ``make`` whose weights change. vLLM's stand-in is as a build for GPUs."""
    if subject.real and not torch.cuda.is_available():
        pytest.skip("vLLM's CPU build does not sleep, and keeps the weights of tied heads")
    if subject.name == "vllm":
        monkeypatch.setenv("VLLM_STANDIN_PLATFORM", "cuda")
        options["device"] = "auto"
    driver = make(**options)
    if driver.engine.weights is None:
        pytest.skip("its weights stay as they are, on the device")
    return driver, driver.engine.weights


def test_other_weights_answer_as_an_engine_that_was_started_with_them(
    subject: Subject, make: Make, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that run keep their tokens and go on; nothing that was cached is found again."""
    driver, weights = changing(subject, make, monkeypatch)
    asked = [ask(number, PROMPT[number:], 12) for number in (0, 1)]
    before = driver.run(*asked)
    driver.engine.submit(ask("runs", PROMPT, 24))
    driver.engine.submit(ask("waits", PROMPT, 12))
    driver.until(lambda: len(driver.seen.of("runs")) > 3, "some tokens")
    weights.hold()
    driver.until(lambda: weights.settled, "the end of the step")
    weights.replace(weights.read(trained), lambda key, generated: ROOT_2)
    kept = driver.seen.tokens("runs")
    driver.until(lambda: not driver.fold(), "an empty cache")
    assert driver.seen.tokens("runs") == kept
    weights.proceed()
    driver.until(lambda: {"runs", "waits"} <= driver.seen.ended(), "their ends")
    after = driver.run(*(ask(number, PROMPT[number:], 12, base=ROOT_2) for number in (0, 1)))
    driver.remembers(PROMPT, ROOT_2)
    assert not set(driver.fold()) & set(names(PROMPT))
    driver.idle()
    monkeypatch.undo()
    fresh = make(model=trained)
    for number in (0, 1):
        assert fresh.answer(ask(number, PROMPT[number:], 12)) == after.tokens(number)
    tokens = driver.seen.tokens("runs")
    assert tokens[: len(kept)] == kept
    if driver.engine.info.name != "mock":  # its tokens depend on those before them only
        assert [after.tokens(number) for number in (0, 1)] != [before.tokens(number) for number in (0, 1)]
        rest = fresh.answer(ask("runs", PROMPT, 24, generated=kept))
        assert tokens == kept + rest


def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    subject: Subject, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, weights = changing(subject, make, monkeypatch)
    whole = driver.answer(ask(0, PROMPT, 12))
    weights.hold()
    with pytest.raises(RequestError) as refused:
        weights.replace(weights.read(tmp_path / "missing"), lambda key, generated: ROOT_2)
    assert "missing" in refused.value.message
    weights.proceed()
    seen = driver.run(ask(0, PROMPT, 12))
    assert seen.tokens() == whole
    assert seen.cached() > 0


def test_an_engine_that_slept_answers_as_before_without_its_cache(
    subject: Subject, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, weights = changing(subject, make, monkeypatch, sleep_after_s=3600.0)
    whole = driver.answer(ask(0, PROMPT, 12))
    for _ in range(2):
        weights.hold()
        weights.sleep()
        driver.engine.submit(ask("early", PROMPT, 12))
        driver.until(lambda: not driver.fold() and not driver.engine.has_work(), "an empty cache")
        assert not driver.seen.of("early")
        weights.wake()
        weights.proceed()
        driver.until(lambda: "early" in driver.seen.ended(), "its end")
        assert driver.seen.tokens("early")[-12:] == whole
        assert driver.seen.cached("early") == 0
        driver.idle()
        driver.seen = type(driver.seen)(events=driver.seen.events)


# -- tokens


def test_greedy_answers_are_the_same_alone_in_company_and_from_the_cache(shared: Driver) -> None:
    whole = shared.answer(ask(0, PROMPT, 12))
    assert len(whole) == 12
    seen = shared.run(*(ask(number, WORDS[number * 3 :][:50], 12) for number in (5, 1, 2)), ask(0, PROMPT, 12))
    assert seen.tokens() == whole
    assert shared.answer(ask(0, PROMPT, 12, base=b"r" * 16)) == whole


def test_a_long_prompt_is_computed_in_pieces_to_the_same_end(make: Make) -> None:
    prompt = WORDS[:200]
    wide, narrow = make(max_batched_tokens=LIMIT), make(max_batched_tokens=48)
    assert wide.answer(ask(0, prompt)) == narrow.answer(ask(0, prompt))


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_greedy_answers_are_resumed_where_they_stopped(shared: Driver, cut: int) -> None:
    whole = shared.answer(ask(0, PROMPT, 12))
    seen = shared.run(ask(0, PROMPT, 12, generated=whole[:cut]))
    assert seen.tokens() == whole[cut:]
    assert seen.outputs[-1].finish == "length"


@pytest.mark.parametrize("cut", [1, 7])
def test_drawn_answers_are_resumed_where_they_stopped(subject: Subject, shared: Driver, cut: int) -> None:
    needs(subject, SEEDED_RESUME)
    whole = shared.answer(ask(0, PROMPT, 12, DRAWN, choice=2))
    assert shared.answer(ask(0, PROMPT, 12, DRAWN, choice=2, generated=whole[:cut])) == whole[cut:]


def test_seeds_and_choices_decide_what_is_drawn(subject: Subject, shared: Driver) -> None:
    needs(subject, SEEDS)

    def drawn(seed: int, choice: int = 0) -> list[int]:
        return shared.answer(ask(0, PROMPT, 12, Sampling(temperature=1.0, seed=seed), choice=choice))

    assert drawn(3) == drawn(3)
    assert drawn(2**63 - 1) == drawn(2**63 - 1)
    assert len({tuple(drawn(*variant)) for variant in ((3, 0), (3, 1), (4, 0))}) == 3


def test_choices_of_a_request_run_together_as_each_alone(subject: Subject, shared: Driver) -> None:
    needs(subject, SEEDS)
    alone = [shared.answer(ask(0, PROMPT, 10, DRAWN, choice=choice)) for choice in range(3)]
    seen = shared.run(*(ask(("k", choice), PROMPT, 10, DRAWN, choice=choice) for choice in range(3)))
    assert [seen.tokens(("k", choice)) for choice in range(3)] == alone


def test_narrow_sampling_draws_the_best_token(subject: Subject, shared: Driver) -> None:
    greedy = shared.answer(ask(0, PROMPT))
    for narrow in (Sampling(top_k=1, seed=5), Sampling(top_p=1e-6, seed=5), Sampling(min_p=1.0, seed=5)):
        if narrow.min_p and MIN_P in subject.lacks:
            with pytest.raises(RequestError, match="min_p") as caught:
                shared.engine.submit(ask(0, PROMPT, 8, narrow))
            assert caught.value.code == Code.unsupported
        elif shared.engine.info.name != "mock":  # it knows nothing but the seed
            assert shared.answer(ask(0, PROMPT, 8, narrow)) == greedy


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
def test_a_penalty_counts_or_is_refused(subject: Subject, shared: Driver, penalty: dict[str, float]) -> None:
    needs(subject, BIAS)
    asked = ask(0, PROMPT, 16, Sampling(temperature=0.0, **penalty))
    if PENALTIES in subject.lacks:
        with pytest.raises(RequestError, match=next(iter(penalty))) as caught:
            shared.engine.submit(asked)
        assert caught.value.code == Code.unsupported
        return
    assert shared.answer(asked) != shared.answer(ask(0, PROMPT, 16))  # which goes round in circles


def test_bias_forces_a_token(subject: Subject, shared: Driver) -> None:
    needs(subject, BIAS)
    biased = Sampling(temperature=0.0, logit_bias={77: 1000.0})
    assert shared.answer(ask(0, PROMPT, 4, biased)) == [77] * 4


# -- constraints

CALL = Constraint(
    LARK, 'start: "<" WORD "> " %json {"type": "integer", "minimum": 100, "maximum": 999}\nWORD: /[a-z]{2,9}/'
)
SHAPES = {
    "expression": (Constraint(REGEX, r"([a-z]{2}, ){2,4}[0-9]{3}"), r"([a-z]{2}, ){2,4}[0-9]{3}"),
    "texts": (Constraint(CHOICE, '["maybe not", "certainly"]'), "maybe not|certainly"),
    "the gateway's": (CALL, r"<[a-z]{2,9}> [0-9]{3}"),
}


def text_of(tokens: list[int]) -> str:
    ends = modeldir.load(MODEL).eos_token_ids
    return modeldir.load(MODEL).tokenizer.decode([token for token in tokens if token not in ends])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_matches_its_constraint_also_behind_tokens_of_another_worker(
    subject: Subject, shared: Driver, shape: str
) -> None:
    needs(subject, CONSTRAINTS)
    constraint, pattern = SHAPES[shape]
    assert set(shared.engine.info.constraints) >= {CONSTRAINT, CONSTRAINT_LARK}
    stop = {"min_tokens": 90, "ignore_eos": True}  # the constraint says where an answer ends
    seen = shared.run(ask(0, PROMPT, 200, constraint=constraint, stop=stop))
    whole = seen.tokens()
    assert (seen.failures, seen.outputs[-1].finish) == ([], "stop")
    assert re.fullmatch(pattern, text_of(whole)), text_of(whole)
    for cut in (1, len(whole) - 2):
        if CONTINUED in subject.lacks:
            with pytest.raises(RequestError, match="disable_overlap_scheduler"):
                shared.engine.submit(ask(0, PROMPT, 200, constraint=constraint, stop=stop, generated=whole[:cut]))
            continue
        rest = shared.answer(ask(0, PROMPT, 200, constraint=constraint, stop=stop, generated=whole[:cut]))
        assert rest == whole[cut:] or shared.engine.info.name == "mock"
        assert re.fullmatch(pattern, text_of(whole[:cut] + rest))


def test_constrained_and_free_answers_run_together(subject: Subject, shared: Driver) -> None:
    needs(subject, CONSTRAINTS)
    free = shared.answer(ask(0, PROMPT, 12))
    constraint, pattern = SHAPES["expression"]
    seen = shared.run(ask("a", PROMPT, 12), ask("b", PROMPT, 99, constraint=constraint), ask("c", PROMPT, 12))
    assert seen.tokens("a") == seen.tokens("c") == free
    assert re.fullmatch(pattern, text_of(seen.tokens("b")))


def test_what_cannot_match_is_refused_before_it_runs(subject: Subject, shared: Driver) -> None:
    needs(subject, CONSTRAINTS)
    with pytest.raises(RequestError) as caught:
        shared.engine.submit(ask(0, PROMPT, constraint=Constraint(REGEX, "(")))
    assert caught.value.code == Code.invalid_request
    with pytest.raises(RequestError, match="disable_overlap" if CONTINUED in subject.lacks else "do not match"):
        shared.engine.submit(ask(0, PROMPT, constraint=SHAPES["texts"][0], generated=WORDS[:3]))


# -- ends


@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens_are_neither_more_nor_less(shared: Driver, count: int) -> None:
    seen = shared.run(ask(0, PROMPT, count))
    assert [output.finish for output in seen.outputs] == [""] * (count - 1) + ["length"]
    assert seen.outputs[-1].stop_token is None


def test_the_model_s_limit_ends_an_answer(shared: Driver) -> None:
    seen = shared.run(ask(0, WORDS[: LIMIT - 3], 100))
    assert (len(seen.outputs), seen.outputs[-1].finish) == (3, "length")
    assert len(shared.answer(ask(0, WORDS[: LIMIT - 1], 100))) == 1


def test_a_stop_id_ends_and_is_part_of_the_answer(shared: Driver) -> None:
    whole = shared.answer(ask(0, PROMPT, 12))
    stop = other_than(whole, 2)
    at = whole.index(stop)
    for ignore in (True, False):  # stop ids count also where the model's own are ignored
        seen = shared.run(ask(0, PROMPT, 12, stop={"token_ids": (stop, 1279), "ignore_eos": ignore}))
        assert seen.tokens() == whole[: at + 1]
        assert (seen.outputs[-1].finish, seen.outputs[-1].stop_token) == ("stop", stop)
    first = shared.run(ask(0, PROMPT, 12, stop={"token_ids": (whole[0],)}))
    assert (first.tokens(), first.outputs[0].finish) == (whole[:1], "stop")


def test_the_last_allowed_token_may_also_stop(shared: Driver) -> None:
    whole = shared.answer(ask(0, PROMPT, 12))
    stop = other_than(whole, 2)
    at = whole.index(stop)
    seen = shared.run(ask(0, PROMPT, at + 1, stop={"token_ids": (stop,)}))
    assert (seen.tokens(), seen.outputs[-1].finish) == (whole[: at + 1], "stop")


def test_nothing_stops_before_min_tokens(subject: Subject, shared: Driver) -> None:
    whole = shared.answer(ask(0, PROMPT, 12))
    stop = other_than(whole, 2)
    at = whole.index(stop)
    early = shared.run(ask(0, PROMPT, 12, stop={"token_ids": (stop,), "min_tokens": at}))
    assert early.tokens() == whole[: at + 1]
    late = shared.run(ask(0, PROMPT, 20, stop={"token_ids": (stop,), "min_tokens": at + 3}))
    assert len(late.tokens()) > at + 3
    if BARRED not in subject.lacks:
        assert stop not in late.tokens()[: at + 3]
    resumed = shared.run(
        ask(0, PROMPT, 20, stop={"token_ids": (stop,), "min_tokens": at + 3}, generated=late.tokens()[:2])
    )
    assert resumed.tokens() == late.tokens()[2:]


def test_the_end_token_ends_unless_ignored_or_too_early(subject: Subject, shared: Driver) -> None:
    needs(subject, EOS)
    with contextlib.nullcontext(shared) if subject.real else made(subject, MODEL) as driver:
        seen = driver.run(ask(0, ENDING, 60, stop={"ignore_eos": False}))
        drawn = seen.tokens()
        assert len(drawn) < 60
        assert drawn[-1] in driver.engine.info.eos_token_ids
        assert (seen.outputs[-1].finish, seen.outputs[-1].stop_token) == ("stop", drawn[-1])
        on = driver.run(ask(0, ENDING, len(drawn) + 4))
        assert on.tokens()[: len(drawn)] == drawn
        assert on.outputs[-1].finish == "length"
        late = driver.run(ask(0, ENDING, 60, stop={"ignore_eos": False, "min_tokens": len(drawn) + 2}))
    assert len(late.tokens()) > len(drawn) + 2
    assert drawn[-1] not in late.tokens()[: len(drawn)]


# -- log-probabilities


@pytest.mark.parametrize("wanted", [0, 1, 5])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_logprobs_are_of_each_token_and_the_best(
    subject: Subject, shared: Driver, wanted: int, sampling: dict[str, Any]
) -> None:
    plain = shared.answer(ask(0, PROMPT, 6, Sampling(**sampling)))
    asked = ask(0, PROMPT, 6, Sampling(**sampling, logprobs=wanted))
    if wanted and ALTERNATIVES in subject.lacks:
        with pytest.raises(RequestError, match="TorchSampler") as caught:
            shared.engine.submit(asked)
        assert caught.value.code == Code.unsupported
        return
    seen = shared.run(asked)
    assert seen.tokens() == plain or (SEEDS in subject.lacks and "seed" in sampling)
    for output in seen.outputs:
        assert output.logprob is not None
        value, top = output.logprob.logprob, output.logprob.top
        assert len(top) == wanted
        values = [each for _, each in top]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(each) and each <= 0 for each in (value, *values))
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        assert len({token for token, _ in top}) == wanted
        if output.token in dict(top):
            assert dict(top)[output.token] == pytest.approx(value)
        elif top:
            assert value <= values[-1] + 1e-6
        if not sampling["temperature"] and wanted:
            assert top[0][0] == output.token


def test_logprobs_come_only_when_asked_for_and_follow_a_resumed_answer(subject: Subject, shared: Driver) -> None:
    assert all(output.logprob is None for output in shared.run(ask(0, PROMPT)).outputs)
    asked = Sampling(temperature=0.0, logprobs=0 if ALTERNATIVES in subject.lacks else 2)
    whole = shared.run(ask(0, PROMPT, 8, asked)).outputs
    rest = shared.run(ask(0, PROMPT, 8, asked, generated=[output.token for output in whole[:3]])).outputs
    for before, after in zip(whole[3:], rest, strict=True):
        assert before.logprob is not None
        assert after.logprob is not None
        assert after.logprob.logprob == pytest.approx(before.logprob.logprob, abs=1e-3)


# -- log-probabilities of prompts


def scored(key: object, prompt: Any, count: int = 4, top: int = 3, score: int = 1, **more: Any) -> Any:
    return ask(key, prompt, count, Sampling(temperature=0.0, prompt_logprobs=top), score=score, **more)


def check_scores(subject: Subject, model: Path, values: list[Logprob], prompt: Any, top: int, first: int = 1) -> None:
    """Well formed; and those of a model are what a plain forward pass of it says."""
    assert len(values) == len(prompt) - first
    for value, token in zip(values, prompt[first:], strict=True):
        best = [each for _, each in value.top]
        assert len({each for each, _ in value.top}) == len(best) == top
        assert best == sorted(best, reverse=True)
        assert all(math.isfinite(each) and each <= 0 for each in (value.logprob, *best))
        assert sum(map(math.exp, best)) <= 1 + 1e-4
        assert value.rank >= 1 or RANKS in subject.lacks
        if token in dict(value.top):
            assert dict(value.top)[token] == pytest.approx(value.logprob)
            assert value.top[value.rank - 1][0] == token
        else:
            assert value.rank > top or (value.rank == 0 and RANKS in subject.lacks)
            assert not best or value.logprob <= best[-1] + 1e-6
    if subject.name == "mock":
        return
    with torch.inference_mode():
        rows = forward_pass(model)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, value in enumerate(values, first):
        row = rows[position - 1]
        assert value.logprob == pytest.approx(float(row[prompt[position]]), abs=0.1 if subject.real else 1e-3)
        assert [each for _, each in value.top] == pytest.approx(
            row.topk(top).values.tolist(), abs=0.1 if subject.real else 1e-3
        )


@cache
def forward_pass(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()


@pytest.mark.parametrize("top", [0, 1, 5])
def test_a_prompt_is_scored_token_by_token(subject: Subject, model: Path, shared: Driver, top: int) -> None:
    plain = shared.answer(ask(0, PROMPT, 4))  # so that it is cached, too
    seen = shared.run(scored(0, PROMPT, top=top))
    check_scores(subject, model, seen.scores(), PROMPT, top)
    assert seen.tokens() == plain
    assert seen.cached() == 0
    assert all(output.logprob is None for output in seen.outputs)


def test_a_long_prompt_is_scored_in_pieces_to_the_same_end(subject: Subject, model: Path, make: Make) -> None:
    prompt = WORDS[:200]
    driver = make(model=model, max_batched_tokens=48)
    check_scores(subject, model, driver.run(scored(0, prompt)).scores(), prompt, 3)


def test_what_is_scored_is_stored_and_found_by_others(make: Make) -> None:
    driver = make()
    driver.run(scored(0, PROMPT))
    driver.remembers(PROMPT)
    driver.idle()
    assert driver.run(ask(0, PROMPT)).cached() >= (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("first", [2, 20, 49, 50, 99])
def test_scoring_continues_where_an_earlier_attempt_was(
    subject: Subject, model: Path, shared: Driver, first: int
) -> None:
    whole = shared.answer(ask(0, PROMPT, 6))
    seen = shared.run(scored(0, PROMPT, 6, score=first, generated=whole[:2]))
    check_scores(subject, model, seen.scores(first=first), PROMPT, 3, min(first, len(PROMPT)))
    assert seen.tokens() == whole[2:]


def test_only_the_sequence_that_is_asked_returns_scores(subject: Subject, model: Path, shared: Driver) -> None:
    """The other choices of a request have the same sampling."""
    requests = [scored(("k", choice), PROMPT, score=int(choice == 1), choice=choice) for choice in range(3)]
    seen = shared.run(*requests)
    assert {each.key for each in seen.scored} == {("k", 1)}
    check_scores(subject, model, seen.scores(("k", 1)), PROMPT, 3)
    assert shared.run(ask(0, PROMPT)).scored == []
    (token,) = shared.answer(scored(0, [5], 1))
    assert shared.answer(ask(0, [5], 1)) == [token]


def test_a_prefill_worker_scores_what_it_hands_off(subject: Subject, model: Path, make: Make) -> None:
    needs(subject, HANDOFF)
    source, target = make(model=model, role="prefill"), make(model=model, role="decode", kv_blocks=POOL - 10)
    whole = target.answer(ask(0, PROMPT, 8, base=b"r" * 16))
    pinned, first = prefilled(source, scored("h", PROMPT, 8))
    check_scores(subject, model, source.seen.scores("h"), PROMPT, 3)
    seen = carried_on(subject, source, target, pinned, scored(0, PROMPT, 8, score=0, generated=[first]))
    assert [first, *seen.tokens()] == whole
    assert seen.scored == []


# -- refusals


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda: ask("bad", []), Code.invalid_request),
        (lambda: ask("bad", [5, 1280]), Code.invalid_request),
        (lambda: ask("bad", [2**32 - 1]), Code.invalid_request),
        (lambda: ask("bad", PROMPT, generated=[5, 1280]), Code.invalid_request),
        (lambda: ask("bad", WORDS[:LIMIT]), Code.context_length_exceeded),
        (lambda: ask("bad", WORDS[: LIMIT - 4], 9, generated=[5] * 4), Code.context_length_exceeded),
        (lambda: ask("bad", PROMPT, 3, generated=[5, 6, 7]), Code.invalid_request),
        (lambda: ask("bad", PROMPT, 0), Code.invalid_request),
    ],
    ids=["empty", "id", "large id", "generated id", "long", "resumed long", "done", "nothing"],
)
def test_what_can_never_run_is_refused_at_once_and_alone(
    shared: Driver, request_of: Callable[[], Any], code: Code
) -> None:
    whole = shared.answer(ask("good", PROMPT))
    shared.engine.submit(ask("good", PROMPT))
    with pytest.raises(RequestError) as caught:
        shared.engine.submit(request_of())
    assert caught.value.code == code
    assert caught.value.message
    before = len(shared.seen.outputs)
    shared.until(lambda: not shared.engine.has_work(), "the end of the neighbour")
    assert [output.token for output in shared.seen.outputs[before:]] == whole
    assert not shared.engine.cancel("bad")


def test_a_key_is_refused_while_it_is_in_use(shared: Driver) -> None:
    shared.engine.submit(ask(0, PROMPT))
    with pytest.raises(RequestError) as caught:
        shared.engine.submit(ask(0, PROMPT))
    assert caught.value.code == Code.invalid_request
    shared.until(lambda: not shared.engine.has_work(), "the end")
    assert len(shared.answer(ask(0, PROMPT))) == 8


def test_more_than_the_pool_holds_is_refused(subject: Subject, make: Make) -> None:
    needs(subject, SMALL_POOL)
    small = make(kv_blocks=6)
    whole = small.answer(ask(0, PROMPT))
    code = ""
    try:
        (failure,) = small.run(ask(1, WORDS[: 6 * BLOCK + 4])).failures
        code = failure.code
    except RequestError as error:
        code = error.code
    assert Code(code).status == 400
    assert small.answer(ask(0, PROMPT)) == whole


# -- cancelling


def test_cancelling_what_is_not_there_changes_nothing(shared: Driver) -> None:
    assert not shared.engine.cancel("never")
    shared.answer(ask(0, PROMPT))
    assert not shared.engine.cancel(0)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_cancelled_sequence_has_no_output_and_frees_all(make: Make, tokens: int) -> None:
    """Before its first step, after its first token, in the midst of its answer; while others go on."""
    driver = make()
    engine = driver.engine
    whole = driver.answer(ask("other", PROMPT, 12))
    engine.submit(ask("gone", WORDS[:150], 300))
    engine.submit(ask("other", PROMPT, 12))
    driver.until(lambda: len(driver.seen.of("gone")) >= tokens, "its tokens")
    assert engine.cancel("gone")
    assert not engine.cancel("gone")
    before = len(driver.seen.of("gone"))
    begin = len(whole)
    driver.until(lambda: len(driver.seen.of("other")) == begin + len(whole), "the neighbour's end")
    assert driver.seen.tokens("other")[begin:] == whole
    driver.idle()
    assert len(driver.seen.of("gone")) == before
    assert len(driver.answer(ask("gone", PROMPT))) == 8  # its key is free again


def test_a_waiting_sequence_and_one_in_the_midst_of_its_prompt_can_be_cancelled(make: Make) -> None:
    driver = make(max_batched_tokens=32, max_running=2)
    engine = driver.engine
    for number in range(5):
        engine.submit(ask(number, WORDS[number : number + 300], 100))
    driver.step()
    for number in range(5):
        assert engine.cancel(number)
    driver.idle()
    assert driver.seen.failures == []
    assert len(driver.answer(ask(0, PROMPT))) == 8


# -- many


def test_more_sequences_than_slots_all_end(make: Make) -> None:
    driver = make()
    prompts = [WORDS[number * 5 :][:40] for number in range(3 * SLOTS)]
    alone = [driver.answer(ask(number, prompt, 6)) for number, prompt in enumerate(prompts)]
    requests = [ask(number, prompt, 6) for number, prompt in enumerate(prompts)]
    for request in requests:
        driver.engine.submit(request)
    assert driver.engine.has_work()
    before, most = len(driver.seen.outputs), 0

    def done() -> bool:
        nonlocal most
        most = max(most, driver.engine.stats().running)
        return not driver.engine.has_work()

    driver.until(done, "the end of all")
    assert 1 <= most <= SLOTS
    late = driver.seen.outputs[before:]
    assert [[output.token for output in late if output.key == number] for number in range(len(prompts))] == alone


def test_a_pool_that_is_too_small_for_all_serves_all(make: Make) -> None:
    small, large = make(kv_blocks=14, max_model_len=208), make()
    requests = [ask(number, WORDS[number * 7 :][:120], 80) for number in range(4)]
    seen, wanted = small.run(*requests), large.run(*requests)
    assert seen.failures == []
    assert [seen.tokens(number) for number in range(4)] == [wanted.tokens(number) for number in range(4)]
    small.idle()


def test_rest_is_rest(make: Make) -> None:
    driver = make()
    assert not driver.engine.has_work()
    assert not driver.engine.blocked
    assert driver.step().outputs == []
    driver.answer(ask(0, PROMPT))
    driver.idle()
    assert not driver.engine.blocked
    driver.engine.submit(ask(0, PROMPT))
    assert driver.engine.has_work()
    assert driver.engine.cancel(0)
    driver.idle()


# -- the cache


def test_a_repeated_prompt_comes_from_the_cache(make: Make) -> None:
    driver = make()
    first = driver.run(ask(0, PROMPT))
    assert first.cached() == 0
    driver.idle()
    again = driver.run(ask(0, PROMPT))
    assert (len(PROMPT) - 1) // BLOCK * BLOCK <= again.cached() < len(PROMPT)
    assert again.tokens() == first.tokens()
    elsewhere = driver.run(ask(0, PROMPT, base=TENANT))
    assert elsewhere.cached() == 0
    assert elsewhere.tokens() == first.tokens()
    stats = driver.engine.stats()
    assert (stats.hit_tokens, stats.prompt_tokens) == (again.cached(), 3 * len(PROMPT))


def test_without_a_prefix_cache_nothing_is_found(make: Make) -> None:
    driver = make(prefix_cache=False)
    assert not driver.engine.info.kv_events
    for _ in range(2):
        seen = driver.run(ask(0, PROMPT))
        assert (seen.cached(), seen.events) == (0, [])
    assert driver.engine.dump() == []


def test_without_events_there_are_none(make: Make) -> None:
    driver = make(publish_events_and_metrics=False)
    assert not driver.engine.info.kv_events
    driver.answer(ask(0, PROMPT))
    driver.idle()
    assert driver.seen.events == []
    assert driver.run(ask(0, PROMPT)).cached() > 0


def test_events_name_blocks_as_routers_do(make: Make) -> None:
    driver = make()
    answer = driver.answer(ask(0, PROMPT, 40))
    driver.remembers([*PROMPT, *answer][:-1])
    other = driver.answer(ask(1, WORDS[200:240], base=TENANT))
    driver.remembers(WORDS[200:240], TENANT)
    driver.idle()
    found = driver.fold()
    chain = names([*PROMPT, *answer][:-1])
    for parent, child in zip([None, *chain], chain, strict=False):
        assert found[child] == parent
    assert set(found) <= {*chain, *names([*PROMPT, *answer]), *names([*WORDS[200:240], *other], TENANT)}


def test_tenants_have_names_of_their_own_for_equal_tokens(subject: Subject, make: Make) -> None:
    needs(subject, TENANTS)
    driver = make()
    driver.answer(ask(0, PROMPT))
    driver.answer(ask(1, PROMPT, base=TENANT))
    driver.remembers(PROMPT)
    driver.remembers(PROMPT, TENANT)


def test_a_dump_is_the_fold_of_all_events_also_behind_evictions(make: Make) -> None:
    driver = make(kv_blocks=20, max_model_len=320)
    for number in range(8):
        driver.answer(ask(0, [*PROMPT[:40], *WORDS[number * 20 :][:120]], 12))
        driver.idle()
    driver.remembers([*PROMPT[:40], *WORDS[140:260]])  # some engines are asked for their events every 100 ms
    reported = driver.fold()
    dumped = driver.engine.dump()
    assert fold(dumped) == reported
    assert all(event.digests for event in dumped)  # type: ignore[union-attr]
    assert 0 < len(reported) <= 20
    assert len(fold(driver.seen.events[:3])) < len(set(reported) | set(fold(driver.seen.events)))
    assert driver.run(ask(0, [*PROMPT[:40], *WORDS[140:260]])).cached() >= (160 - 1) // BLOCK * BLOCK


def test_blocks_are_counted(make: Make) -> None:
    driver = make()

    def check() -> None:
        stats = driver.engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == POOL
        assert min(stats.used_blocks, stats.cached_blocks, stats.free_blocks, stats.pinned_blocks) >= 0
        assert stats.pinned_blocks <= POOL

    check()
    assert driver.engine.stats().free_blocks == POOL
    for number in range(SLOTS + 2):
        driver.engine.submit(ask(number, WORDS[number : number + 70], 24))
    stats = driver.engine.stats()
    assert stats.running + stats.waiting == SLOTS + 2
    used = 0  # an engine in other threads may end a short answer between two looks
    while driver.engine.has_work():
        driver.step()
        check()
        used = max(used, driver.engine.stats().used_blocks)
    driver.idle()
    check()
    assert used > 0 or driver.engine.stats().cached_blocks > 0
    driver.remembers(WORDS[:70])
    driver.until(lambda: driver.engine.stats().cached_blocks >= 70 // BLOCK, "the count of cached blocks")
    assert driver.engine.stats().prompt_tokens == (SLOTS + 2) * 70


# -- LoRA adapters


def test_adapters_run_beside_each_other_and_their_blocks_have_names_of_their_own(
    subject: Subject, make: Make, tmp_path: Path
) -> None:
    """One that is replaced gets other tokens, and never the blocks of the one before; what has that ends with it."""
    driver = make(lora_folder=str(tmp_path), max_loras=2, max_lora_rank=8, max_cpu_loras=4)
    adapters = driver.engine.adapters
    assert adapters is not None
    served = []
    for number in (1, 2):
        folder = write_adapter(tmp_path / "poet", subject.quick, seed=number, targets=("q_proj",), strength=2.0)
        read = read_adapter(folder, adapters.max_rank)
        served.append(adapter_id("poet", read.digest))
        adapters.add(served[-1], adapters.prepare(read, served[-1]))
    shutil.rmtree(folder)  # nothing of it is read again
    bases = {each: root("contract", each) for each in ("", *served)}
    found: dict[str, list[int]] = {}
    for turn in range(2):
        asked = [ask((each, turn), PROMPT, 8, adapter=each, base=base) for each, base in bases.items()]
        seen = driver.run(*asked)
        assert seen.failures == []
        for each, base in bases.items():
            assert found.setdefault(each, seen.tokens((each, turn))) == seen.tokens((each, turn))
            if TENANTS not in subject.lacks:
                driver.remembers(PROMPT, base)
    assert len({tuple(each) for each in found.values()}) == 3
    driver.engine.submit(ask("last", PROMPT, 40, adapter=served[0], base=bases[served[0]]))
    driver.until(lambda: bool(driver.seen.of("last")), "its first token")
    adapters.remove(served[0])
    if subject.name not in ("mock", "native"):  # these two keep it until its last sequence has ended
        assert adapters.loaded == (served[1],)
    with pytest.raises(RequestError, match="is no longer served"):
        driver.engine.submit(ask("late", PROMPT, 2, adapter=served[0], base=bases[served[0]]))
    driver.until(lambda: "last" in driver.seen.ended(), "its end")
    assert driver.seen.tokens("last")[:8] == found[served[0]]


# -- handoff


def two(make: Make) -> tuple[Driver, Driver]:
    return make(role="prefill"), make(role="decode", kv_blocks=POOL - 10)


@pytest.mark.parametrize("length", [50, 64, 200])
def test_a_prompt_computed_elsewhere_continues_as_if_here(subject: Subject, make: Make, length: int) -> None:
    needs(subject, HANDOFF)
    source, target = two(make)
    prompt = WORDS[:length]
    whole = target.answer(ask(0, prompt, 12, base=b"r" * 16))
    source.answer(ask("before", WORDS[9:90], 3))  # block numbers differ between the two
    pinned, first = prefilled(source, ask("h", prompt, 12))
    assert first == whole[0]
    assert source.engine.stats().pinned_blocks > 0
    seen = carried_on(subject, source, target, pinned, ask(0, prompt, 12, generated=[first]))
    assert seen.failures == []
    assert seen.tokens() == whole[1:]
    assert seen.outputs[-1].finish == "length"
    assert seen.cached() >= (length - 1) // BLOCK * BLOCK
    assert not source.engine.release_pinned("h")
    source.idle()
    target.idle()


def test_drawn_answers_continue_elsewhere(subject: Subject, make: Make) -> None:
    needs(subject, HANDOFF)
    needs(subject, SEEDED_RESUME)
    source, target = two(make)
    whole = target.answer(ask(0, PROMPT, 12, DRAWN, base=b"r" * 16))
    pinned, first = prefilled(source, ask("h", PROMPT, 12, DRAWN))
    seen = carried_on(subject, source, target, pinned, ask(0, PROMPT, 12, DRAWN, generated=[first]))
    assert [first, *seen.tokens()] == whole


def test_a_constraint_holds_across_a_handoff(subject: Subject, model: Path, make: Make) -> None:
    needs(subject, CONSTRAINTS)
    needs(subject, HANDOFF)
    source, target = make(model=model, role="prefill"), make(model=model, role="decode", kv_blocks=POOL - 10)
    constraint, pattern = SHAPES["expression"]
    pinned, first = prefilled(source, ask("h", PROMPT, 99, constraint=constraint))
    request = ask(0, PROMPT, 99, constraint=constraint, generated=[first])
    seen = carried_on(subject, source, target, pinned, request)
    assert seen.failures == []
    assert re.fullmatch(pattern, text_of([first, *seen.tokens()]))


def test_an_answer_that_was_interrupted_is_handed_off_again(subject: Subject, make: Make) -> None:
    """The third attempt of a request: prefill computes prompt and answer so far, decode goes on behind them."""
    needs(subject, HANDOFF)
    source, target = two(make)
    whole = target.answer(ask(0, PROMPT, 12, base=b"r" * 16))
    pinned, token = prefilled(source, ask("h", PROMPT, 12, generated=whole[:4]))
    assert token == whole[4]
    seen = carried_on(subject, source, target, pinned, ask(0, PROMPT, 12, generated=whole[:5]))
    assert seen.tokens() == whole[5:]


def test_a_prefix_that_another_engine_caches_is_read_from_it(subject: Subject, make: Make) -> None:
    """Its content is that of its names: the answer behind it is the same, and only the rest is computed."""
    needs(subject, HANDOFF)
    if subject.handoff == "opaque":
        pytest.skip("it shows nobody its cache")
    source, target = two(make)
    long = [*PROMPT, *PROMPT[::-1], *PROMPT]
    whole = source.answer(ask(0, long, 12, base=b"r" * 16))
    digests = names(long, b"r" * 16)[: (len(long) - 1) // BLOCK]
    offered = source.engine.kv_transfer.find(digests)
    assert len(offered.blocks) == len(digests)
    assert source.engine.kv_transfer.pin("reader", offered) == len(digests)
    assert source.engine.stats().pinned_blocks == len(digests)
    assert target.engine.kv_transfer.find(digests).blocks == []
    reservation = target.engine.kv_transfer.reserve(digests, 0, 0)
    assert reservation is not None
    copy_blocks(source, target, offered.blocks, reservation.blocks)
    target.engine.kv_transfer.adopt(reservation)
    target.engine.kv_transfer.release(reservation)
    assert source.engine.release_pinned("reader")
    seen = target.run(ask(0, long, 12, base=b"r" * 16))
    assert seen.tokens() == whole
    assert seen.cached(0) == BLOCK * len(digests)
    source.idle()
    target.idle()


def test_the_end_of_a_pinned_prompt_is_known_once_and_before_its_last_step_is_computed(
    subject: Subject, make: Make
) -> None:
    if subject.handoff != "blocks":
        pytest.skip("its blocks travel by themselves")
    source = make(role="prefill", max_batched_tokens=32)
    cache = source.engine.kv_transfer
    assert cache is not None
    known: list[tuple[list[object], bool]] = []
    cache.prompts_end = lambda keys: known.append((keys, bool(source.seen.outputs)))
    long = [*PROMPT, *PROMPT[::-1], *PROMPT]
    assert len(long) > 64
    source.run(ask("other", PROMPT, 2))
    source.seen.outputs.clear()
    pinned, _ = prefilled(source, ask("h", long))
    assert known == [(["h"], False)]
    assert source.engine.release_pinned(pinned.key)


def test_a_pinned_prompt_is_known_to_be_written_before_its_token_is_returned(subject: Subject, make: Make) -> None:
    """With the blocks that are pinned then; first of its leading layers, if the engine computes the others later."""
    if subject.handoff != "blocks":
        pytest.skip("its blocks travel by themselves")
    source = make(role="prefill", max_batched_tokens=32)
    cache = source.engine.kv_transfer
    assert cache is not None
    written: list[tuple[list[PinnedPrompt], int]] = []

    def report(prompts: list[PinnedPrompt], layers: int) -> None:
        assert not source.seen.outputs
        written.append((prompts, layers))

    cache.prompts_written = report
    pinned, _ = prefilled(source, ask("h", [*PROMPT, *PROMPT[::-1], *PROMPT]))
    assert [layers for _, layers in written][-1] == 0
    assert sorted(layers for _, layers in written[:-1]) == [layers for _, layers in written[:-1]]
    assert [prompts for prompts, _ in written] == [[pinned]] * len(written)
    assert source.engine.release_pinned(pinned.key)


def test_what_is_pinned_and_dropped_is_let_go_of(subject: Subject, make: Make) -> None:
    needs(subject, HANDOFF)
    source = make(role="prefill", handoff_lease_s=1.0)
    pinned, _ = prefilled(source, ask("h", PROMPT))
    assert (bool(pinned.opaque), bool(pinned.blocks)) == (subject.handoff == "opaque", subject.handoff == "blocks")
    assert source.engine.stats().pinned_blocks >= -(-len(PROMPT) // BLOCK)
    assert source.engine.release_pinned("h")
    assert not source.engine.release_pinned("h")
    assert not source.engine.release_pinned("never")
    source.idle()


def test_a_first_token_that_ends_the_answer_ends_it_on_the_prefill_worker(subject: Subject, make: Make) -> None:
    needs(subject, HANDOFF)
    source = make(role="prefill")
    first = source.answer(ask(0, PROMPT, 1))[0]
    seen = source.run(ask("h", PROMPT, 1, pin=True, stop={"token_ids": (first,)}))
    assert [(output.token, output.finish) for output in seen.outputs] == [(first, "stop")]
    for pinned in seen.pinned:
        assert source.engine.release_pinned(pinned.key)


@pytest.mark.parametrize("opaque", [b"", b"garbage", b"{}"], ids=["none", "garbage", "empty"])
def test_a_state_that_cannot_be_used_never_gives_a_wrong_answer(subject: Subject, make: Make, opaque: bytes) -> None:
    if subject.handoff != "opaque":
        pytest.skip("its blocks travel through our own transports")
    target = make(role="decode")
    whole = target.answer(ask(0, PROMPT))
    request = ask(1, PROMPT, generated=whole[:1], opaque=opaque)
    try:
        seen = target.run(request)
    except RequestError:
        pass
    else:
        assert seen.failures or seen.tokens(1) == whole[1:]
    assert target.answer(ask(0, PROMPT)) == whole


def test_a_state_is_good_for_one_sequence_of_its_own_prompt(subject: Subject, make: Make) -> None:
    if subject.handoff != "opaque":
        pytest.skip("its blocks travel through our own transports")
    source, target = two(make)
    pinned, first = prefilled(source, ask("h", PROMPT))
    other = target.answer(ask(0, PROMPT[::-1], 8))
    for prompt, drawn in ((PROMPT[::-1], other[:1]), (PROMPT, [first]), (PROMPT, [first])):
        whole = target.answer(ask(0, prompt, 8, base=b"r" * 16))
        try:
            seen = target.run(ask(1, prompt, generated=drawn, opaque=pinned.opaque))
        except RequestError:
            continue
        assert seen.failures or seen.tokens(1) == whole[1:]
    assert source.engine.release_pinned("h")


def test_closing_ends_it(make: Make, subject: Subject) -> None:
    before = set(threading.enumerate())
    with made(subject) as driver:
        driver.engine.submit(ask(0, PROMPT, 300))
        driver.step()
    assert [thread for thread in threading.enumerate() if thread not in before and not thread.daemon] == []


# -- what is not known of TensorRT-LLM

OPPOSITE: dict[str, Any] = {
    "eos_in_token_ids": False,
    "decode_repeats_first": False,
    "abort_answers": False,
    "mm_keys": "absent",
    "rank_when_single": True,
    "stops_heed_min_tokens": True,
    "stats_see_ends": False,
    "stats_after_transfer": True,
    "partial_blocks": False,
}


@pytest.mark.parametrize("opposite", [False, True], ids=["as presumed", "the opposite"])
@pytest.mark.parametrize("variant", some(["1.2.1", "1.3"], "1.3"))
def test_trtllm_is_right_whatever_the_answers_to_open_questions_are(
    variant: str, opposite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass through all that they touch: ends, cancelling, counting, events, handoff."""
    subject = next((each for each in SUBJECTS if each.name == "trtllm"), None)
    if subject is None or subject.real:
        pytest.skip("the stand-in only: the real one is what it is")
    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    if opposite:
        monkeypatch.setenv("TENSORRT_LLM_STANDIN_QUIRKS", json.dumps(OPPOSITE))
    with standins.installed(variant), made(subject, MODEL) as driver, contextlib.ExitStack() as more:
        import tensorrt_llm

        assert variant == tensorrt_llm.VARIANT
        whole = driver.answer(ask(0, PROMPT, 12))
        ended = driver.run(ask(0, ENDING, 60, stop={"ignore_eos": False}))
        assert ended.tokens()[-1] in driver.engine.info.eos_token_ids
        assert ended.outputs[-1].finish == "stop"
        stop = other_than(whole, 2)
        at = whole.index(stop)
        for least in (0, at, at + 2):
            seen = driver.run(ask(0, PROMPT, 12, stop={"token_ids": (stop,), "min_tokens": least}))
            assert seen.tokens() == whole[: len(seen.tokens())]
            assert (len(seen.tokens()) == at + 1) == (least <= at)
        driver.engine.submit(ask("gone", PROMPT, 300))
        driver.until(lambda: len(driver.seen.of("gone")) > 1, "its tokens")
        assert driver.engine.cancel("gone")
        driver.idle()
        driver.remembers([*PROMPT, *whole][:-1])
        assert fold(driver.engine.dump()) == driver.fold()
        source, target = (more.enter_context(made(subject, MODEL, role=role)) for role in ("prefill", "decode"))
        pinned, first = prefilled(source, ask("h", PROMPT, 12))
        rest = carried_on(subject, source, target, pinned, ask(0, PROMPT, 12, generated=[first]))
        assert [first, *rest.tokens()] == whole
        source.idle()
        target.idle()
