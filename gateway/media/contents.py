"""Recognises the bytes of a medium: an image and its orientation, or an embedding file of a known shape. Decodes
nothing.

Image libraries also parse metadata before they report a size: a JPEG of empty markers takes Pillow 0.4 s per MB. This
parser stops at the first pixel, after a bounded number of steps.

Cameras store an image as their sensor read it, and in an Exif block which way is up.
"""

from struct import Struct, unpack_from
from struct import error as _StructError
from typing import Any, NamedTuple

import msgspec

from penstock.gateway.media.sources import MediaLimits, MediaRejected
from penstock.schemas.errors import Code

MAX_STEPS = 4096  # markers, chunks or blocks in front of the pixels

_PNG = b"\x89PNG\r\n\x1a\n"
_U16, _U32, _PAIR16, _PAIR32, _DESCRIPTOR = map(Struct, (">H", ">I", ">HH", ">II", "<HHHHB"))
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # JPEG markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG: SOF0 to SOF15
_SCAN, _END = 0xDA, 0xD9


class NotAnImage(ValueError):
    """The bytes are not a complete header of a known format. The text follows the name of the field.

    Attributes:
        unknown: not one of the formats, rather than a malformed file of one.
    """

    def __init__(self, text: str, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


def kind_of(data: bytes) -> str:
    """The media type, from the first bytes.

    Raises:
        NotAnImage: not one of the formats.
    """
    if data.startswith(_PNG):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise NotAnImage("is not a PNG, JPEG, WebP or GIF image", unknown=True)


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, of the largest canvas that a decoder may make of the header.

    Raises:
        NotAnImage: the header is cut off or malformed.
    """
    kind = kind_of(data)
    try:
        width, height = _SIZES[kind](data)
    except (IndexError, ValueError, _StructError) as error:
        if isinstance(error, NotAnImage):
            raise
        raise NotAnImage(f"is cut off within its {_name(kind)} header") from None
    if not width or not height:
        raise NotAnImage(f"is a {_name(kind)} image of {width} x {height} pixels")
    return width, height


def _name(kind: str) -> str:
    return kind.removeprefix("image/").upper()


def _png(data: bytes) -> tuple[int, int]:
    if data[8:16] != b"\0\0\0\rIHDR":
        raise NotAnImage("is a PNG without a header")
    at = 8 + 12 + 13
    for _ in range(MAX_STEPS):
        length, kind = _U32.unpack_from(data, at)[0], data[at + 4 : at + 8]
        if kind == b"IDAT":
            width, height = _PAIR32.unpack_from(data, 16)
            return width, height
        if kind in (b"IHDR", b"IEND") or length >= 1 << 31:
            break
        at += 12 + length
    raise NotAnImage("is a malformed PNG")


def _jpeg(data: bytes) -> tuple[int, int]:
    width = height = 0
    at = 2
    for _ in range(MAX_STEPS):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _BARE:
            at += 2
        elif marker in (_SCAN, _END):
            return width, height
        else:
            if marker in _FRAMES:
                rows, columns = _PAIR16.unpack_from(data, at + 5)
                width, height = max(width, columns), max(height, rows)
            at += 2 + max(2, _U16.unpack_from(data, at + 2)[0])
    raise NotAnImage("is a malformed JPEG")


def _gif(data: bytes) -> tuple[int, int]:
    """The logical screen, or the first frame where that is larger."""
    width, height, flags = data[6] | data[7] << 8, data[8] | data[9] << 8, data[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    inside = False  # an extension block
    for _ in range(MAX_STEPS):
        first = data[at]
        if inside:
            at += 1 + first
            inside = first > 0
        elif first == 0x21:
            at += 2
            inside = True
        elif first == 0x2C:
            left, top, columns, rows, _flags = _DESCRIPTOR.unpack_from(data, at + 1)
            return max(width, left + columns), max(height, top + rows)
        else:
            break
    raise NotAnImage("is a malformed GIF")


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        canvas = data[24:30]
        if len(canvas) == 6:
            return 1 + int.from_bytes(canvas[:3], "little"), 1 + int.from_bytes(canvas[3:], "little")
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        if data[20] == 0x2F and len(data) >= 25:
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return data[26] | (data[27] & 0x3F) << 8, data[28] | (data[29] & 0x3F) << 8
    raise NotAnImage("is a malformed WebP")


_SIZES = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}


_ORIENTATION = 0x0112
_SHORT = 3
_JPEG_SCAN, _JPEG_END, _APP1 = 0xDA, 0xD9, 0xE1
_EXIF = b"Exif\0\0"


def lies_on_its_side(data: bytes) -> bool:
    """Whether height and width are exchanged when the image is turned upright. A malformed block turns nothing."""
    try:
        return _orientation(data) in (5, 6, 7, 8)
    except (IndexError, ValueError, _StructError):
        return False


def _orientation(data: bytes) -> int:
    at = 2
    for _ in range(MAX_STEPS):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (_JPEG_SCAN, _JPEG_END):
            return 1
        if marker == 0xFF:  # padding
            at += 1
        elif marker == _APP1 and data[at + 4 : at + 10] == _EXIF:
            return _of_tiff(data, at + 10)
        else:
            at += 2 + max(2, unpack_from(">H", data, at + 2)[0])
    return 1


def _of_tiff(data: bytes, start: int) -> int:
    order = {b"II": "<", b"MM": ">"}.get(data[start : start + 2], "")
    if not order:
        return 1
    first = start + unpack_from(f"{order}I", data, start + 4)[0]
    for entry in range(min(unpack_from(f"{order}H", data, first)[0], MAX_STEPS)):
        tag, kind = unpack_from(f"{order}HH", data, first + 2 + 12 * entry)
        if tag == _ORIENTATION:
            return int(unpack_from(f"{order}H", data, first + 10 + 12 * entry)[0]) if kind == _SHORT else 1
    return 1


EMBEDDING = "embedding"
MAX_HEADER = 64 * 1024  # bytes; of a safetensors file with one tensor

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # dtype -> bytes per element


class ImageHeader(NamedTuple):
    """``kind``: the media type. Height and width are those of the upright image, in pixels."""

    kind: str
    height: int
    width: int


def check_image(data: bytes, limits: MediaLimits) -> ImageHeader:
    """What an image is, from its bytes alone.

    Raises:
        MediaRejected: not an image of a known format, or too many pixels.
    """
    try:
        width, height = size_of(data)
    except NotAnImage as error:
        raise MediaRejected(str(error), Code.unsupported if error.unknown else Code.invalid_request) from None
    if width * height > limits.max_pixels:
        raise MediaRejected(
            f"is an image of {width} x {height} pixels; the limit is {limits.max_pixels} (--max-image-pixels)"
        )
    kind = kind_of(data)
    if kind == "image/jpeg" and lies_on_its_side(data):
        height, width = width, height
    return ImageHeader(kind, height, width)


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_tensor = msgspec.json.Decoder(_Tensor).decode


def embedding_tokens(data: bytes, hidden: int) -> int:
    """The number of tokens in an embedding file: the first dimension of its one tensor.

    Args:
        hidden: the model's width; 0: unknown.
    Raises:
        MediaRejected: not a safetensors file of one (tokens, hidden) tensor of floats.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise MediaRejected("is not a safetensors file, which is the only supported form of embeddings")
    try:
        entries: dict[str, Any] = _header(data[8 : 8 + length])
        tensors = [_tensor(entry) for name, entry in entries.items() if name != "__metadata__"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MediaRejected("is a safetensors file with a malformed header") from None
    if len(tensors) != 1:
        raise MediaRejected(f"is a safetensors file with {len(tensors)} tensors; it must have exactly 1")
    (tensor,) = tensors
    size = _FLOATS.get(tensor.dtype)
    if size is None:
        raise MediaRejected(f"has a tensor of dtype {tensor.dtype[:20]!r}; it must be one of {', '.join(_FLOATS)}")
    if len(tensor.shape) != 2 or min(tensor.shape) < 1 or hidden not in (0, tensor.shape[1]):
        width = hidden or "hidden"
        raise MediaRejected(f"has a tensor of shape {str(tensor.shape)[:80]}; this model takes (tokens, {width})")
    tokens, width = tensor.shape
    if tensor.data_offsets != (0, tokens * width * size) or len(data) != 8 + length + tokens * width * size:
        raise MediaRejected("is a safetensors file whose size does not match its header")
    return tokens
