"""Who is behind a proxy: ``X-Forwarded-For`` and ``X-Forwarded-Proto``, of proxies that ``--trusted-proxies`` names.

Anyone can send these headers, so they count only if the peer is such a proxy; and of several addresses only those that
trusted proxies have written, from the right.
"""

import ipaddress
from collections.abc import Iterable, Sequence

from penstock.gateway.http.answers import App, Receive, Scope, Send

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
FORWARDED_FOR, FORWARDED_PROTO = b"x-forwarded-for", b"x-forwarded-proto"
MAX_HOPS = 16


class TrustedProxies:
    """
    Args:
        networks: addresses and networks, such as 10.0.0.0/8.
    Raises:
        ValueError: one of them is neither; the text says which.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        try:
            self._networks = [ipaddress.ip_network(text) for text in networks]
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}; write addresses or networks, such as 10.0.0.0/8") from None

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def client(self, peer: str, forwarded: Iterable[bytes]) -> str:
        """The address of the client: the last one that is no trusted proxy's.

        Args:
            forwarded: values of X-Forwarded-For, in their order.
        """
        client = peer
        hops = b",".join(forwarded).split(b",")[-MAX_HOPS:]
        for hop in reversed(hops):
            if not self.trusts(client):
                return client
            found = _address(hop.decode("latin-1").strip())
            if found is None:
                return client
            client = str(found)
        return client


def with_proxies(app: App, trusted: TrustedProxies) -> App:
    """``app`` with the client's address and scheme in its scope."""

    async def forwarded(scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope["client"]
        if peer and trusted.trusts(peer[0]):
            values = [value for name, value in scope["headers"] if name == FORWARDED_FOR]
            if values:
                scope["client"] = (trusted.client(peer[0], values), 0)
            schemes = [value for name, value in scope["headers"] if name == FORWARDED_PROTO]
            scheme = schemes[-1].rpartition(b",")[2].strip().lower() if schemes else b""
            if scheme in (b"http", b"https"):
                scope["scheme"] = scheme.decode()
        await app(scope, receive, send)

    return forwarded


def _address(text: str) -> Address | None:
    """An address as proxies write it, with a port or not; IPv4 within IPv6 as IPv4."""
    host = text
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        host = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
