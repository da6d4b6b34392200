"""Bodies of requests as JSON."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.base.request_bodies import decode_body
from penstock.schemas.errors import ServingError

decode = msgspec.json.Decoder(list[str]).decode


@given(st.lists(st.text(st.characters() | st.characters(categories=["Cs"]) | st.sampled_from('\\u/"😀'))))
def test_half_of_a_utf_16_pair_is_a_replacement_character_and_all_else_is_kept(texts: list[str]) -> None:
    assert decode_body(decode, json.dumps(texts).encode()) == [well_formed(text) for text in texts]


def well_formed(text: str) -> str:
    """As ``String.prototype.toWellFormed`` of JavaScript."""
    joined = text.encode("utf-16-le", "surrogatepass")
    units = [int.from_bytes(joined[at : at + 2], "little") for at in range(0, len(joined), 2)]
    out, at = "", 0
    while at < len(units):
        pair = units[at : at + 2]
        if len(pair) == 2 and 0xD800 <= pair[0] < 0xDC00 <= pair[1] < 0xE000:
            out, at = out + chr(0x10000 + ((pair[0] - 0xD800) << 10) + pair[1] - 0xDC00), at + 2
        else:
            out, at = out + ("�" if 0xD800 <= pair[0] < 0xE000 else chr(pair[0])), at + 1
    return out


@pytest.mark.parametrize("body", [rb'["\ud83d"', rb'["\ud83d\q"]', b'["\xff\\ud83d"]', rb'["\ud83d", 1]'])
def test_what_is_no_json_besides_is_refused(body: bytes) -> None:
    with pytest.raises(ServingError):
        decode_body(decode, body)


class Options(msgspec.Struct):
    n: int | None = None
    top_p: float = 1.0
    options: dict[str, int] = {}
    thinking: dict[str, int] = {}
    stop_token_ids: list[int] = []
    prompt: list[list[int]] = []
    schema: dict[str, Any] = {}


def test_a_whole_number_may_be_written_as_a_float() -> None:
    options = msgspec.json.Decoder(Options).decode
    assert decode_body(options, b'{"n": 2.0, "top_p": 0.5, "options": {"num_predict": -1.0}}') == Options(
        2, 0.5, {"num_predict": -1}
    )
    assert decode_body(options, b'{"n": 3e2, "top_p": 1.0}') == Options(300)
    lists = b'"stop_token_ids": [2.0], "prompt": [[1.0, 2]], "schema": {"maximum": 1.0}'
    whole = decode_body(options, b'{"thinking": {"budget_tokens": 1024.0}, %b}' % lists)
    assert (whole.thinking, whole.stop_token_ids, whole.prompt) == ({"budget_tokens": 1024}, [2], [[1, 2]])
    assert isinstance(whole.schema["maximum"], float), "what is no option stays as it is"
    wrong = (b'{"n": 2.5}', b'{"n": 1e300}', b'{"n": "2.0"}', b'{"n": [2.0]}', b'{"stop_token_ids": [2.5]}')
    for body in (*wrong, b"[2.0]", b"2.0"):
        with pytest.raises(ServingError) as refused:
            decode_body(options, body)
        assert refused.value.param in ("n", "stop_token_ids[0]", None)
