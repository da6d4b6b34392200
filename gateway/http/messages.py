"""Errors of the Messages API over HTTP, in Anthropic's shape."""

import msgspec

from penstock.gateway.apis.messages.objects import message_error, status_of
from penstock.gateway.http.answers import DISCONNECTED, JSON, REQUEST_ID, Send
from penstock.schemas.errors import ServingError
from penstock.schemas.ids import new_request_id

_json = msgspec.json.encode


async def send_message_error(send: Send, error: ServingError, request_id: str = "") -> None:
    if error is DISCONNECTED:
        return
    body = _json(message_error(error, request_id))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    name = (request_id or new_request_id()).encode()
    headers += [(REQUEST_ID, name), (b"request-id", name)]
    await send({"type": "http.response.start", "status": status_of(error.code), "headers": headers})
    await send({"type": "http.response.body", "body": body})
