from typing import Any

import pytest

from penstock.infra.model.defaults import NO_DEFAULTS, BadDefaults, defaults, ids
from penstock.schemas.requests import Sampling


def test_options_of_sampling_are_defaults_of_requests() -> None:
    found = defaults({"do_sample": True, "temperature": 0.6, "top_p": 1, "top_k": 20.0, "repetition_penalty": 1.05})
    assert found.sampling == Sampling(temperature=0.6, top_p=1.0, top_k=20, repetition_penalty=1.05)
    assert defaults({"do_sample": False, "temperature": 0.6}).sampling.temperature == 0.0
    assert defaults({"temperature": None, "transformers_version": "4.51.0", "pad_token_id": 0}) == NO_DEFAULTS


def test_lengths_and_stops_are_read_as_files_write_them() -> None:
    found = defaults({"min_new_tokens": 3.0, "max_new_tokens": 512, "stop_strings": ["###", "", "###", "END"]})
    assert (found.min_tokens, found.max_tokens, found.strings) == (3, 512, ("###", "END"))
    assert defaults({"stop_strings": "###"}).strings == ("###",)


def test_tokens_that_may_not_come_are_barred_and_longer_words_are_told_of() -> None:
    found = defaults({"suppress_tokens": [5, 7.0], "bad_words_ids": [[7], [8], [1, 2], []]})
    assert found.barred == (5, 7, 8)
    assert found.ignored == (("bad_words_ids", [[1, 2]]),)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("no_repeat_ngram_size", 3, 0),
        ("forced_bos_token_id", 9, None),
        ("begin_suppress_tokens", [4], []),
        ("num_beams", 4, 1),
        ("typical_p", 0.9, 1.0),
        ("min_length", 10, 0),
        ("exponential_decay_length_penalty", [10, 1.1], None),
        ("sequence_bias", [[[1], -10.0]], None),
    ],
)
def test_what_is_not_applied_is_named_and_only_if_it_would_change_texts(key: str, value: Any, neutral: Any) -> None:
    assert defaults({key: value}).ignored == ((key, value),)
    assert defaults({key: neutral}) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "0.6"}, "temperature is '0.6'; it must be a number"),
        ({"top_k": 20.5}, "top_k is 20.5; it must be a whole number"),
        ({"top_p": True}, "top_p is True"),
        ({"max_new_tokens": float("inf")}, "max_new_tokens is inf"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens has 'a'"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids is"),
        ({"stop_strings": {"a": 1}}, "stop_strings is"),
    ],
)
def test_a_value_of_another_type_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadDefaults) as refused:
        defaults(values)
    assert words in str(refused.value)


def test_ids_are_written_as_one_as_several_and_as_floats() -> None:
    assert ids("eos_token_id", 2) == ids("eos_token_id", [2.0]) == (2,)
    assert ids("eos_token_id", [2, 5]) == (2, 5)
    assert ids("eos_token_id", []) == ids("eos_token_id", None) == ()
    for wrong in (True, -1, "2", [2.5], [None]):
        with pytest.raises(BadDefaults, match="eos_token_id"):
            ids("eos_token_id", wrong)
