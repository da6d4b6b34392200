"""From the body of a message to a request. Pure but for random numbers."""

from typing import NamedTuple

import msgspec

from penstock.gateway.apis.chat.bodies import check_chat
from penstock.gateway.apis.chat.prepare import PendingMediaRequest, PreparedRequest, count_prompt, prepare_chat_body
from penstock.gateway.apis.messages.bodies import parse_count, parse_message
from penstock.gateway.apis.messages.chat import chat_of, counted_chat
from penstock.gateway.apis.messages.objects import TokenCount
from penstock.gateway.apis.messages.render import ClientBody
from penstock.gateway.base.places import rename, renamed
from penstock.gateway.base.prepare_context import PrepareContext
from penstock.schemas.errors import ServingError


class PreparedMessage(NamedTuple):
    """
    Attributes:
        context: what the request was prepared for, with the client's limit of the output.
        client_body: to be stored with the request.
    """

    prepared: PreparedRequest | PendingMediaRequest
    context: PrepareContext
    client_body: bytes


def prepare_message(data: bytes, context: PrepareContext, *, now_ns: int, request_id: str) -> PreparedMessage:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    asked = parse_message(data)
    chat = chat_of(asked)
    # The output may be as long as the context has room for, so the limit is a default and not a demand.
    context = context._replace(default_max_tokens=asked.max_tokens)
    try:
        check_chat(chat.body)
        body = msgspec.structs.replace(chat.body, max_completion_tokens=None)
        if context.parsers is None or not context.parsers.reasoning:  # whoever does not think keeps within any budget
            body = msgspec.structs.replace(body, max_thinking_tokens=None)
        prepared = prepare_chat_body(body, context, now_ns=now_ns, request_id=request_id)
    except ServingError as error:
        raise renamed(error, chat.places) from None
    if isinstance(prepared, PendingMediaRequest):
        media = [part._replace(field=rename(part.field, chat.places)) for part in prepared.prompt.media]
        prepared = prepared._replace(prompt=prepared.prompt._replace(media=media))
    return PreparedMessage(prepared, context, msgspec.json.encode(ClientBody(asked.max_tokens)))


def count_message(data: bytes, context: PrepareContext) -> TokenCount:
    """Tokens of a message's prompt.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    chat = counted_chat(parse_count(data))
    try:
        check_chat(chat.body)
        return TokenCount(count_prompt(chat.body, context))
    except ServingError as error:
        raise renamed(error, chat.places) from None
