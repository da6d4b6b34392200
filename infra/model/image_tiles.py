"""How many embeddings an image takes in models that cut it into tiles (LLaVA-NeXT, also called LLaVA 1.6). Pure.

Such a model sees each image twice: whole, at the size of one tile, and on the canvas of several tiles that suits its
shape best. The rows that only pad the canvas are left out, and each row of patches ends with a learnt embedding. So the
number depends on the image's height and width. The rules are those of transformers' LlavaNextProcessor.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


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
