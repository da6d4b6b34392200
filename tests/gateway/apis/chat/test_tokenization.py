"""Tokens of texts and chats, and back."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.tokenization import detokenize, tokenize
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.wire import unpack_tokens
from tests.gateway.apis.chat.test_prepare import chat
from tests.properties import examples

CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


@examples(30)
@given(text=st.text(max_size=60))
def test_a_text_comes_back_from_its_tokens(context: PrepareContext, text: str) -> None:
    tokens = tokenize(body(model="tiny", prompt=text, add_special_tokens=False), context).tokens
    assert detokenize(body(tokens=tokens), context).prompt == text


def test_a_chat_has_the_tokens_of_its_request(context: PrepareContext) -> None:
    messages = [{"role": "user", "content": "hi"}]
    got = tokenize(body(messages=messages, return_token_strs=True), context)
    assert got.tokens == list(unpack_tokens(chat(context).request.prompt))
    assert (got.count, got.max_model_len) == (len(got.tokens), context.max_model_len)
    assert got.token_strs is not None
    assert got.token_strs[0] == "<|im_start|>"
    shorter = tokenize(body(messages=messages, add_generation_prompt=False), context)
    assert got.tokens[: shorter.count] == shorter.tokens
    assert shorter.count < got.count


def test_a_final_message_is_continued(context: PrepareContext) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon "}]
    got = tokenize(body(messages=messages, continue_final_message=True), context)
    assert detokenize(body(tokens=got.tokens), context).prompt.endswith("assistant\nOnce upon ")
    request = chat(context, messages=messages, continue_final_message=True).request
    assert list(unpack_tokens(request.prompt)) == got.tokens


@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [
        (tokenize, {}, "prompt"),
        (tokenize, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        (tokenize, {"prompt": "a", "model": "nosuch"}, "model"),
        (tokenize, {"messages": [CALLING], "continue_final_message": True}, "messages"),
        (
            tokenize,
            {
                "messages": [{"role": "user", "content": "b"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (detokenize, {"tokens": [1 << 31]}, "tokens"),
        (detokenize, {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(
    context: PrepareContext, call: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ServingError) as caught:
        call(body(**fields), context)
    assert caught.value.param == param


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(context: PrepareContext) -> None:
    with pytest.raises(ServingError) as caught:
        tokenize(body(prompt="word " * (1 << 18)), context)
    assert caught.value.code is Code.context_length_exceeded
