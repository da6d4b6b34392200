from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.gateway.http.middleware import with_access_log

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"key=secret", "headers": []}


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"secret", "more_body": False}


async def send(message: Any) -> None:
    pass


async def test_a_request_is_logged_once_with_its_status_and_id_and_without_its_body() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 429, "headers": [(b"x-request-id", b"r1")]})
        await send({"type": "http.response.body", "body": b"secret"})

    with capture_logs() as lines:
        await with_access_log(app)(dict(SCOPE), receive, send)
    [line] = lines
    assert line.pop("duration_ms") >= 0
    assert line == {
        "event": "http_request",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/completions",
        "status": 429,
        "request_id": "r1",
        "client": "",
        "tenant": "",
        "key": "",
    }


async def test_a_request_that_ends_without_an_answer_is_logged_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    with capture_logs() as lines, pytest.raises(RuntimeError):
        await with_access_log(app)(dict(SCOPE), receive, send)
    assert [(line["status"], line["request_id"]) for line in lines] == [(0, "")]
