"""The state of a computed prompt, from one engine to another."""

import json
from array import array
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.trtllm.disagg import CONTEXT, GENERATION, decode, encode, pack, unpack

LAYOUT = "trtllm:32:auto:1"


@dataclass(slots=True, kw_only=True)
class Params:
    """The fields of 1.2.1."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Later(Params):
    """With some of 1.3."""

    ctx_dp_rank: int | None = None


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
params = st.builds(
    Params,
    request_type=st.none() | st.sampled_from([CONTEXT, GENERATION]),
    first_gen_tokens=st.none() | tokens,
    ctx_request_id=st.none() | st.integers(0, 2**63),
    opaque_state=st.none() | st.binary(max_size=200),
    draft_tokens=st.none() | tokens,
    multimodal_hashes=st.none() | st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8)),
)


@given(params)
def test_decoding_what_was_encoded_gives_the_same_and_json_carries_it(given_params: Params) -> None:
    wire = encode(given_params)
    assert decode(json.loads(json.dumps(wire)), Params) == given_params


@given(params)
def test_only_the_opaque_state_changes_its_form(given_params: Params) -> None:
    wire = encode(given_params)
    assert wire is not None
    others = {name: getattr(given_params, name) for name in wire if name != "opaque_state"}
    assert {name: value for name, value in wire.items() if name != "opaque_state"} == others
    assert isinstance(wire["opaque_state"], str | None)


def test_none_passes_through() -> None:
    assert encode(None) is None
    assert decode(None, Params) is None


def test_another_release_is_understood_as_long_as_it_says_nothing_new() -> None:
    assert decode(encode(Later(ctx_request_id=3)), Params) == Params(ctx_request_id=3)
    assert decode(encode(Params(ctx_request_id=3)), Later) == Later(ctx_request_id=3)
    with pytest.raises(ValueError, match=r"ctx_dp_rank.*same TensorRT-LLM release"):
        decode(encode(Later(ctx_dp_rank=1)), Params)


@pytest.mark.parametrize("state", ["no base64!", "YQ", 5])
def test_damaged_bytes_are_refused(state: object) -> None:
    with pytest.raises(ValueError, match="base64"):
        decode({"opaque_state": state}, Params)


PROMPT, BEFORE, FIRST = [1, 2, 3], [4], 5
DONE = Params(request_type=CONTEXT, first_gen_tokens=[FIRST], ctx_request_id=8, opaque_state=b"\x00state")


def test_the_next_engine_gets_them_as_generation_only() -> None:
    opaque = pack(DONE, LAYOUT, [*PROMPT, *BEFORE])
    given_params, own = unpack(opaque, Params, LAYOUT, array("I", [*PROMPT, *BEFORE, FIRST]), len(PROMPT))
    assert given_params == replace(DONE, request_type=GENERATION)
    assert own == 1


@pytest.mark.parametrize(
    ("sequence", "prompt"),
    [
        ([*PROMPT, *BEFORE], 3),  # the prefill engine's token is not there
        ([*PROMPT, *BEFORE, 6], 3),  # another one is
        ([*PROMPT, 9, FIRST], 3),  # behind other tokens
        ([*PROMPT, *BEFORE, FIRST], 5),  # it is the client's own
    ],
)
def test_the_state_of_other_tokens_is_refused(sequence: list[int], prompt: int) -> None:
    with pytest.raises(ValueError, match="other tokens"):
        unpack(pack(DONE, LAYOUT, [*PROMPT, *BEFORE]), Params, LAYOUT, sequence, prompt)


def test_engines_whose_cache_differs_do_not_take_over() -> None:
    with pytest.raises(ValueError, match="data type, block size, attention windows"):
        unpack(pack(DONE, LAYOUT, PROMPT), Params, "trtllm:32:fp8:2", [*PROMPT, FIRST], 3)
