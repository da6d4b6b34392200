"""One log line per HTTP request: who, method, path, status, duration and request id; no query, header or body."""

import re
import time
from collections.abc import MutableMapping
from typing import Any

import structlog

from penstock.gateway.access.caller import ANYONE, CALLER, Caller
from penstock.gateway.http.answers import REQUEST_ID, App, Receive, Scope, Send

log = structlog.get_logger("gateway.access")

_KEY = re.compile("pst-[A-Za-z0-9-]+")  # in a path, where none belongs


def with_access_log(app: App) -> App:
    """Log each request when its answer has ended. Status 0: the client left before an answer began."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began = time.monotonic()
        status, request_id = 0, ""

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = dict(message.get("headers", ())).get(REQUEST_ID, b"").decode("latin-1")
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            caller: Caller = scope.get(CALLER, ANYONE)
            key = caller.key
            log.info(
                "http_request",
                method=scope["method"],
                path=_KEY.sub("pst-…", scope["path"]),
                status=status,
                duration_ms=round(1e3 * (time.monotonic() - began), 1),
                request_id=request_id,
                client=scope["client"][0] if scope.get("client") else "",
                tenant=caller.tenant if key is not None else "",
                key=key.prefix if key is not None else "",
            )

    return logged
