from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.middleware import TrustedProxies, with_proxies

TRUSTED = TrustedProxies(["10.0.0.0/8", "fd00::/8", "127.0.0.1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", [b"203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", [b"198.51.100.1, 203.0.113.7"], "203.0.113.7"),  # the first was written by the client itself
        ("10.0.0.1", [b"203.0.113.7, 10.2.3.4, 127.0.0.1"], "203.0.113.7"),
        ("10.0.0.1", [b"203.0.113.7", b"10.2.3.4"], "203.0.113.7"),
        ("10.0.0.1", [b"203.0.113.7:4711"], "203.0.113.7"),
        ("fd00::1", [b"[2001:db8::1]:4711"], "2001:db8::1"),
        ("::ffff:10.0.0.1", [b"2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", [b"unknown, 10.2.3.4"], "10.2.3.4"),
        ("10.0.0.1", [b"203.0.113.7, nonsense"], "10.0.0.1"),
        ("10.0.0.1", [b""], "10.0.0.1"),
        ("10.0.0.1", [b"10.0.0.2"], "10.0.0.2"),
        ("203.0.113.9", [b"198.51.100.1"], "203.0.113.9"),
        ("", [b"198.51.100.1"], ""),
    ],
)
def test_the_client_is_the_last_address_that_no_trusted_proxy_has(
    peer: str, forwarded: list[bytes], client: str
) -> None:
    assert TRUSTED.client(peer, forwarded) == client


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_whatever_a_client_writes_a_proxys_own_entry_wins(forged: list[bytes]) -> None:
    assert TRUSTED.client("10.0.0.1", [*forged, b"203.0.113.7"]) == "203.0.113.7"


@pytest.mark.parametrize("text", ["10.0.0.0/33", "proxy.example.com", "10.0.0.1/8", ""])
def test_what_is_no_network_is_refused_at_start(text: str) -> None:
    with pytest.raises(ValueError, match="--trusted-proxies"):
        TrustedProxies([text])


@pytest.mark.parametrize(
    ("peer", "seen"), [("10.0.0.1", (("203.0.113.7", 0), "https")), ("203.0.113.9", (("203.0.113.9", 5), "http"))]
)
async def test_the_headers_count_only_from_a_trusted_peer(peer: str, seen: tuple[tuple[str, int], str]) -> None:
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append((scope["client"], scope["scheme"]))

    headers = [(b"x-forwarded-for", b"203.0.113.7"), (b"x-forwarded-proto", b"http, HTTPS")]
    scope = {"client": (peer, 5), "scheme": "http", "headers": headers}
    await with_proxies(app, TRUSTED)(scope, None, None)  # type: ignore[arg-type]
    assert found == [seen]
