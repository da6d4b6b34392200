"""How models that see at any resolution cut images and videos, and how many embeddings that makes. Pure.

Qwen2-VL and Qwen2.5-VL keep an image's shape: it is resized to multiples of a few patches, within a number of pixels,
and each square of merged patches becomes one embedding. Of a video, frames are sampled evenly; this many neighbouring
ones are one step in time. The rules are those of transformers' Qwen2VLImageProcessor and Qwen2VLVideoProcessor.

LLaVA-NeXT (LLaVA 1.6) sees each image twice: whole, at the size of one tile, and on the canvas of several tiles that
suits its shape best. Rows that only pad the canvas are left out, and each row of patches ends with a learnt embedding.
The rules are those of transformers' LlavaNextProcessor.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_ASPECT = 200  # longer side by shorter side
MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl"})

# What Qwen's own tools take of a video, where the model's folder does not say it.
_FRAMES_PER_SECOND, _MIN_FRAMES, _MAX_FRAMES, _VIDEO_TOKENS = 2.0, 4, 768, 128_000
_MIN_SQUARES, _MAX_SQUARES = 128, 768  # of a frame; a square becomes an embedding


class BadGrid(ValueError):
    """The model's files have no usable sizes, or an image or video has none that the model takes."""


class MediaGrid(NamedTuple):
    """Embeddings of one medium, by time, height and width; time comes first in a prompt, width last."""

    steps: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.steps * self.rows * self.columns


class VideoSample(NamedTuple):
    """What a model takes of a video.

    Attributes:
        frames: numbers of the frames, ascending.
        height, width: to which they are resized, pixels.
        seconds: between two steps of the grid.
    """

    frames: list[int]
    height: int
    width: int
    grid: MediaGrid
    seconds: float


class PatchGrid(NamedTuple):
    """
    Attributes:
        patch: side of a patch, pixels.
        merge: rows, and columns, of patches that become one embedding.
        temporal: frames of one step in time.
        pixels: fewest and most of an image.
        frame_pixels: fewest and most of a video's frame.
        fps: frames of a video that are sampled per second.
        frames: fewest and most that are sampled; a shorter video has fewer.
        video_tokens: bounds the pixels of all frames together; 0: nothing does.
    """

    patch: int
    merge: int
    temporal: int
    pixels: tuple[int, int]
    frame_pixels: tuple[int, int]
    fps: float = _FRAMES_PER_SECOND
    frames: tuple[int, int] = (_MIN_FRAMES, _MAX_FRAMES)
    video_tokens: int = _VIDEO_TOKENS

    @property
    def square(self) -> int:
        """Side of what becomes one embedding, pixels."""
        return self.patch * self.merge

    def image(self, height: int, width: int) -> MediaGrid:
        """
        Raises:
            BadGrid: it is too narrow.
        """
        return self._grid(1, *_resized(height, width, self.square, *self.pixels))

    def video(self, total: int, fps: float, height: int, width: int) -> VideoSample:
        """
        Args:
            total: frames of the video.
            fps: of them per second.
            height, width: of a frame, pixels.

        Raises:
            BadGrid: it has no frames, no frame rate, or is too narrow.
        """
        if total < 1 or not 0 < fps < math.inf:
            raise BadGrid(f"has {total} frames, {fps:g} a second")
        frames = sampled(total, self._wanted(total, fps))
        least, most = self.frame_pixels
        if self.video_tokens:
            budget = int(self.video_tokens * self.square * self.square * 0.9)
            most = max(min(most, budget * self.temporal // len(frames)), int(least * 1.05))
        high, wide = _resized(height, width, self.square, least, most)
        grid = self._grid(-(-len(frames) // self.temporal), high, wide)
        return VideoSample(frames, high, wide, grid, self.temporal / (len(frames) / total * fps))

    def _wanted(self, total: int, fps: float) -> int:
        least, most = self.frames
        most = min(most, total) // self.temporal * self.temporal
        wanted = min(max(total / fps * self.fps, least), most, total)
        return max(1, int(wanted) // self.temporal * self.temporal)

    def _grid(self, steps: int, height: int, width: int) -> MediaGrid:
        return MediaGrid(steps, height // self.square, width // self.square)

    @property
    def least_tokens(self) -> int:
        """Embeddings that the smallest image has at least."""
        return max(1, self.pixels[0] // self.square**2)


def sampled(total: int, wanted: int) -> list[int]:
    """Numbers of evenly spread frames, rounded as ``torch.arange`` rounds them: to float32, then down. Unlike it, never
    one more than wanted, which would be after the last frame."""
    step, form = total / wanted, f"{wanted}f"
    places = struct.unpack(form, struct.pack(form, *(number * step for number in range(wanted))))
    return [int(place) for place in places]


def _resized(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width as multiples of ``factor``, with ``least`` to ``most`` pixels."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadGrid(f"has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the other")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return high, wide


def patch_grid(config: Mapping[str, Any], images: Mapping[str, Any], videos: Mapping[str, Any]) -> PatchGrid:
    """
    Args:
        config: content of config.json.
        images: settings of the image processor, from preprocessor_config.json or processor_config.json.
        videos: likewise of the video processor; empty: the model's folder has none.

    Raises:
        BadGrid: a size is missing or malformed, or the processors do not suit the vision tower; the text names it.
    """
    tower = config.get("vision_config") or {}
    patch, merge, temporal = (
        _size("config.json", tower, key, default)
        for key, default in (("patch_size", 14), ("spatial_merge_size", 2), ("temporal_patch_size", 2))
    )
    for key, default, wanted in (
        ("patch_size", 14, patch),
        ("merge_size", 2, merge),
        ("temporal_patch_size", 2, temporal),
    ):
        for name, settings, usual in (("image", images, default), ("video", videos, wanted)):
            if (found := _size(f"the {name} processor", settings, key, usual)) != wanted:
                raise BadGrid(f"the {name} processor has {key} {found}, the vision tower {wanted}")
    square = (patch * merge) ** 2
    fps = videos.get("fps") or _FRAMES_PER_SECOND
    if not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise BadGrid(f"the video processor has fps {fps!r}; expected a number above 0")
    if count := videos.get("num_frames"):
        frames = (count, count)
    else:
        frames = videos.get("min_frames") or _MIN_FRAMES, videos.get("max_frames") or _MAX_FRAMES
    if not all(isinstance(each, int) for each in frames) or not 0 < frames[0] <= frames[1] or frames[1] < temporal:
        raise BadGrid(f"the video processor samples {frames[0]} to {frames[1]} frames; a step in time has {temporal}")
    capped = videos.get("cap_pixels_per_frame") is not False
    return PatchGrid(
        patch,
        merge,
        temporal,
        _pixels("image", images, 56 * 56, 28 * 28 * 1280),
        _pixels("video", videos, _MIN_SQUARES * square, _MAX_SQUARES * square),
        float(fps),
        frames,
        _size("the video processor", videos, "max_video_tokens", _VIDEO_TOKENS) if capped else 0,
    )


def _size(source: str, settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadGrid(f"{source} has {key} {value!r}; expected a number above 0")
    return value


def _pixels(name: str, settings: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    size = settings.get("size")
    size = dict(size) if isinstance(size, Mapping) else {}
    found: list[Any] = [
        settings.get(old) if settings.get(old) is not None else size.get(key, default)
        for old, key, default in (("min_pixels", "shortest_edge", least), ("max_pixels", "longest_edge", most))
    ]
    if not all(isinstance(each, int) for each in found) or not 0 < found[0] <= found[1]:
        raise BadGrid(f"the {name} processor takes {found[0]!r} to {found[1]!r} pixels")
    return found[0], found[1]


class BadTiles(ValueError):
    """The configuration has no usable sizes of canvases."""


class Tiles(NamedTuple):
    """
    Attributes:
        side: of a tile, pixels.
        patches: rows, and columns, of patches of a tile.
        canvases: (height, width) in pixels, multiples of ``side``.
        base: embeddings of the whole image.
    """

    side: int
    patches: int
    canvases: tuple[tuple[int, int], ...]
    base: int

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """The canvas that keeps most of an image's pixels, and of those the one that pads least."""

        def fit(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas[0] * canvas[1]

        return max(self.canvases, key=fit)  # of equal ones the first

    def tokens(self, height: int, width: int) -> int:
        """Embeddings of an image of this size in pixels."""
        canvas = self.canvas(height, width)
        rows, columns = (size // self.side * self.patches for size in canvas)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return self.base + rows * columns + rows

    @property
    def most(self) -> int:
        """Embeddings of an image that fills the largest canvas."""
        return max(self.tokens(*canvas) for canvas in self.canvases)


def tiles_of(config: Mapping[str, Any], base: int) -> Tiles:
    """
    Args:
        config: content of config.json.
        base: embeddings of the whole image.

    Raises:
        BadTiles: a key is missing or malformed; the text names it.
    """
    tower = config.get("vision_config") or {}
    side, patch = tower.get("image_size"), tower.get("patch_size")
    points = config.get("image_grid_pinpoints")
    listed = list(points) if isinstance(points, list | tuple) else []
    canvases = tuple((each[0], each[1]) for each in listed if _is_pair(each))
    if not isinstance(side, int) or not isinstance(patch, int) or not 0 < patch <= side:
        raise BadTiles(f"config.json has vision_config with image_size {side} and patch_size {patch}")
    wrong = [size for canvas in canvases for size in canvas if size < side or size % side]
    if not canvases or len(canvases) != len(listed) or wrong:
        raise BadTiles(f"config.json has image_grid_pinpoints {str(points)[:80]}: expected multiples of {side} pixels")
    return Tiles(side, side // patch, canvases, base)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, int) for each in value)
