"""From the body of a response, and what it continues, to a request. Pure but for random numbers."""

from collections.abc import Sequence

import msgspec

from gateway.openai.places import rename, renamed
from gateway.openai.prepare import PendingMediaRequest, PreparedRequest, prepare_chat_body
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.requests import check_chat
from gateway.openai.responses_api.chat import Turn, chat_of
from gateway.openai.responses_api.requests import ResponsesRequest
from schemas.errors import ServingError


def prepare_response(
    body: ResponsesRequest,
    history: Sequence[Turn],
    context: PrepareContext,
    *,
    now_ns: int,
    request_id: str | None = None,
) -> PreparedRequest | PendingMediaRequest:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    chat = chat_of(body, history)
    try:
        check_chat(chat.body)
        prepared = prepare_chat_body(chat.body, context, now_ns=now_ns, request_id=request_id)
    except ServingError as error:
        raise renamed(error, chat.places) from None
    if isinstance(prepared, PendingMediaRequest):
        media = [part._replace(field=rename(part.field, chat.places)) for part in prepared.prompt.media]
        return prepared._replace(prompt=prepared.prompt._replace(media=media))
    return prepared


def with_body(prepared: PreparedRequest, endpoint: str, client_body: bytes) -> PreparedRequest:
    """The request as one of another API; ``client_body``: what its answer needs of the client's body."""
    request = msgspec.structs.replace(prepared.request, endpoint=endpoint, client_body=client_body)
    return prepared._replace(request=request)
