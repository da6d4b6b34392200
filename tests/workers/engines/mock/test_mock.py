import math
from array import array
from typing import Literal

import msgspec
import pytest

from penstock.configs.flags import parse
from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.block_hashes import split
from penstock.schemas.errors import Code
from penstock.schemas.kv import Stored
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.running import MAX_SCORED_TOKENS
from penstock.workers.engines.engine_protocol import Engine, EngineInfo, Output, RequestError, SequenceRequest
from penstock.workers.engines.mock import DEFAULT_BLOCKS, LOAD_SHARE, TOKEN_S, MockOptions, build, from_settings
from penstock.workers.engines.mock.executor import GREEDY, MockVocabulary, expected_tokens

PROMPT = list(range(40, 90))
DRAWN = Sampling(temperature=0.7, seed=11)


def answer(engine: Engine, request: SequenceRequest) -> list[Output]:
    engine.submit(request)
    outputs: list[Output] = []
    for _ in range(1000):
        if not engine.has_work():
            return outputs
        result = engine.step()
        assert not result.failures
        outputs += result.outputs
    raise AssertionError("it hangs")


def request(
    max_tokens: int = 20, *, prompt: list[int] = PROMPT, sampling: Sampling = GREEDY, **more: object
) -> SequenceRequest:
    choice, generated = more.pop("choice", 0), more.pop("generated", ())
    return SequenceRequest("k", prompt, sampling, Stop(max_tokens, **more), choice, generated)  # type: ignore[arg-type]


def tokens(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs]


def test_it_says_what_it_is() -> None:
    engine = build(MockOptions(vocab_size=100, eos_token_ids=(2,), max_running=3, max_model_len=77, speedup=0))
    info: EngineInfo = engine.info
    assert (info.name, info.block_size, info.total_blocks, info.slots) == ("mock", 32, DEFAULT_BLOCKS, 3)
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids, info.kv_events) == (77, 100, (2,), True)
    assert not build(MockOptions(vocab_size=100, prefix_cache=False)).info.kv_events
    assert build(MockOptions(vocab_size=100, total_blocks=0)).info.total_blocks == DEFAULT_BLOCKS


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), DRAWN])
@pytest.mark.parametrize("cut", range(0, 20, 3))
def test_another_worker_continues_as_the_first_would_have(sampling: Sampling, cut: int) -> None:
    whole = answer(build(MockOptions(vocab_size=300, speedup=0)), request(sampling=sampling, choice=1))
    other = build(MockOptions(vocab_size=300, block_size=4, max_batched_tokens=5, prefix_cache=False, speedup=0))
    rest = answer(other, request(sampling=sampling, choice=1, generated=array("I", tokens(whole)[:cut])))
    assert tokens(rest) == tokens(whole)[cut:]
    assert tokens(whole) == expected_tokens(PROMPT, 20, MockVocabulary(300), sampling=sampling, choice=1)


def test_where_the_prompt_ends_does_not_matter() -> None:
    vocabulary = MockVocabulary(1000)
    whole = expected_tokens(PROMPT, 20, vocabulary)
    assert expected_tokens([*PROMPT, *whole[:7]], 13, vocabulary) == whole[7:]
    assert expected_tokens(PROMPT[1:], 20, vocabulary) != whole


def test_choices_and_seeds_differ_only_when_drawn() -> None:
    vocabulary = MockVocabulary(1000)

    def generated_by(temperature: float, seed: int, choice: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=temperature, seed=seed)
        return tuple(expected_tokens(PROMPT, 8, vocabulary, sampling=sampling, choice=choice))

    variants = [(seed, choice) for seed in (1, 2, 2**63 - 1) for choice in (0, 1)]
    assert len({generated_by(0.0, *variant) for variant in variants}) == 1
    assert len({generated_by(1.0, *variant) for variant in variants}) == len(variants)


def test_excluded_ids_are_never_drawn_and_the_others_are() -> None:
    generated_by = set(
        tokens(answer(build(MockOptions(vocab_size=12, excluded=(0, 3, 11), speedup=0)), request(300, prompt=[1])))
    )
    assert generated_by == set(range(12)) - {0, 3, 11}
    with pytest.raises(ValueError, match="all 3 token ids are excluded"):
        build(MockOptions(vocab_size=3, excluded=range(5)))


def test_eos_and_stop_ids_are_not_drawn_before_min_tokens() -> None:
    def generated_by(min_tokens: int) -> list[Output]:
        engine = build(MockOptions(vocab_size=6, eos_token_ids=(2,), speedup=0))
        return answer(engine, request(400, prompt=[1], token_ids=(4, 5), min_tokens=min_tokens))

    early = generated_by(0)
    assert early[-1].finish == "stop"
    assert early[-1].stop_token == early[-1].token
    assert generated_by(len(early) - 1) == early
    for minimum in (len(early), len(early) + 1, 30):
        late = generated_by(minimum)
        assert not {2, 4, 5} & set(tokens(late[:-1]))
        assert len(late) > minimum
        assert late[-1].finish == "stop"
        assert tokens(late)[:minimum] == expected_tokens(
            [1], minimum, MockVocabulary(6), barred={2, 4, 5}, barred_tokens=minimum
        )


def test_min_tokens_counts_what_earlier_attempts_generated() -> None:
    def generated_by(generated: list[int]) -> list[int]:
        engine = build(MockOptions(vocab_size=6, eos_token_ids=(2,), speedup=0))
        return tokens(answer(engine, request(400, prompt=[1], token_ids=(4, 5), min_tokens=12, generated=generated)))

    whole = generated_by([])
    for cut in (5, 11, 12):
        assert generated_by(whole[:cut]) == whole[cut:]


def test_answers_have_lengths_of_the_range_and_end_alike_wherever_they_are_continued() -> None:
    options = MockOptions(vocab_size=300, eos_token_ids=(2,), excluded=(2,), answer_tokens=(5, 30), speedup=0)
    lengths = set[int]()
    for first in range(3, 60):
        whole = answer(build(options), request(400, prompt=[first, 7]))
        assert (whole[-1].finish, whole[-1].token) == ("stop", 2)
        assert answer(build(options), request(400, prompt=[first, 7], generated=tokens(whole)[:4])) == whole[4:]
        lengths.add(len(whole))
    assert min(lengths) >= 5
    assert max(lengths) <= 30
    assert len(lengths) > 15


def test_max_tokens_min_tokens_and_ignored_ends_go_before_an_answer_s_length() -> None:
    options = MockOptions(vocab_size=300, eos_token_ids=(2,), excluded=(2,), answer_tokens=(5, 5), speedup=0)
    assert len(answer(build(options), request(400))) == 5
    assert answer(build(options), request(3))[-1].finish == "length"
    assert len(answer(build(options), request(400, min_tokens=9))) == 10
    assert len(answer(build(options), request(40, ignore_eos=True))) == 40


@pytest.mark.parametrize("text", ["0", "-5", "5-", "9-3", "some", "1e3"])
def test_a_range_of_lengths_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((ValueError, SystemExit)):
        from_settings(
            parse(WorkerSettings, ["--engine", "mock", f"--mock-answer-tokens={text}"], prog="w"), modeldir.TINY
        )


def test_if_all_ids_are_barred_one_is_drawn_all_the_same() -> None:
    assert MockVocabulary(4, excluded=(0,)).token(1, barred=range(4)) == 2


@pytest.mark.parametrize("wanted", [0, 1, 5, 50])
def test_logprobs_are_plausible(wanted: int) -> None:
    engine = build(MockOptions(vocab_size=20, excluded=(0,), speedup=0))
    for output in answer(engine, request(prompt=[1], sampling=Sampling(temperature=0.0, logprobs=wanted))):
        assert output.logprob
        top = output.logprob.top
        assert len(top) == min(wanted, 19)
        assert len({token for token, _ in top}) == len(top)
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert sum(math.exp(value) for _, value in top) <= 1
        if wanted:
            assert top[0] == (output.token, output.logprob.logprob)


def test_no_logprobs_unless_asked() -> None:
    assert all(
        output.logprob is None for output in answer(build(MockOptions(vocab_size=20, speedup=0)), request(prompt=[1]))
    )


@pytest.mark.parametrize("more", [{"prompt": [5, 100]}, {"generated": [100]}])
def test_ids_outside_the_vocabulary_are_refused(more: dict[str, list[int]]) -> None:
    engine = build(MockOptions(vocab_size=100, speedup=0))
    with pytest.raises(RequestError, match="token id 100 is outside the vocabulary of 100") as caught:
        engine.submit(request(**more))  # type: ignore[arg-type]
    assert caught.value.code == Code.invalid_request
    assert not engine.has_work()


def test_stats_and_dump_describe_the_cache() -> None:
    engine = build(MockOptions(vocab_size=300, block_size=8, total_blocks=32, speedup=0))
    answer(engine, request(1))
    stats = engine.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 6, 26)
    (stored,) = engine.dump()
    assert isinstance(stored, Stored)
    assert len(split(stored.digests)) == 6
    engine.submit(request(5))
    assert engine.step().started[0].cached_tokens == 48
    assert (engine.stats().running, engine.stats().used_blocks) == (1, 7)
    assert engine.cancel("k")
    assert not engine.cancel("k")
    assert engine.stats().used_blocks == 0
    engine.close()


def test_a_step_without_work_is_empty() -> None:
    engine = build(MockOptions(vocab_size=300, speedup=1), sleep=lambda seconds: pytest.fail("waited for nothing"))
    assert engine.step().empty


def test_a_step_scores_so_many_tokens_of_a_prompt_at_most() -> None:
    engine = build(MockOptions(vocab_size=300, speedup=0))
    prompt = [7] * (MAX_SCORED_TOKENS + 31)
    engine.submit(SequenceRequest("k", prompt, Sampling(prompt_logprobs=20), Stop(1), score=1))
    steps = []
    while engine.has_work():
        steps.append(sum(len(each.logprobs) for each in engine.step().scored))
    assert steps == [MAX_SCORED_TOKENS, 30]


def test_a_mock_of_a_model_has_its_limits_and_answers_in_text() -> None:
    settings = WorkerSettings(engine="mock", kv_blocks=50, max_running=7, mock_speedup=0, prefix_cache=False)
    engine, model = from_settings(settings, modeldir.TINY), modeldir.load(modeldir.TINY)
    info = engine.info
    assert (info.total_blocks, info.slots, info.block_size, info.kv_events) == (50, 7, 32, False)
    assert (info.vocab_size, info.max_model_len) == (model.vocab_size, model.max_model_len)
    assert info.eos_token_ids == model.eos_token_ids
    outputs = answer(engine, request(200, prompt=[1]))
    assert len(outputs) == 200
    for token in tokens(outputs):
        text = model.tokenizer.decode([token])
        assert text
        assert "\ufffd" not in text


def test_settings_may_shorten_the_model_and_turn_its_events_off() -> None:
    settings = WorkerSettings(engine="mock", max_model_len=100, publish_events_and_metrics=False)
    info = from_settings(settings, modeldir.TINY).info
    assert (info.max_model_len, info.total_blocks, info.kv_events) == (100, DEFAULT_BLOCKS, False)


@pytest.mark.parametrize(("policy", "evicted"), [("max_utilization", True), ("guaranteed_no_evict", False)])
def test_settings_say_whether_a_sequence_may_be_evicted(policy: Literal["max_utilization"], evicted: bool) -> None:
    settings = WorkerSettings(engine="mock", block_size=8, kv_blocks=12, mock_speedup=0, scheduler_policy=policy)
    engine = from_settings(settings, modeldir.TINY)
    for key in "ab":
        asked = request(40, prompt=[ord(key), *PROMPT[:30]], ignore_eos=True)
        engine.submit(msgspec.structs.replace(asked, key=key))
    counts: dict[object, int] = {}
    waited = False
    while engine.has_work():
        for output in engine.step().outputs:
            counts[output.key] = counts.get(output.key, 0) + 1
        waited = waited or engine.stats().waiting > 0
    assert counts == {"a": 40, "b": 40}
    assert waited
    assert (engine.stats().preemptions > 0) == evicted


def test_blocks_that_left_come_back_from_host_memory_with_what_they_held_and_take_their_time() -> None:
    slept: list[float] = []
    options = MockOptions(vocab_size=100, block_size=8, total_blocks=11, host_blocks=40, memory_block_bytes=32)
    engine = build(options, sleep=slept.append)
    wanted = tokens(answer(engine, request(4)))
    answer(engine, request(4, prompt=list(range(10, 88))))
    before = len(slept)
    assert tokens(answer(engine, request(4))) == wanted
    assert engine.stats().loaded_blocks == len(PROMPT) // 8
    assert slept[before] == pytest.approx(LOAD_SHARE * TOKEN_S * 8 * (len(PROMPT) // 8))
