"""Downloads a medium over HTTP in bounded size and time, only from addresses that may be fetched from.

Clients name any host, so ``check_address`` refuses addresses that are not public unless the operator admits them.
Imported when first needed.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import httpcore2

from penstock.gateway.media.sources import MediaLimits, MediaRejected, RemoteSource, parse_redirect, too_large

_GLOBAL6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def check_address(address: str, limits: MediaLimits) -> None:
    """Reject addresses of this machine and its network, which a client must not reach through the gateway.

    Raises:
        MediaRejected: not a public unicast address.
    """
    if not limits.private and not _public(ipaddress.ip_address(address.partition("%")[0])):
        # Without the address itself, which would disclose how internal names resolve.
        raise MediaRejected(
            "names a host with a private, local or reserved address, which is not allowed "
            "(--allow-private-media-addresses)"
        )


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _public(ipaddress.IPv4Address(address.packed[-4:]))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address not in _GLOBAL6:
            return False  # these embed IPv4 addresses that have not been checked
    return address.is_global and not (
        address.is_private or address.is_multicast or address.is_reserved or address.is_unspecified
    )


MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of one name that are tried
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILURES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError)


class Downloader:
    """Keeps no state between two downloads: no connections, cookies, proxies or credentials."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._backend = _CheckedBackend(limits)
        self._tls: ssl.SSLContext | None = None
        self._headers = [
            (b"User-Agent", f"penstock/{version('penstock')}".encode()),
            (b"Accept", b"image/*, video/*, application/octet-stream"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ]

    async def download(self, source: RemoteSource) -> bytes:
        """
        Raises:
            MediaRejected: not allowed, not found, too large or too slow.
        """
        seconds = self._limits.timeout_s
        try:
            async with asyncio.timeout(seconds):
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await self._ask(source)
                    if isinstance(answer, bytes):
                        return answer
                    source = answer
        except TimeoutError:
            raise MediaRejected(f"did not arrive within {seconds:g} s (--media-timeout-s)") from None
        except _FAILURES as error:
            raise MediaRejected(f"could not be fetched from {source.host}: {type(error).__name__} {error}") from None
        raise MediaRejected(f"redirects more than {MAX_REDIRECTS} times")

    async def check(self, source: RemoteSource) -> None:
        """Whether another server may be asked to fetch it: by the addresses that its name has now.

        Raises:
            MediaRejected: it may not, or its name has none.
        """
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                for address in await resolve(source.host, source.port):
                    check_address(address, self._limits)
        except OSError as error:  # or late
            raise MediaRejected(f"names a host whose address is not found: {source.host[:80]}") from error

    async def _ask(self, source: RemoteSource) -> bytes | RemoteSource:
        """The body, or the target of a redirect."""
        if source.scheme == "https" and self._tls is None:
            self._tls = await asyncio.to_thread(httpcore2.default_ssl_context)
        url = httpcore2.URL(scheme=source.scheme, host=source.host, port=source.port, target=source.target)
        headers = [(b"Host", source.authority.encode()), *self._headers]
        async with (
            httpcore2.AsyncHTTPConnection(url.origin, self._tls, network_backend=self._backend) as connection,
            connection.stream("GET", url, headers=headers) as response,
        ):
            headers_in = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers_in:
                return parse_redirect(source, headers_in[b"location"], self._limits)
            if response.status != 200:
                raise MediaRejected(f"could not be fetched: {source.host} answered {response.status}")
            if headers_in.get(b"content-encoding", "identity").lower() != "identity":
                raise MediaRejected(
                    f"could not be fetched: {source.host} used a content encoding that was not requested"
                )
            return await self._body(response, headers_in.get(b"content-length", ""))

    async def _body(self, response: httpcore2.Response, length: str) -> bytes:
        limit = self._limits.max_bytes
        if length.isdigit() and int(length) > limit:
            raise too_large(limit)
        parts, size = [], 0
        async for part in response.aiter_stream():
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
        return b"".join(parts)


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Resolves a name once, checks its addresses, and connects to those only."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await resolve(host, port)
        for address in addresses:  # all of them, so that the result does not depend on their order
            check_address(address, self._limits)
        last: Exception = OSError("the name has no address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last = error
        raise last


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, from the system's resolver.

    Raises:
        OSError: there are none.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in infos))
