"""What the bytes of a medium are: an image, or an embedding file of a known shape. Nothing is decoded."""

from typing import Any, NamedTuple

import msgspec

from penstock.gateway.media.image_header import NotAnImage, kind_of, size_of
from penstock.gateway.media.limits import MediaLimits, MediaRejected
from penstock.gateway.media.orientation import lies_on_its_side
from penstock.schemas.errors import Code

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
