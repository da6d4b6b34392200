"""Who has a request's id may read its answer where there are no keys: it cannot be guessed."""

import itertools

import pytest

from penstock.schemas.requests import new_request_id, request_of_answer, time_of


def _bits(text: str) -> int:
    return int(text.replace("-", ""), 16)


def test_an_id_has_74_random_bits_and_the_time_in_milliseconds() -> None:
    at_ns = 1_700_000_000_123_000_000
    differing = _bits(new_request_id(at_ns, bytes(10))) ^ _bits(new_request_id(at_ns, b"\xff" * 10))
    assert differing.bit_count() == 74
    assert time_of(new_request_id(at_ns)) == at_ns


def test_ids_of_the_same_millisecond_differ_in_about_half_of_their_random_bits() -> None:
    at_ns = 1_700_000_000_123_000_000
    ids = [_bits(new_request_id(at_ns)) for _ in range(200)]
    assert len(set(ids)) == 200
    changed = [(a ^ b).bit_count() for a, b in itertools.pairwise(ids)]
    assert 34 < sum(changed) / len(changed) < 40


def test_an_id_has_its_cell_behind_its_last_hyphen_and_62_random_bits_then() -> None:
    ones, zeros = (new_request_id(0, randomness, cell=0x02A) for randomness in (b"\xff" * 10, bytes(10)))
    assert [each.rpartition("-")[2] for each in (ones, zeros)] == ["02afffffffff", "02a000000000"]
    assert (_bits(ones) ^ _bits(zeros)).bit_count() == 62


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_the_id_of_an_answer_of_any_api_names_its_request(prefix: str) -> None:
    request = new_request_id()
    assert request_of_answer(prefix + request) == request


@pytest.mark.parametrize("text", ["", "x", "01a202c8-4c32-494a-8917-357ea3fdacde", "0" * 32])
def test_what_is_no_request_id_is_refused_with_where_to_find_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not a request id, which is a UUIDv7 as in the X-Request-Id header"):
        time_of(text)
