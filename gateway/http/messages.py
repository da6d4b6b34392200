"""The Messages API over HTTP: errors in Anthropic's shape, and counting tokens."""

import contextlib

import msgspec
import structlog

from gateway.anthropic.objects import TokenCount, message_error, status_of
from gateway.http.answers import (
    DISCONNECTED,
    INTERNAL,
    JSON,
    REQUEST_ID,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    read_body,
)
from gateway.openai.common import MESSAGE
from gateway.service import Gateway
from schemas.errors import ServingError

log = structlog.get_logger("gateway")

_json = msgspec.json.encode


async def send_message_error(send: Send, error: ServingError, request_id: str = "") -> None:
    if error is DISCONNECTED:
        return
    body = _json(message_error(error, request_id))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    if request_id:
        headers += [(REQUEST_ID, request_id.encode()), (b"request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": status_of(error.code), "headers": headers})
    await send({"type": "http.response.body", "body": body})


class CountTokens:
    """POST /v1/messages/count_tokens."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            body = await read_body(scope, receive, gateway.settings.max_body_bytes)
            count = _json(TokenCount(await gateway.count_tokens(MESSAGE, body)))
            await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
            await send({"type": "http.response.body", "body": count})
        except ServingError as error:
            await send_message_error(send, error)
        except ClientDisconnected:
            pass
        except Exception:
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):
                await send_message_error(send, INTERNAL)
