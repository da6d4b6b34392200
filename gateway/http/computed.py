"""Endpoints that answer from the body alone, without a request: tokens and their number."""

import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from penstock.gateway.access.caller import Caller, caller_of
from penstock.gateway.http.answers import (
    INTERNAL,
    JSON,
    Receive,
    Scope,
    Send,
    send_error,
)
from penstock.gateway.http.bodies import ClientDisconnected, read_body
from penstock.gateway.http.headers import REQUEST_ID
from penstock.gateway.service.service import Gateway
from penstock.schemas.errors import ServingError
from penstock.schemas.ids import new_request_id

log = structlog.get_logger("gateway")


class Computed:
    """
    Args:
        compute: from a body and its caller to what is sent as JSON; raises ``ServingError``.
        refuse: sends an error.
    """

    def __init__(
        self,
        gateway: Gateway,
        compute: Callable[[bytes, Caller], Awaitable[msgspec.Struct]],
        refuse: Callable[[Send, ServingError], Awaitable[None]] = send_error,
    ) -> None:
        self._gateway = gateway
        self._compute = compute
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            body = await read_body(scope, receive, gateway.settings.max_body_bytes)
            content = msgspec.json.encode(await self._compute(body, caller_of(scope)))
            headers = [JSON, (b"content-length", b"%d" % len(content)), (REQUEST_ID, new_request_id().encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
        except ServingError as error:
            await self._refuse(send, error)
        except ClientDisconnected:
            pass
        except Exception:
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):
                await self._refuse(send, INTERNAL)
