"""From bytes to pixels: what the model's own processor makes of good files, a refusal of everything else."""

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from transformers import AutoImageProcessor

from penstock.schemas.errors import Code
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.native.model import embedding_slots, vision
from penstock.workers.engines.native.model.embedding_slots import EmbeddingSlots
from tests.properties import examples
from tests.workers.engines.native.pictures import DIRECTORY, picture

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


class Still(vision.TorchVisionEncoder):
    """VisionEncoder of which only ``prepare`` is used."""

    def __init__(self) -> None:
        self._processor = vision.processor(str(DIRECTORY))
        self._patches = None
        self.pool = EmbeddingSlots(1, 64, 256, torch.float16, torch.device("cpu"))
        self._shape = torch.Size((3, 96, 96))


ENCODER = Still()
PROCESSOR: Any = AutoImageProcessor.from_pretrained(DIRECTORY, backend="pil")


def pixels(raw: bytes, kind: str = "image/png") -> torch.Tensor:
    prepared = ENCODER.prepare(raw, kind)
    assert isinstance(prepared, embedding_slots.Pixels)
    return prepared.data


def shades(size: tuple[int, int] = (90, 60), mode: str = "RGB") -> Image.Image:
    """Every corner another colour."""
    wide, high = size
    red, green = np.meshgrid(np.linspace(0, 255, wide), np.linspace(0, 255, high))
    return Image.fromarray(np.stack([red, green, 255 - red], axis=-1).astype(np.uint8)).convert(mode)


def file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def processed(image: Image.Image) -> torch.Tensor:
    result: torch.Tensor = PROCESSOR(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    return result


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_decoded_as_the_models_own_processor_would(form: str) -> None:
    raw = file(shades(), form)
    assert torch.equal(pixels(raw, FORMATS[form]), processed(Image.open(io.BytesIO(raw))))
    assert pixels(raw, FORMATS[form]).shape == (3, 96, 96)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (97, 96), (1000, 11), (640, 480)])
def test_any_size_becomes_what_the_tower_sees(size: tuple[int, int]) -> None:
    assert torch.equal(pixels(file(shades(size))), processed(shades(size)))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_any_mode_becomes_rgb(mode: str) -> None:
    image = shades().convert("L").convert("I").convert("I;16") if mode == "I;16" else shades(mode=mode)
    raw = file(image, "JPEG" if mode == "CMYK" else "PNG")
    assert torch.equal(pixels(raw), processed(Image.open(io.BytesIO(raw))))


def test_palettes_with_transparency_are_taken_without_a_warning() -> None:
    image = shades().quantize(16)
    raw = file(image, transparency=bytes(range(16)))
    assert torch.equal(pixels(raw), processed(image))


def test_the_kind_need_not_be_right_about_the_format() -> None:
    assert torch.equal(pixels(file(shades()), "image/jpeg"), processed(shades()))


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    raw = file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(raw, "image/gif")[0].min() > 0.9


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_may_have_been_turned(orientation: int) -> None:
    turns = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],  # stored so that turning it back by 270 makes it upright
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = shades()
    for turn in turns.get(orientation, []):
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert torch.equal(pixels(file(stored, exif=exif)), processed(shades()))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_broken_exif_block_does_not_cost_the_picture() -> None:
    assert pixels(file(shades(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), "image/jpeg").shape == (3, 96, 96)


def png_that_claims(width: int, height: int) -> bytes:
    """A header, and nothing that would fill it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (10_000, 5_001, "10000 x 5001 pixels; the limit is 50,000,000"),
        (12_000, 10_000, "more than 50,000,000 pixels"),  # Pillow warns of it
        (60_000, 60_000, "more than 50,000,000 pixels"),  # and of this it makes an error
        (5_000, 49, "may be at most 100 times the other"),
        (49, 5_000, "may be at most 100 times the other"),
    ],
)
def test_bombs_are_refused_before_they_are_unpacked(width: int, height: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ENCODER.prepare(png_that_claims(width, height), "image/png")
    assert caught.value.code == Code.invalid_request


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_files_are_refused(form: str) -> None:
    raw = file(shades((200, 200)), form)
    for length in (0, 10, len(raw) // 2):
        with pytest.raises(RequestError, match="not a readable PNG, JPEG, WebP or GIF"):
            ENCODER.prepare(raw[:length], FORMATS[form])


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO"])
def test_formats_that_nobody_asked_for_are_refused(form: str) -> None:
    with pytest.raises(RequestError, match="not a readable PNG, JPEG, WebP or GIF"):
        ENCODER.prepare(file(shades(), form), "image/png")


@pytest.mark.parametrize("kind", ["image/svg+xml", "video/mp4", "", "text/plain"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(RequestError, match="only image/gif, image/jpeg, image/png, image/webp"):
        ENCODER.prepare(picture(1), kind)


@examples(150)
@given(form=st.sampled_from(sorted(FORMATS)), at=st.integers(0, 2000), noise=st.binary(min_size=1, max_size=30))
def test_damaged_files_are_decoded_or_refused_but_nothing_else(form: str, at: int, noise: bytes) -> None:
    raw = bytearray(file(shades((40, 30)), form))
    raw[at % len(raw) : at % len(raw) + len(noise)] = noise
    try:
        data = pixels(bytes(raw), FORMATS[form])
    except RequestError:
        return
    assert data.shape == (3, 96, 96)


def test_many_threads_may_prepare_at_once() -> None:
    raws = [picture(number) for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(pixels, raws))
    assert all(torch.equal(one, pixels(raw)) for one, raw in zip(found, raws, strict=True))


def test_embeddings_are_taken_in_the_models_dtype() -> None:
    rows = torch.randn(7, 256, dtype=torch.bfloat16)
    prepared = ENCODER.prepare(save({"x": rows}), "embedding")
    assert isinstance(prepared, embedding_slots.Rows)
    assert torch.equal(prepared.data, rows.to(torch.float16))
    assert ENCODER.tokens(prepared) == 7


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a readable safetensors file"),
        (b"\xff" * 40, "not a readable safetensors file"),
        (save({"x": torch.zeros(3, 256)})[:-1], "not a readable safetensors file"),
        (save({}), r"one tensor of floats of shape \(tokens, 256\), not \[\]"),
        (save({"x": torch.zeros(3, 256), "y": torch.zeros(1)}), "one tensor of floats"),
        (save({"x": torch.zeros(3, 256, 1)}), "one tensor of floats"),
        (save({"x": torch.zeros(3, 256, dtype=torch.int32)}), "one tensor of floats"),
        (save({"x": torch.zeros(3, 255)}), r"shape \(tokens, 256\), not \(3, 255\)"),
        (save({"x": torch.zeros(0, 256)}), r"shape \(tokens, 256\), not \(0, 256\)"),
        (save({"x": torch.full((3, 256), float("nan"))}), "not finite"),
        (save({"x": torch.full((3, 256), float("inf"))}), "not finite"),
        (save({"x": torch.full((3, 256), 1e6)}), "not finite as float16"),
    ],
)
def test_other_embeddings_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ENCODER.prepare(raw, "embedding")
    assert caught.value.code == Code.invalid_request
