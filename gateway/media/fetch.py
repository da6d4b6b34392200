"""Fetches the bytes of a medium: from the URL itself, from a file in the allowed folder, or over HTTP.

Clients choose the URL but the gateway's position in the network applies, so each step is checked where it is taken: a
connection goes to the very address that was checked, whatever the name resolves to a moment later.
"""

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import httpcore2

from gateway.media.addresses import check_address
from gateway.media.limits import MediaLimits, MediaRejected, too_large
from gateway.media.sources import (
    InlineSource,
    LocalSource,
    RemoteSource,
    decode_inline,
    parse_redirect,
    parse_source,
    path_below,
)

MAX_REDIRECTS = 3
LARGE = 64 * 1024  # characters of base64 from which decoding leaves the event loop
MAX_ADDRESSES = 4  # of one name that are tried
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILURES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError)


class Fetcher:
    """Keeps no state between two fetches: no connections, cookies, proxies or credentials."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._root = os.path.realpath(limits.root) if limits.root else ""
        self._backend = _CheckedBackend(limits)
        self._tls: ssl.SSLContext | None = None
        self._headers = [
            (b"User-Agent", f"penstock/{version('penstock')}".encode()),
            (b"Accept", b"image/*, application/octet-stream"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ]

    async def fetch(self, url: str) -> bytes:
        """
        Raises:
            MediaRejected: not allowed, not found, too large or too slow.
        """
        match parse_source(url, self._limits):
            case InlineSource() as inline:
                if len(inline.text) > LARGE:
                    return await asyncio.to_thread(decode_inline, inline, self._limits)
                return decode_inline(inline, self._limits)
            case LocalSource(path):
                return await asyncio.to_thread(read_below, self._root, path, self._limits.max_bytes)
            case remote:
                return await self._download(remote)

    async def _download(self, source: RemoteSource) -> bytes:
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
            given = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in given:
                return parse_redirect(source, given[b"location"], self._limits)
            if response.status != 200:
                raise MediaRejected(f"could not be fetched: {source.host} answered {response.status}")
            if given.get(b"content-encoding", "identity").lower() != "identity":
                raise MediaRejected(
                    f"could not be fetched: {source.host} used a content encoding that was not requested"
                )
            return await self._body(response, given.get(b"content-length", ""))

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
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_below(root: str, path: str, limit: int) -> bytes:
    """Read a regular file below ``root``, a path free of symbolic links; safe if links change meanwhile.

    Raises:
        MediaRejected: outside of the root, not found, not a regular file, or too large.
    """
    names = path_below(os.path.realpath(path), root)
    try:
        at = _open_below(root, names)
    except OSError as error:
        raise MediaRejected(f"names a file that cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode):
            raise MediaRejected("is not a file")
        if status.st_size > limit:
            raise too_large(limit)
        with open(at, "rb", closefd=False) as file:
            data = file.read(limit + 1)  # it may have grown
    finally:
        os.close(at)
    if len(data) > limit:
        raise too_large(limit)
    return data


def _open_below(root: str, names: tuple[str, ...]) -> int:
    """Open one component at a time: none may have become a symbolic link since the path was resolved."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # opening a pipe must not wait for its writer
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
