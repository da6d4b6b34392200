"""Bytes of a medium, from wherever it is: out of the URL itself, from a file below one folder, or over HTTP.

What a client names is asked with the gateway's own place in the network, so each step is checked where it is taken:
the address of a connection is the one that was checked, whatever the name means a moment later.
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

from gateway.media.media import (
    MAX_REDIRECTS,
    Inline,
    Local,
    MediaLimits,
    MediaRejected,
    Remote,
    below,
    check_address,
    decode,
    locate,
    redirected,
    too_large,
)

LARGE = 64 * 1024  # characters of base64 from which decoding leaves the event loop
MAX_ADDRESSES = 4  # of one name that are tried
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILURES = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError)


class Fetcher:
    """Keeps nothing between two fetches: no connections, cookies, proxies or credentials."""

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
            MediaRejected: not served, not there, too large or too slow.
        """
        match locate(url, self._limits):
            case Inline() as inline:
                if len(inline.text) > LARGE:
                    return await asyncio.to_thread(decode, inline, self._limits)
                return decode(inline, self._limits)
            case Local(path):
                return await asyncio.to_thread(read_below, self._root, path, self._limits.max_bytes)
            case remote:
                return await self._download(remote)

    async def _download(self, source: Remote) -> bytes:
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
        raise MediaRejected(f"is redirected more than {MAX_REDIRECTS} times")

    async def _ask(self, source: Remote) -> bytes | Remote:
        """The body, or where else to ask."""
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
                return redirected(source, given[b"location"], self._limits)
            if response.status != 200:
                raise MediaRejected(f"could not be fetched: {source.host} answered {response.status}")
            if given.get(b"content-encoding", "identity").lower() != "identity":
                raise MediaRejected(
                    f"could not be fetched: {source.host} answered in another encoding than it was asked for"
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
    """Resolves a name once, checks what it means, and connects to just that."""

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
        for address in addresses:  # all of them: which one is taken must not be chance
            check_address(address, self._limits)
        last: Exception = OSError("the name has no address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                last = error
        raise last


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system knows it.

    Raises:
        OSError: there are none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_below(root: str, path: str, limit: int) -> bytes:
    """A regular file below ``root`` (which is a real path), wherever symbolic links lead meanwhile.

    Raises:
        MediaRejected: outside, not there, no file, or too large.
    """
    names = below(os.path.realpath(path), root)
    try:
        at = _open_below(root, names)
    except OSError as error:
        raise MediaRejected(f"names a file that cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode):
            raise MediaRejected("names something that is not a file")
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
    """Step by step from the root: none of the names may have become a symbolic link since it was resolved."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # a pipe must not make us wait for its writer
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
