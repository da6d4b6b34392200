"""Sizes out of headers: right for what an image library writes, safe for what nobody should send."""

import io
import struct
import time
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.gateway.media.contents import NotAnImage, kind_of, size_of
from tests.properties import examples

WRITERS: list[tuple[str, str, dict[str, Any]]] = [
    ("image/png", "PNG", {}),
    ("image/png", "PNG", {"compress_level": 0}),
    ("image/jpeg", "JPEG", {}),
    ("image/jpeg", "JPEG", {"progressive": True, "quality": 30, "comment": b"\xff\xc0" * 40}),
    ("image/gif", "GIF", {"comment": b"a comment " * 100}),
    ("image/webp", "WEBP", {"lossless": True}),
    ("image/webp", "WEBP", {"quality": 20}),
    ("image/webp", "WEBP", {"quality": 20, "exif": b"Exif\0\0II*\0"}),  # extended: VP8X
]


def picture(width: int, height: int, form: str, **options: Any) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(data, form, **options)
    return data.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *between: bytes) -> bytes:
    """A PNG of a few bytes, whatever size it declares."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(between) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND")


@pytest.mark.parametrize(("kind", "form", "options"), WRITERS)
@examples(25)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_sizes_are_those_that_an_image_library_reads(
    kind: str, form: str, options: dict[str, Any], width: int, height: int
) -> None:
    data = picture(width, height, form, **options)
    assert (kind_of(data), size_of(data)) == (kind, (width, height))
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == size_of(data)


def test_animations_have_the_size_of_their_canvas() -> None:
    frames = [Image.new("RGB", (50, 40), (shade, 0, 0)) for shade in (1, 100, 200)]
    for form in ("GIF", "WEBP", "PNG"):
        data = io.BytesIO()
        frames[0].save(data, form, save_all=True, append_images=frames[1:])
        assert size_of(data.getvalue()) == (50, 40)


@pytest.mark.parametrize(("kind", "form", "options"), WRITERS)
def test_a_file_cut_off_anywhere_has_its_size_or_none(kind: str, form: str, options: dict[str, Any]) -> None:
    data = picture(31, 17, form, **options)
    for end in range(min(len(data), 1500)):
        try:
            assert size_of(data[:end]) == (31, 17)
        except NotAnImage:
            pass
    with pytest.raises(NotAnImage):
        size_of(data[:20])


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0" * 100, b"hello", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"),
        *(b"BM" + bytes(60), b"II*\0" + bytes(60), b"%PDF-1.7", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x76\x2f\x31\x01"),
        *(b"\0\0\0\x1cftypavif", b"\x80\x04\x95", b"PK\x03\x04", b"RIFF\0\0\0\0WAVEfmt "),
    ],
)
def test_other_formats_are_unknown(data: bytes) -> None:
    with pytest.raises(NotAnImage, match="not a PNG, JPEG, WebP or GIF") as caught:
        size_of(data)
    assert caught.value.unknown


def test_a_tiny_file_that_declares_a_giant_has_that_size() -> None:
    assert size_of(png(30_000, 30_000)) == (30_000, 30_000)
    gif = bytearray(picture(1, 1, "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    assert size_of(bytes(gif)) == (65_535, 65_535)
    webp = bytearray(picture(9, 9, "WEBP", exif=b"Exif\0\0II*\0"))
    assert webp[12:16] == b"VP8X"
    webp[24:30] = b"\xff" * 6
    assert size_of(bytes(webp)) == (1 << 24, 1 << 24)
    jpeg = bytearray(picture(9, 9, "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = b"\xff" * 4
    assert size_of(bytes(jpeg)) == (65_535, 65_535)


def test_a_second_header_cannot_hide_the_size() -> None:
    """Decoders take the last one they see; a reader that takes the first would let a bomb through."""
    with pytest.raises(NotAnImage, match="malformed PNG"):
        size_of(png(10, 10, chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))))
    jpeg = picture(9, 9, "JPEG")
    frame = b"\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
    assert size_of(jpeg[:2] + frame + jpeg[2:]) == (65_535, 65_535)
    at = jpeg.index(b"\xff\xda")
    assert size_of(jpeg[:at] + frame + jpeg[at:]) == (65_535, 65_535)


def test_a_frame_larger_than_its_gif_counts() -> None:
    gif = bytearray(picture(10, 10, "GIF"))
    at = gif.index(b"\x2c", 13 + 3 * 2)
    while size_of(bytes(gif)) == (10, 10):
        at = gif.index(b"\x2c", at)
        old = bytes(gif)
        gif[at + 5 : at + 9] = struct.pack("<HH", 60_000, 50_000)
        if size_of(bytes(gif)) == (10, 10):
            gif, at = bytearray(old), at + 1
    assert size_of(bytes(gif)) == (60_000, 50_000)
    with Image.open(io.BytesIO(picture(10, 10, "GIF"))) as image:
        assert image.size == (10, 10)


@pytest.mark.parametrize(
    "data", [png(0, 10), png(10, 0), b"GIF89a\0\0\0\0\0\0\0\x2c" + bytes(9), b"\xff\xd8\xff\xda\0\0"]
)
def test_no_pixels_are_no_image(data: bytes) -> None:
    with pytest.raises(NotAnImage, match="0"):
        size_of(data)


HOSTILE = [
    b"\xff\xd8" + b"\xff\xe5\0\2" * 4_000_000,
    b"\xff\xd8" + b"\xff" * 16_000_000,
    b"\xff\xd8\xff" + b"\xd0\xff" * 8_000_000,
    b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + chunk(b"abCd") * 1_000_000,
    b"GIF89a\x01\0\x01\0\0\0\0\x21\xfe" + b"\1a" * 8_000_000,
    b"GIF89a\x01\0\x01\0\0\0\0" + b"\x21\xfe\0" * 5_000_000,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_megabytes_of_metadata_cost_no_time(data: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(NotAnImage, match="malformed"):
        size_of(data)
    assert time.thread_time() - began < 0.05


@examples(200)
@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8"]),
    st.binary(max_size=200),
)
def test_any_bytes_have_a_size_or_are_no_image(head: bytes, rest: bytes) -> None:
    try:
        assert min(size_of(head + rest)) > 0
    except NotAnImage:
        pass


@examples(200)
@given(st.sampled_from(WRITERS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_damage_never_makes_an_image_smaller_than_a_library_takes_it_for(
    writer: tuple[str, str, dict[str, Any]], damage: list[tuple[int, int]]
) -> None:
    """What passes the limit here must not be larger for whoever decodes it."""
    data = bytearray(picture(23, 19, writer[1], **writer[2]))
    for at, value in damage:
        data[at % len(data)] = value
    try:
        width, height = size_of(bytes(data))
    except NotAnImage:
        return
    if width * height > 40_000_000:
        return
    try:
        with Image.open(io.BytesIO(data), formats=["PNG", "JPEG", "WEBP", "GIF"]) as image:
            assert image.size[0] * image.size[1] <= max(width * height, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Warning):
        pass
