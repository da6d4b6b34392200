"""Our request as fields of SamplingParams."""

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.external.sampling import seed_of, stop_ids
from penstock.workers.engines.trtllm.engine_inputs import end_id, sampling_arguments
from tests import standins

with standins.installed():
    SamplingParams: Any = importlib.import_module("tensorrt_llm.sampling_params").SamplingParams

EOS = (7, 8)


def asked(sampling: Sampling | None = None, stop: Stop | None = None, **more: Any) -> dict[str, Any]:
    stop = stop or Stop(max_tokens=5)
    return sampling_arguments(sampling or Sampling(), stop, eos=EOS, **{"max_tokens": stop.max_tokens} | more)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0.0)])
def test_greedy_is_none_of_the_three(sampling: Sampling) -> None:
    assert not asked(sampling).keys() & {"temperature", "top_p", "top_k", "min_p"}


def test_a_temperature_of_one_is_passed_since_the_default_is_greedy() -> None:
    given = asked(Sampling(top_k=0))
    assert (given["temperature"], given["top_p"], given["top_k"]) == (1.0, 1.0, 0)
    assert "min_p" not in given
    assert asked(Sampling(min_p=0.1))["min_p"] == 0.1


def test_end_tokens_are_always_named_and_stay_in_the_output() -> None:
    given = asked(stop=Stop(max_tokens=5, token_ids=(3, 7)))
    assert (given["end_id"], given["stop_token_ids"]) == (7, [3, 8])
    assert given["include_stop_str_in_output"]
    assert not given["detokenize"]
    assert "stop" not in given


def test_ignoring_the_end_keeps_the_stop_tokens() -> None:
    stop = Stop(max_tokens=5, token_ids=(3,), ignore_eos=True)
    given = asked(stop=stop)
    assert (given["end_id"], given["stop_token_ids"], given["pad_id"]) == (-1, [3], 7)
    assert "ignore_eos" not in given
    assert stop_ids(stop, EOS) == {3}
    assert end_id(stop, EOS) == -1


def test_penalties_leave_the_clients_prompt_out() -> None:
    given = asked(Sampling(presence_penalty=0.5), prompt_len=40)
    assert (given["presence_penalty"], given["frequency_penalty"], given["prompt_ignore_length"]) == (0.5, 0.0, 40)
    assert "prompt_ignore_length" not in asked(Sampling(repetition_penalty=1.2), prompt_len=40)


@pytest.mark.parametrize(("wanted", "given"), [(None, None), (0, 1), (1, 1), (5, 5)])
def test_log_probabilities_of_zero_alternatives_are_asked_as_one(wanted: int | None, given: int | None) -> None:
    assert asked(Sampling(logprobs=wanted)).get("logprobs") == given
    assert asked(prompt_logprobs=wanted).get("prompt_logprobs") == given


def test_min_tokens_that_are_out_already_are_not_asked() -> None:
    assert asked(min_tokens=3)["min_tokens"] == 3
    assert "min_tokens" not in asked(min_tokens=-2)


@given(st.integers(0, 2**63 - 1), st.sets(st.tuples(st.integers(0, 127), st.integers(0, 4000)), max_size=20))
def test_choices_and_positions_draw_from_seeds_of_their_own(seed: int, places: set[tuple[int, int]]) -> None:
    seeds = {seed_of(seed, choice, position) for choice, position in places}
    assert len(seeds) == len(places)
    assert all(0 <= each < 2**63 for each in seeds)


@given(
    st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        top_k=st.integers(0, 50),
        min_p=st.floats(0, 1),
        seed=st.integers(0, 2**63 - 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 2),
        logprobs=st.none() | st.integers(0, 20),
    ),
    st.builds(
        Stop,
        max_tokens=st.integers(1, 100),
        min_tokens=st.integers(0, 5),
        token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
    ),
)
def test_the_engine_takes_whatever_a_client_may_ask(sampling: Sampling, stop: Stop) -> None:
    SamplingParams(**asked(sampling, stop, min_tokens=stop.min_tokens, prompt_len=3, perf_metrics=True))
