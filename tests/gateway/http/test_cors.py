from typing import Any

import pytest

from penstock.gateway.http.middleware import check_origins, with_cors

APP, OTHER = b"https://app.example.com", b"https://evil.example.com"


async def exchange(
    origins: tuple[str, ...], method: str, *headers: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes]]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    await with_cors(app, origins)({"type": "http", "method": method, "headers": list(headers)}, None, send)  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"])


PREFLIGHT = (b"access-control-request-method", b"POST")


async def test_a_page_of_an_allowed_origin_reads_answers_refusals_too() -> None:
    status, headers = await exchange((APP.decode(),), "POST", (b"origin", APP))
    assert status == 401
    assert headers[b"access-control-allow-origin"] == APP
    assert headers[b"vary"].lower() == b"origin"
    assert b"x-ratelimit-remaining-tokens" in headers[b"access-control-expose-headers"]
    assert b"access-control-allow-credentials" not in headers


async def test_a_preflight_needs_no_key_and_allows_the_headers_that_were_asked_for() -> None:
    wanted = (b"access-control-request-headers", b"authorization, x-stainless-lang")
    status, headers = await exchange((APP.decode(),), "OPTIONS", (b"origin", APP), PREFLIGHT, wanted)
    assert status == 200
    assert headers[b"access-control-allow-headers"] == wanted[1]
    assert b"DELETE" in headers[b"access-control-allow-methods"]


async def test_a_public_page_of_an_allowed_origin_may_use_a_server_in_a_private_network() -> None:
    private = (b"access-control-request-private-network", b"true")
    assert (await exchange((APP.decode(),), "OPTIONS", (b"origin", APP), PREFLIGHT, private))[0] == 200
    assert (await exchange((APP.decode(),), "OPTIONS", (b"origin", OTHER), PREFLIGHT, private))[0] == 400


@pytest.mark.parametrize("origin", [OTHER, b"null", b"http://app.example.com", b"https://app.example.com.evil.com"])
async def test_a_page_of_another_origin_reads_nothing(origin: bytes) -> None:
    status, headers = await exchange((APP.decode(),), "OPTIONS", (b"origin", origin), PREFLIGHT)
    assert status == 400
    assert b"access-control-allow-origin" not in headers
    _, headers = await exchange((APP.decode(),), "POST", (b"origin", origin))
    assert b"access-control-allow-origin" not in headers


async def test_with_a_star_every_page_may_and_a_request_without_an_origin_is_left_alone() -> None:
    assert (await exchange(("*",), "GET", (b"origin", OTHER)))[1][b"access-control-allow-origin"] == b"*"
    status, headers = await exchange(("*",), "GET")
    assert status == 401
    assert headers.keys() - {b"vary"} == {b"content-type"}


@pytest.mark.parametrize("text", ["app.example.com", "https://a/path", "https://*.example.com", "null", "https://a b"])
def test_what_is_no_origin_is_refused_at_start(text: str) -> None:
    with pytest.raises(ValueError, match="--cors-origins"):
        check_origins([text])


def test_origins_are_accepted_with_and_without_a_port() -> None:
    check_origins(["*", "https://app.example.com", "http://localhost:3000", "http://[::1]:3000"])
