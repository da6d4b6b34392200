"""Options that no API knows are named, not silently dropped."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.common import CHAT, MESSAGE, RESPONSE
from gateway.option_names import MOST, check_options, listed, unknown_options
from schemas.errors import ServingError


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSE, MESSAGE])
def test_only_what_no_api_knows_is_unknown(endpoint: str) -> None:
    body = {"model": "m", "stream": True, "metadata": {}, "nosuch": {"temperature": 1}, "temperature": 1}
    assert unknown_options(endpoint, json.dumps(body).encode()) == ["nosuch"]
    check_options(endpoint, b'{"model": "m"}')
    with pytest.raises(ServingError, match="unknown options: nosuch") as caught:
        check_options(endpoint, json.dumps(body).encode())
    assert caught.value.param == "nosuch"


def test_tools_that_no_model_is_told_of_are_named() -> None:
    body = json.dumps({"model": "m", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}).encode()
    assert unknown_options(RESPONSE, body) == ["tools[1]"]
    with pytest.raises(ServingError, match=r"unknown options: tools\[1\]"):
        check_options(RESPONSE, body)
    assert unknown_options(RESPONSE, b'{"tools": ["web_search"], "input": "hi"}') == []


@given(st.binary(max_size=30) | st.sampled_from([b"[1]", b"{", b"3", b'{"a": 1} x']))
def test_what_is_no_object_has_no_options(data: bytes) -> None:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        assert unknown_options(CHAT, data) == ()


def test_a_body_that_is_nested_too_deeply_is_left_to_the_parser() -> None:
    assert unknown_options(CHAT, b'{"a": ' + b"[" * 100_000) == ()


@given(st.lists(st.text(max_size=80), max_size=40, unique=True))
def test_names_fit_into_a_header_whatever_a_client_sends(names: list[str]) -> None:
    text = listed(names)
    text.encode("latin-1")
    assert text.isprintable()
    assert len(text) < (MOST + 1) * 80


def test_names_that_a_header_cannot_hold_are_counted() -> None:
    assert listed(["a", "b\r\nc"]) == "a, and 1 more"
    assert listed(["ключ", ""]) == "2 with names that cannot be shown"
