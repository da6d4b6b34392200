"""From the body of a response, and what it continues, to a request. Pure but for random numbers."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, check_chat
from penstock.gateway.apis.chat.prepare import PendingMediaRequest, PreparedRequest, count_prompt, prepare_chat_body
from penstock.gateway.apis.responses.bodies import ResponsesRequest
from penstock.gateway.apis.responses.chat import Turn, chat_of
from penstock.gateway.apis.responses.compaction import with_instruction
from penstock.gateway.base.places import rename, renamed
from penstock.gateway.base.prepare_context import PrepareContext
from penstock.schemas.errors import Code, ServingError

T = TypeVar("T")


def prepare_response(
    body: ResponsesRequest,
    history: Sequence[Turn],
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str,
    compacts: bool = False,
) -> PreparedRequest | PendingMediaRequest:
    """
    Args:
        compacts: the conversation is summarised, not continued.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    chat = chat_of(body, history)
    if compacts:
        chat = chat._replace(body=msgspec.structs.replace(chat.body, messages=with_instruction(chat.body.messages)))
    try:
        check_chat(chat.body)
        prepared = _fitting(
            lambda each: prepare_chat_body(each, context, now_ns=now_ns, request_id=request_id),
            chat.body,
            body.truncation,
        )
    except ServingError as error:
        raise renamed(error, chat.places) from None
    if isinstance(prepared, PendingMediaRequest):
        media = [part._replace(field=rename(part.field, chat.places)) for part in prepared.prompt.media]
        return prepared._replace(prompt=prepared.prompt._replace(media=media))
    return prepared


def count_prompt_of(body: ResponsesRequest, history: Sequence[Turn], context: PrepareContext) -> int:
    """Tokens of the prompt.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    chat = chat_of(body, history)
    try:
        check_chat(chat.body)
        return count_prompt(chat.body, context)
    except ServingError as error:
        raise renamed(error, chat.places) from None


def _fitting(prepare: Callable[[ChatCompletionRequest], T], chat: ChatCompletionRequest, truncation: str | None) -> T:
    """What ``prepare`` makes of the chat; with truncation "auto", of as many of its last turns as the context takes.

    Raises:
        ServingError: not even the last turn fits, or something else is wrong.
    """
    try:
        return prepare(chat)
    except ServingError as error:
        if truncation != "auto" or error.code is not Code.context_length_exceeded:
            raise
        too_long = error
    # Turns begin with what the user says, so that no result of a call stays without its call.
    first = next((at for at, message in enumerate(chat.messages) if message.role not in ("system", "developer")), 0)
    starts = [at for at, message in enumerate(chat.messages) if message.role == "user" and at > first]
    found: T | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        messages = [*chat.messages[:first], *chat.messages[starts[middle] :]]
        try:
            found = prepare(msgspec.structs.replace(chat, messages=messages))
            high = middle
        except ServingError as error:
            if error.code is not Code.context_length_exceeded:
                raise
            low = middle + 1
    if found is None:
        raise too_long
    return found


def with_body(prepared: PreparedRequest, endpoint: str, client_body: bytes) -> PreparedRequest:
    """The request as one of another API; ``client_body``: what its answer needs of the client's body."""
    request = msgspec.structs.replace(prepared.request, endpoint=endpoint, client_body=client_body)
    return prepared._replace(request=request)
