"""Fetches the bytes of a medium: from the URL itself, from a file in the allowed folder, or over HTTP.

Clients choose the URL but the gateway's position in the network applies, so each step is checked where it is taken: a
connection goes to the very address that was checked, whatever the name resolves to a moment later.
"""

import asyncio
import os
import stat
from typing import TYPE_CHECKING

from penstock.gateway.media.limits import MediaLimits, MediaRejected, too_large
from penstock.gateway.media.sources import InlineSource, LocalSource, decode_inline, parse_source, path_below

if TYPE_CHECKING:
    from penstock.gateway.media.download import Downloader

LARGE = 64 * 1024  # characters of base64 from which decoding leaves the event loop


class Fetcher:
    """Keeps no state between two fetches: no connections, cookies, proxies or credentials."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._root = os.path.realpath(limits.root) if limits.root else ""
        self._downloader: Downloader | None = None

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
                if self._downloader is None:
                    self._downloader = await asyncio.to_thread(_downloader, self._limits)
                return await self._downloader.download(remote)


def _downloader(limits: MediaLimits) -> "Downloader":
    """Imported when first needed: the HTTP client is an eighth of what a gateway takes to start."""
    from penstock.gateway.media.download import Downloader

    return Downloader(limits)


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
