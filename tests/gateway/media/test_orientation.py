"""Which way up a JPEG is, against Pillow."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from penstock.gateway.media.contents import check_image, lies_on_its_side
from tests.gateway.media.test_contents import LIMITS


def jpeg(orientation: int, order: str = "<") -> bytes:
    """An image of 40 x 30 pixels."""
    entries = b"".join(
        struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in ((0x0100, 40), (0x0112, orientation))
    )
    tiff = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, 2) + entries + b"\0\0\0\0"
    data = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(data, "JPEG", exif=b"Exif\0\0" + tiff)
    return data.getvalue()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(10))
def test_height_and_width_are_those_of_the_image_that_is_shown(orientation: int, order: str) -> None:
    data = jpeg(orientation, order)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    header = check_image(data, LIMITS)
    assert (header.width, header.height) == shown.size


def test_without_an_exif_block_nothing_is_turned() -> None:
    data = io.BytesIO()
    Image.new("RGB", (40, 30)).save(data, "JPEG")
    assert not lies_on_its_side(data.getvalue())


@given(at=st.integers(20, 120), byte=st.integers(0, 255), cut=st.integers(2, 400))
def test_a_damaged_block_is_no_error(at: int, byte: int, cut: int) -> None:
    data = bytearray(jpeg(6))
    data[at % len(data)] = byte
    lies_on_its_side(bytes(data[:cut]))  # raises nothing
