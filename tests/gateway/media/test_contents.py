"""What the bytes of a medium are: images and embedding files within their limits."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.media.contents import check_image, embedding_tokens
from penstock.gateway.media.sources import MediaLimits, MediaRejected
from penstock.schemas.errors import Code
from tests.gateway.media.test_image_header import picture, png
from tests.properties import examples

LIMITS = MediaLimits(1000, 10_000, 1.0)


def test_an_image_is_what_its_bytes_say() -> None:
    assert check_image(picture(100, 100, "PNG"), LIMITS).kind == "image/png"
    assert check_image(picture(100, 100, "WEBP"), LIMITS).kind == "image/webp"
    # an image with something else behind it is that image, and nothing else
    assert check_image(picture(4, 4, "GIF") + b"<script>alert(1)</script>", LIMITS).kind == "image/gif"
    for data in (b"<html>" + picture(4, 4, "PNG"), b"", b"GIF", b"PK\x03\x04"):
        with pytest.raises(MediaRejected, match="not a PNG") as caught:
            check_image(data, LIMITS)
        assert caught.value.code is Code.unsupported


def test_the_limit_of_pixels_is_exact_and_holds_for_what_is_declared() -> None:
    assert check_image(png(100, 100), LIMITS)
    for width, height in ((100, 101), (10_001, 1), (30_000, 30_000), (1 << 31, 1 << 31)):
        with pytest.raises(MediaRejected, match=rf"{width} x {height} pixels; the limit is 10000 \(--max-image-pixels"):
            check_image(png(width, height), LIMITS)


def safetensors(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(dtype: str = "BF16", shape: object = (5, 8), offsets: object = (0, 80)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_an_embedding_file_has_as_many_tokens_as_its_tensor(dtype: str, size: int) -> None:
    data = safetensors({"x": tensor(dtype, (5, 8), (0, 40 * size)), "__metadata__": {"a": "b"}}, bytes(40 * size))
    assert embedding_tokens(data, 8) == 5
    assert embedding_tokens(data, 0) == 5


def test_what_a_library_writes_is_read() -> None:
    from safetensors.numpy import save

    numpy = pytest.importorskip("numpy")
    assert embedding_tokens(save({"embeds": numpy.zeros((7, 16), numpy.float16)}), 16) == 7


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"\x80\x04\x95pickle", "not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 70_000) + b" " * 80_000, "not a safetensors file"),
        (safetensors(b"{", b""), "malformed header"),
        (safetensors(b"[" * 5000, b""), "malformed header"),
        (safetensors(b"\xff\xfe", b""), "malformed header"),
        (safetensors({"x": 5}, b""), "malformed header"),
        (safetensors({"x": {"dtype": "F32"}}, b""), "malformed header"),
        (safetensors({}, b""), "0 tensors"),
        (safetensors({"x": tensor(), "y": tensor()}, bytes(80)), "2 tensors"),
        (safetensors({"x": tensor("I64")}, bytes(80)), "'I64'"),
        (safetensors({"x": tensor("F8_E4M3")}, bytes(80)), "F8_E4M3"),
        (safetensors({"x": tensor(shape=(40,))}, bytes(80)), r"takes \(tokens, 8\)"),
        (safetensors({"x": tensor(shape=(1, 5, 8))}, bytes(80)), r"takes \(tokens, 8\)"),
        (safetensors({"x": tensor(shape=(8, 5))}, bytes(80)), r"takes \(tokens, 8\)"),
        (safetensors({"x": tensor(shape=(0, 8), offsets=(0, 0))}, b""), r"takes \(tokens, 8\)"),
        (safetensors({"x": tensor(shape=(-5, 8))}, bytes(80)), r"takes \(tokens, 8\)"),
        (safetensors({"x": tensor(shape=(10**12, 8))}, bytes(80)), "size does not match"),
        (safetensors({"x": tensor(offsets=(80, 160))}, bytes(160)), "size does not match"),
        (safetensors({"x": tensor()}, bytes(79)), "size does not match"),
        (safetensors({"x": tensor()}, bytes(81)), "size does not match"),
    ],
)
def test_other_files_are_no_embeddings(data: bytes, reason: str) -> None:
    with pytest.raises(MediaRejected, match=reason):
        embedding_tokens(data, 8)


@examples(200)
@given(st.binary(max_size=120))
def test_any_bytes_are_embeddings_or_refused(data: bytes) -> None:
    for case in (data, safetensors(data, b"")):
        try:
            assert embedding_tokens(case, 8) > 0
        except MediaRejected:
            pass
