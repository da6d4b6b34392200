"""Images and embeddings of a request: where they are, whether they may be asked for there, what their bytes are.

Knows neither files nor network: gateway.media.fetch asks it before and after whatever it does.
"""

import binascii
import ipaddress
import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec

from configs.settings import GatewaySettings
from gateway.media.image_header import NotAnImage, kind_of, size_of
from schemas.errors import Code, ServingError

EMBEDDING = "embedding"
MAX_URL = 8192
MAX_HEADER = 64 * 1024  # of a safetensors file with one tensor
MAX_REDIRECTS = 3
SLICE = 256 * 1024  # characters of base64
PORTS = {"http": 80, "https": 443}

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # a name, or an IPv6 address without a zone
_GLOBAL6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_FROM = ("data:", "http:", "https:", "file:")


class MediaPart(NamedTuple):
    """One image or embedding file that a message names."""

    field: str  # as in "messages[0].content[1].image_url"
    url: str
    embedding: bool = False


class MediaLimits(NamedTuple):
    """``root``: folder of the files that may be named; "": none may. ``private``: any address may be asked."""

    max_bytes: int
    max_pixels: int
    timeout_s: float
    root: str = ""
    private: bool = False

    @classmethod
    def of(cls, settings: GatewaySettings) -> "MediaLimits":
        return cls(
            settings.max_media_bytes,
            settings.max_image_pixels,
            settings.media_timeout_s,
            settings.allowed_local_media_path,
            settings.allow_private_media_addresses,
        )


class Inline(NamedTuple):
    """base64 out of a data: URL."""

    text: str


class Local(NamedTuple):
    path: str


class Remote(NamedTuple):
    """What to ask of whom. ``host`` without brackets, ``target`` in ASCII."""

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


class MediaRejected(ValueError):
    """A medium cannot be used; the text goes behind the field's name."""

    def __init__(self, text: str, code: Code = Code.invalid_request) -> None:
        super().__init__(text)
        self.code = code

    def at(self, field: str) -> ServingError:
        return ServingError(self.code, f"{field} {self}"[:600], param=field)


def locate(url: str, limits: MediaLimits) -> Inline | Local | Remote:
    """Where a medium is.

    Raises:
        MediaRejected: nowhere that is served, or inline and too large.
    """
    scheme = url[:6].partition(":")[0].lower()
    if scheme == "data":
        return _inline(url, limits)
    if len(url) > MAX_URL:
        raise MediaRejected(f"is a URL of {len(url)} characters, and the limit is {MAX_URL}")
    if scheme in PORTS:
        return _remote(url, limits)
    if scheme == "file" or url.startswith("/"):
        return _local(url, limits)
    raise MediaRejected(f"is {url[:80]!r}; it must begin with {', '.join(_FROM)} or / (an absolute path)")


def _inline(url: str, limits: MediaLimits) -> Inline:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaRejected("is a data: URL that is not base64; write data:image/png;base64,...")
    if len(text) // 4 * 3 > limits.max_bytes + 3:
        raise too_large(limits.max_bytes)
    return Inline(text)


def decode(inline: Inline, limits: MediaLimits) -> bytes:
    """The bytes of a data: URL.

    Raises:
        MediaRejected: not base64, or too large.
    """
    text = unquote(inline.text) if "%" in inline.text else inline.text
    parts = []
    for start in range(0, len(text), SLICE):  # between two slices other threads can run
        try:
            parts.append(binascii.a2b_base64(text[start : start + SLICE], strict_mode=True))
        except ValueError:
            raise MediaRejected("is a data: URL whose base64 is malformed") from None
        if start + SLICE < len(text) and len(parts[-1]) != SLICE // 4 * 3:
            raise MediaRejected("is a data: URL whose base64 is malformed")
    data = b"".join(parts)
    if len(data) > limits.max_bytes:
        raise too_large(limits.max_bytes)
    return data


def _local(url: str, limits: MediaLimits) -> Local:
    path = url
    if not url.startswith("/"):
        host, slash, path = url[5:].removeprefix("//").partition("/") if url[5:7] == "//" else ("", "", url[5:])
        if host not in ("", "localhost"):
            raise MediaRejected(f"names a file on the host {host[:80]!r}; leave the host out")
        path = unquote(slash + path)
    if not limits.root:
        raise MediaRejected("names a local file, and none is served here (--allowed-local-media-path)")
    if not path.startswith("/") or "\0" in path:
        raise MediaRejected("is not an absolute path")
    return Local(path)


def below(path: str, root: str) -> tuple[str, ...]:
    """The names that lead from ``root`` to ``path``; both without symbolic links.

    Raises:
        MediaRejected: it is not below.
    """
    try:
        names = PurePosixPath(path).relative_to(root).parts
    except ValueError:
        names = ()
    if not names or ".." in names:
        raise MediaRejected("is not a file below the folder that is served (--allowed-local-media-path)")
    return names


def _remote(url: str, limits: MediaLimits) -> Remote:
    """
    Raises:
        MediaRejected: a URL that parsers may read in different ways, or a port that is not served.
    """
    if any(c <= " " or c == "\x7f" or c == "\\" for c in url):
        raise MediaRejected("is a URL with blanks, backslashes or control characters")
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
        raise MediaRejected("is a URL with a user name or password; those would be logged")
    if not limits.private and port not in PORTS.values():
        raise MediaRejected(f"names port {port}; only 80 and 443 are asked (--allow-private-media-addresses)")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (f"?{_query(parts.query)}" if parts.query else "")
    return Remote(parts.scheme, host, port, target, url)


def _query(text: str) -> str:
    return quote(text, safe="/%:@!$&'()*+,;=~-._?")


def redirected(source: Remote, location: str, limits: MediaLimits) -> Remote:
    """Where an answer sends us, checked like the first URL.

    Raises:
        MediaRejected: not http(s), or a URL that would not have been asked in the first place.
    """
    try:
        url = urljoin(source.url, location)
        scheme = urlsplit(url).scheme
    except ValueError:
        raise MediaRejected("is redirected to a malformed URL") from None
    if len(url) > MAX_URL or scheme not in PORTS:
        raise MediaRejected("is redirected to something that is not http(s)")
    return _remote(url, limits)


def check_address(address: str, limits: MediaLimits) -> None:
    """Refuse to ask this machine and its network for what a client names.

    Raises:
        MediaRejected: the address is not a public unicast one.
    """
    if not limits.private and not _public(ipaddress.ip_address(address.partition("%")[0])):
        # not the address itself: that would tell a client what names mean inside
        raise MediaRejected(
            "names a host with a private, local or reserved address, which is not asked "
            "(--allow-private-media-addresses)"
        )


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _public(ipaddress.IPv4Address(address.packed[-4:]))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address not in _GLOBAL6:
            return False  # tunnels and old forms lead to IPv4 addresses that nobody has checked
    return address.is_global and not (
        address.is_private or address.is_multicast or address.is_reserved or address.is_unspecified
    )


def check_image(data: bytes, limits: MediaLimits) -> str:
    """The media type of an image, by its bytes alone.

    Raises:
        MediaRejected: no image of a known format, or too many pixels.
    """
    try:
        width, height = size_of(data)
    except NotAnImage as error:
        raise MediaRejected(str(error), Code.unsupported if error.unknown else Code.invalid_request) from None
    if width * height > limits.max_pixels:
        raise MediaRejected(
            f"is an image of {width} x {height} pixels, and the limit is {limits.max_pixels} (--max-image-pixels)"
        )
    return kind_of(data)


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_tensor = msgspec.json.Decoder(_Tensor).decode


def embedding_tokens(data: bytes, hidden: int) -> int:
    """How many placeholders an embedding file stands for: the first dimension of its one tensor.

    Args:
        hidden: the width that the model takes; 0: not known here.
    Raises:
        MediaRejected: not a safetensors file of one (tokens, hidden) tensor of floats.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise MediaRejected("is not a safetensors file (the only form of embeddings that is read)")
    try:
        entries: dict[str, Any] = _header(data[8 : 8 + length])
        tensors = [_tensor(entry) for name, entry in entries.items() if name != "__metadata__"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MediaRejected("is a safetensors file with a malformed header") from None
    if len(tensors) != 1:
        raise MediaRejected(f"is a safetensors file with {len(tensors)} tensors; it must have 1")
    (tensor,) = tensors
    size = _FLOATS.get(tensor.dtype)
    if size is None:
        raise MediaRejected(f"holds a tensor of {tensor.dtype[:20]!r}; it must be one of {', '.join(_FLOATS)}")
    if len(tensor.shape) != 2 or min(tensor.shape) < 1 or hidden not in (0, tensor.shape[1]):
        width = hidden or "hidden"
        raise MediaRejected(f"holds a tensor of shape {str(tensor.shape)[:80]}; this model takes (tokens, {width})")
    tokens, width = tensor.shape
    if tensor.data_offsets != (0, tokens * width * size) or len(data) != 8 + length + tokens * width * size:
        raise MediaRejected("is a safetensors file whose size does not fit its header")
    return tokens


def too_large(limit: int) -> MediaRejected:
    return MediaRejected(f"is larger than {limit} bytes (--max-media-bytes)", Code.body_too_large)
