import importlib.util
import io

import numpy as np
import pytest
from PIL import Image

from penstock.workers.engines.diffusion.diffusion_protocol import (
    IMAGE_FORMATS,
    GeneratedMedia,
    encode,
    media_type,
    video_formats,
)

RATE = 24.0


def film(frames: int = 7, height: int = 18, width: int = 22) -> GeneratedMedia:
    """A bar that moves."""
    pixels = np.zeros((frames, height, width, 3), np.uint8)
    for i in range(frames):
        pixels[i, :, 2 * i : 2 * i + 4] = (250, 30 * i, 10)
    return GeneratedMedia(pixels, RATE)


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_an_image_is_read_back_in_its_format(name: str) -> None:
    picture = GeneratedMedia(film().frames[:1])
    image = Image.open(io.BytesIO(encode(picture, name)))
    assert (image.format, image.size, Image.MIME[image.format or ""]) == (name.upper(), (22, 18), media_type(name))
    error = np.abs(np.asarray(image.convert("RGB"), int) - picture.frames[0]).mean()
    assert error == 0 if name == "png" else error < 20


@pytest.mark.parametrize("name", ["webp", "gif"])
def test_a_video_keeps_its_frames_its_length_and_repeats(name: str) -> None:
    data = encode(film(), name)
    image = Image.open(io.BytesIO(data))
    assert (image.format, getattr(image, "n_frames", 1)) == (name.upper(), 7)
    total = 0
    for i in range(7):
        image.seek(i)
        image.load()
        total += image.info["duration"]
        shown = np.asarray(image.convert("RGB"), int)
        assert np.abs(shown - film().frames[i]).mean() < 20
    tolerance = 1 if name == "webp" else 70  # GIF counts hundredths of a second
    assert abs(total - 7 / RATE * 1000) <= tolerance
    assert image.info["loop"] == 0


def test_lower_quality_is_smaller() -> None:
    noise = GeneratedMedia(np.random.default_rng(0).integers(0, 255, (1, 64, 64, 3), np.uint8))
    for name in ("jpeg", "webp"):
        assert len(encode(noise, name, 10)) < len(encode(noise, name)) < len(encode(noise, name, 100))


def test_mp4_is_offered_where_it_can_be_written() -> None:
    there = importlib.util.find_spec("av") is not None
    assert video_formats() == (("mp4", "webp", "gif") if there else ("webp", "gif"))
    assert media_type("mp4") == "video/mp4"


def test_an_mp4_is_read_back() -> None:
    av = pytest.importorskip("av")
    picture = film(height=19, width=23)
    with av.open(io.BytesIO(encode(picture, "mp4"))) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert float(file.streams.video[0].average_rate) == RATE
    assert [frame.shape for frame in frames] == [(18, 22, 3)] * 7
    assert np.abs(frames[3].astype(int) - picture.frames[3][:18, :22]).mean() < 40
