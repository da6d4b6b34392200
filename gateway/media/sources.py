"""The place of a medium, from a client's URL: inline, in a local folder, or on a host. Pure.

Files and the network are left to ``penstock.gateway.media.loader``, which checks each step with this module.
"""

import binascii
import ipaddress
import re
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from penstock.configs.settings import GatewaySettings
from penstock.schemas.errors import Code, ServingError

_MAX_MESSAGE = 600  # characters; a message may quote the client's URL


class MediaLimits(NamedTuple):
    """
    Attributes:
        max_bytes: of one image, video or embedding file.
        max_pixels: of one image, width x height.
        max_frames: of one video.
        timeout_s: for fetching one medium.
        root: folder whose files may be named; "": none.
        private: fetch from any address and port, not only from public ones at 80 and 443.
    """

    max_bytes: int
    max_pixels: int
    timeout_s: float
    root: str = ""
    private: bool = False
    max_frames: int = 0

    @classmethod
    def of(cls, settings: GatewaySettings) -> "MediaLimits":
        return cls(
            settings.max_media_bytes,
            settings.max_image_pixels,
            settings.media_timeout_s,
            settings.allowed_local_media_path,
            settings.allow_private_media_addresses,
            settings.max_video_frames,
        )


class MediaRejected(ValueError):
    """A medium cannot be used. The text follows the name of its field: "is larger than ..."."""

    def __init__(self, text: str, code: Code = Code.invalid_request) -> None:
        super().__init__(text)
        self.code = code

    def to_error(self, field: str) -> ServingError:
        return ServingError(self.code, f"{field} {self}"[:_MAX_MESSAGE], param=field)


def too_large(max_bytes: int) -> MediaRejected:
    return MediaRejected(f"is larger than {max_bytes} bytes (--max-media-bytes)", Code.body_too_large)


MAX_URL = 8192  # characters, except of data: URLs
BASE64_CHARACTERS = 256 * 1024  # decoded in one call, which holds the interpreter for 0.3 ms
PORTS = {"http": 80, "https": 443}

_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # a name, or an IPv6 address without a zone
_PREFIXES = ("data:", "http:", "https:", "file:")


class MediaPart(NamedTuple):
    """An image, embedding file or video in a message. ``field``: as in "messages[0].content[1].image_url"."""

    field: str
    url: str
    embedding: bool = False
    video: bool = False


class InlineSource(NamedTuple):
    """The base64 text of a data: URL."""

    text: str


class LocalSource(NamedTuple):
    path: str


class RemoteSource(NamedTuple):
    """An HTTP request to make. ``host`` has no brackets; ``target`` (path and query) is ASCII."""

    scheme: str
    host: str
    port: int
    target: str
    url: str

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def parse_source(url: str, limits: MediaLimits) -> InlineSource | LocalSource | RemoteSource:
    """
    Raises:
        MediaRejected: the URL is malformed or not allowed, or the inline data is too large.
    """
    scheme = url[:6].partition(":")[0].lower()
    if scheme == "data":
        return _inline(url, limits)
    if len(url) > MAX_URL:
        raise MediaRejected(f"is a URL of {len(url)} characters; the limit is {MAX_URL}")
    if scheme in PORTS:
        return _remote(url, limits)
    if scheme == "file" or url.startswith("/"):
        return _local(url, limits)
    raise MediaRejected(f"is {url[:80]!r}; it must begin with {', '.join(_PREFIXES)} or / (an absolute path)")


def _inline(url: str, limits: MediaLimits) -> InlineSource:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaRejected("is a data: URL that is not base64; use data:image/png;base64,...")
    if len(text) // 4 * 3 > limits.max_bytes + 3:
        raise too_large(limits.max_bytes)
    return InlineSource(text)


def decode_inline(inline: InlineSource, limits: MediaLimits) -> bytes:
    """The bytes of a data: URL.

    Raises:
        MediaRejected: not base64, or too large.
    """
    text = unquote(inline.text) if "%" in inline.text else inline.text
    parts = []
    for start in range(0, len(text), BASE64_CHARACTERS):  # one call would hold the GIL for all of it
        try:
            parts.append(binascii.a2b_base64(text[start : start + BASE64_CHARACTERS], strict_mode=True))
        except ValueError:
            raise MediaRejected("is a data: URL whose base64 is malformed") from None
        if start + BASE64_CHARACTERS < len(text) and len(parts[-1]) != BASE64_CHARACTERS // 4 * 3:
            raise MediaRejected("is a data: URL whose base64 is malformed")
    data = b"".join(parts)
    if len(data) > limits.max_bytes:
        raise too_large(limits.max_bytes)
    return data


def _local(url: str, limits: MediaLimits) -> LocalSource:
    path = url
    if not url.startswith("/"):
        host, slash, path = url[5:].removeprefix("//").partition("/") if url[5:7] == "//" else ("", "", url[5:])
        if host not in ("", "localhost"):
            raise MediaRejected(f"names a file on host {host[:80]!r}; omit the host")
        path = unquote(slash + path)
    if not limits.root:
        raise MediaRejected("names a local file; local files are not enabled (--allowed-local-media-path)")
    if not path.startswith("/") or "\0" in path:
        raise MediaRejected("is not an absolute path")
    return LocalSource(path)


def path_below(path: str, root: str) -> tuple[str, ...]:
    """The path's components below ``root``; both paths are free of symbolic links.

    Raises:
        MediaRejected: the path is not below the root.
    """
    try:
        names = PurePosixPath(path).relative_to(root).parts
    except ValueError:
        names = ()
    if not names or ".." in names:
        raise MediaRejected("is not in the folder that --allowed-local-media-path allows")
    return names


def _remote(url: str, limits: MediaLimits) -> RemoteSource:
    if any(c <= " " or c == "\x7f" or c == "\\" for c in url):
        raise MediaRejected("is a URL with spaces, backslashes or control characters")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or PORTS[parts.scheme]
        if ":" in host:
            ipaddress.IPv6Address(host)
        else:
            host = host.encode("idna").decode("ascii")
    except ValueError:
        raise MediaRejected("is a malformed URL") from None
    if not host:
        raise MediaRejected("is a URL without a host")
    if not _HOST.fullmatch(host):
        raise MediaRejected("is a malformed URL")
    if parts.username is not None or parts.password is not None:
        raise MediaRejected("is a URL with a user name or password; credentials are not allowed")
    if not limits.private and port not in PORTS.values():
        raise MediaRejected(f"names port {port}; only 80 and 443 are allowed (--allow-private-media-addresses)")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (f"?{_query(parts.query)}" if parts.query else "")
    return RemoteSource(parts.scheme, host, port, target, url)


def _query(text: str) -> str:
    return quote(text, safe="/%:@!$&'()*+,;=~-._?")


def parse_redirect(source: RemoteSource, location: str, limits: MediaLimits) -> RemoteSource:
    """The target of a redirect, checked like the first URL.

    Raises:
        MediaRejected: not http(s), or a URL that the client could not have named either.
    """
    try:
        url = urljoin(source.url, location)
        scheme = urlsplit(url).scheme
    except ValueError:
        raise MediaRejected("redirects to a malformed URL") from None
    if len(url) > MAX_URL or scheme not in PORTS:
        raise MediaRejected("redirects to a URL that is not http(s)")
    return _remote(url, limits)
