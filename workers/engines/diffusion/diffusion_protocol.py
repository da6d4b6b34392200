"""The protocol of diffusion engines: from a text to images or videos; and files of these. No NATS, diffusers or torch.

Everything is synchronous and called from one thread, one request at a time: engines of this kind are not thread-safe.
Files are PNG, JPEG, WebP and GIF, written with Pillow, and MP4 with PyAV if it is installed.
"""

import io
import json
import tempfile
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from penstock.infra.model.modeldir import ModelError
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion

Progress = Callable[[int, int], None]  # (denoising steps done, steps in total)


class Interrupted(Exception):
    """Raised by a ``Progress`` callback and passed on by ``generate``: the request was cancelled."""


class GeneratedMedia(NamedTuple):
    """One image or video.

    Attributes:
        frames: uint8 array (frames, height, width, 3), RGB; an image has one frame.
        frame_rate: frames per second; 0 for an image.
    """

    frames: Any
    frame_rate: float = 0.0


class DiffusionEngine(Protocol):
    """One loaded pipeline.

    Attributes:
        name: "diffusers", "trtllm".
        diffuser: kind of output, defaults and limits.
        load_seconds: how long loading took.
        interruptible: ``progress`` is called after each step; otherwise a request cannot be cancelled while it runs.
    """

    name: str
    diffuser: Diffuser
    load_seconds: float
    interruptible: bool

    def generate(self, request: Diffusion, progress: Progress) -> list[GeneratedMedia]:
        """``request.images`` outputs, which depend on ``request`` alone.

        Raises:
            RequestError: this request cannot be served; the engine can serve others.
            Interrupted: ``progress`` raised it.
            Exception: anything else means that the engine is broken.
        """

    def close(self) -> None:
        """Free the device."""


INDEX = "model_index.json"


def pipeline_name(folder: Path) -> str:
    """The class name of the pipeline.

    Raises:
        ModelError: the directory has no pipeline, or one with its own code.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no {INDEX}: --role diffusion serves directories in the layout of diffusers; language models "
            "are served by the other roles"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    name = index.get("_class_name") if isinstance(index, dict) else None
    if isinstance(name, list):
        raise ModelError(f"{path} names a pipeline with custom code ({name}), which is never run")
    if not isinstance(name, str) or not name.isidentifier():
        raise ModelError(f"{path} names no pipeline (_class_name is {name!r})")
    return name


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
