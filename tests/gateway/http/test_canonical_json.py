import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http import idempotency_key as module
from penstock.gateway.http.idempotency_key import canonical_body, canonical_json
from tests.properties import examples

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value, with the keys of its objects in another order."""
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: shuffled(inner, rng) for key, inner in items}
    return [shuffled(inner, rng) for inner in value] if isinstance(value, list) else value


@examples(200)
@given(VALUES, st.integers(1, 40), st.randoms(use_true_random=False))
def test_slices_make_the_same_text_as_one_call(value: Any, size: int, rng: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WHOLE_BYTES", size)
        written = json.dumps(shuffled(value, rng), indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)
        assert canonical_json(written.encode()) == msgspec.json.encode(value, order="deterministic")


def test_members_of_the_outermost_object_are_left_out() -> None:
    assert canonical_json(b' {"b": {"stream": 1}, "stream": true, "a": 1}', without=["stream"]) == (
        b'{"a":1,"b":{"stream":1}}'
    )


@pytest.mark.parametrize("text", [b"", b"{", b'{"a"}', b"nan", b"[1,]"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        canonical_json(text, without=["stream"])


def test_a_repeat_may_be_streamed_also_if_a_text_ends_with_half_of_a_utf_16_pair() -> None:
    bodies = rb'{"prompt": "\ud83d", "stream": true}', rb'{"stream":false,"prompt":"\ud83d"}'
    assert len({canonical_body("text", body) for body in bodies}) == 1
    assert canonical_body("text", bodies[0]) != canonical_body("chat", bodies[0])
