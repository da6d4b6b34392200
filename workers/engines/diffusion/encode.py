"""Image and video files: PNG, JPEG, WebP and GIF with Pillow, MP4 with PyAV if it is installed."""

import io
import tempfile
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from penstock.workers.engines.diffusion.diffusion_protocol import GeneratedMedia

IMAGE_FORMATS = ("png", "jpeg", "webp")
DEFAULT_QUALITY = 90


def video_formats() -> tuple[str, ...]:
    """Formats in which videos can be written here, preferred first."""
    return (*(("mp4",) if find_spec("av") is not None else ()), "webp", "gif")


def media_type(name: str) -> str:
    """The media type of a format."""
    return "video/mp4" if name == "mp4" else f"image/{name}"


def encode(media: GeneratedMedia, name: str, quality: int = 0) -> bytes:
    """Encode a file.

    Args:
        name: the format.
        quality: 1 to 100, of lossy formats; 0: 90.
    """
    if name == "mp4":
        return _mp4(media, quality or DEFAULT_QUALITY)
    images = [Image.fromarray(frame, "RGB") for frame in media.frames]
    options: dict[str, Any] = {}
    if name in ("jpeg", "webp"):
        options["quality"] = quality or DEFAULT_QUALITY
    if len(images) > 1:
        # Durations are whole milliseconds (GIF: hundredths of a second), so round the ends and not each frame.
        ends = [round(1000 * (i + 1) / media.frame_rate) for i in range(len(images))]
        durations = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        options |= {"save_all": True, "append_images": images[1:], "duration": durations, "loop": 0}
    out = io.BytesIO()
    images[0].save(out, name.upper(), **options)
    return out.getvalue()


def _mp4(media: GeneratedMedia, quality: int) -> bytes:
    """H.264 in yuv420p, which every browser plays; needs even sizes, so an odd last row or column is cut off."""
    import av

    frames = media.frames
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
    with tempfile.TemporaryDirectory() as folder:  # the index is moved to the front by rewriting the file
        path = Path(folder) / "video.mp4"
        with av.open(str(path), "w", options={"movflags": "faststart"}) as file:
            stream = file.add_stream("libx264", rate=Fraction(media.frame_rate).limit_denominator(1001))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.options = {"crf": str(round(51 * (1 - quality / 100) ** 0.5))}
            for frame in frames:
                cut = np.ascontiguousarray(frame[:height, :width])
                file.mux(stream.encode(av.VideoFrame.from_ndarray(cut, format="rgb24")))
            file.mux(stream.encode())
        return path.read_bytes()
