"""Prompts in as few bits as their token ids need."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas import done, requests
from penstock.schemas.wire import encode, narrowed, pack_tokens, widened
from tests.schemas.samples import REQUEST

LARGEST = st.sampled_from([1, 2, 3, 15, 16, 255, 256, 4095, 4096, 65_535, 65_536, 151_643, 262_143, 2**24, 2**32 - 1])


@given(LARGEST.flatmap(lambda most: st.lists(st.integers(0, most), max_size=60)))
def test_token_ids_come_back_as_they_were(ids: list[int]) -> None:
    packed = pack_tokens(ids)
    assert widened(narrowed(packed), len(ids)) == packed


@pytest.mark.parametrize(("most", "bits"), [(200, 8), (4_000, 12), (65_000, 16), (151_643, 18), (262_143, 18)])
def test_a_token_takes_the_bits_of_the_largest(most: int, bits: int) -> None:
    assert len(narrowed(pack_tokens([7] * 799 + [most]))) == 1 + 800 * bits // 8


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x0d" + bytes(9), b"\x0c" + bytes(4), b"\x08abc", b"\x28" + bytes(20)]
)
def test_what_is_no_such_list_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="4 token ids"):
        widened(data, 4)
    stored = requests.PackedRequest(msgspec.structs.replace(REQUEST, prompt=b"", prompt_length=4), data)
    with pytest.raises(msgspec.ValidationError):
        requests.decode(encode(stored))


def test_a_request_is_read_whichever_way_its_prompt_is_packed() -> None:
    stored = encode(requests.packed(REQUEST))
    assert requests.decode(stored) == requests.decode(encode(REQUEST)) == REQUEST
    head = requests.decode_head(stored)
    assert (head.prompt, head.prompt_tokens) == (b"", REQUEST.prompt_tokens)
    assert requests.decode_head(encode(REQUEST)) == REQUEST
    empty = msgspec.structs.replace(REQUEST, prompt=b"", prompt_length=9)
    assert requests.decode(encode(requests.packed(empty))) == empty


def test_an_earlier_build_refuses_a_packed_request_rather_than_run_an_empty_prompt() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode(requests.packed(REQUEST)), type=requests.GenerateRequest)


def test_a_record_is_read_whichever_way_its_tokens_are_packed() -> None:
    outcomes = (done.Outcome(pack_tokens([5, 70_000] * 4), "stop"), done.Outcome(b"", "error"))
    event = done.Done(REQUEST.id, "tiny", 1, choices=outcomes)
    stored = encode(done.packed(event))
    assert len(stored) < len(encode(event))
    assert done.decode(stored) == done.decode(encode(event)) == event
    vectors = msgspec.structs.replace(event, choices=(done.Outcome(pack_tokens([2**32 - 1] * 4), "stop"),))
    assert done.packed(vectors) == vectors, "nothing is gained"
    broken = msgspec.structs.replace(event, choices=(done.Outcome(packed=b"\x0cabc", count=9),))
    with pytest.raises(msgspec.ValidationError):
        done.decode(encode(broken))
    tight = done.decode(done.encode_within(done.packed(event), 60))
    assert isinstance(tight, done.Done)
    assert "tokens" in tight.left_out
    assert tight.choices[0] == done.Outcome(reason="stop")
