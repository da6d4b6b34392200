"""Whether a JPEG is shown on its side: the orientation in its Exif block. Nothing is decoded.

Cameras store an image as their sensor read it, and which way is up beside it.
"""

from struct import error as _StructError
from struct import unpack_from

from penstock.gateway.media.image_header import MAX_STEPS

_ORIENTATION = 0x0112
_SHORT = 3
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
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
        if data[at] != 0xFF or marker in (_SCAN, _END):
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
