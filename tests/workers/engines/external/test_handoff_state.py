"""The state of a computed prompt between two engines of others: of which tokens, for whom, and how often."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.external.handoff_state import ConsumedStates, count_prefilled, pack, unpack

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=6)


@given(TOKENS, TOKENS.filter(bool), st.integers(1, 6))
def test_drawn_tokens_are_distinguished_from_computed_ones(context: list[int], first: list[int], known: int) -> None:
    known = min(known, len(first))
    state = unpack(pack({"a": b"\x00"}, "l", context, first), "l")
    assert state.params == {"a": b"\x00"}
    tokens = array("I", [*context, *first[:known]])
    assert count_prefilled(state, tokens, len(context)) == known
    with pytest.raises(ValueError, match="other tokens"):
        count_prefilled(state, tokens, len(tokens))  # all are the client's own
    changed = [*context, *first[:known]]
    changed[0] ^= 1
    with pytest.raises(ValueError, match="other tokens"):
        count_prefilled(state, changed, len(context))


@given(st.binary(max_size=40))
def test_damaged_states_are_refused(junk: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(junk, "l")


def test_engines_of_another_kind_or_version_do_not_take_over() -> None:
    opaque = pack({}, "l", [1], [2])
    with pytest.raises(ValueError, match="same KV cache"):
        unpack(opaque, "m")
    other = msgspec.msgpack.encode(msgspec.msgpack.decode(opaque) | {"version": 7})
    with pytest.raises(ValueError, match="version 7"):
        unpack(other, "l")


def test_a_state_is_taken_once() -> None:
    consumed = ConsumedStates(remembered=2)
    assert consumed.claim("engine", "1")
    assert not consumed.claim("engine", "1")
    assert consumed.claim("engine", "2")
    assert consumed.claim("other", "1")
    assert consumed.claim("engine", "1")  # forgotten since


def test_of_a_states_bytes_only_a_digest_is_kept() -> None:
    consumed = ConsumedStates()
    assert consumed.claim(1, bytes(1 << 20))
    assert not consumed.claim(1, bytes(1 << 20))
    assert consumed.claim(1, bytes((1 << 20) + 1))
    assert all(len(part) <= 32 for state in consumed._seen for part in state if isinstance(part, bytes))
