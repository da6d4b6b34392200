"""Images of prompts, which vLLM embeds itself: kept as files until a prompt refers to them.

Its processor takes a prompt with one placeholder for each image, and writes as many as the image has
embeddings, which must be those that the gateway counted: blocks are named by them.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from PIL import Image

from penstock.infra.model.modeldir import Vision
from penstock.infra.model.patch_grid import BadGrid
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import MediaSpan, RequestError
from penstock.workers.engines.native.model.embedding_slots import IMAGES, first_frame

DEFAULT_SLOTS = 256


class ImageFile(NamedTuple):
    """``tokens``: placeholder tokens that it takes."""

    raw: bytes
    tokens: int


class ImageStore:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``; nothing is computed here.

    Files are kept, not pixels, which can take 160 MB an image.

    Args:
        slots: 0: ``DEFAULT_SLOTS``.
    """

    needs_grid = False

    def __init__(self, vision: Vision, slots: int) -> None:
        self.slots = slots or DEFAULT_SLOTS
        self.slot_tokens = vision.image_tokens
        self._vision = vision
        self._files: dict[int, bytes] = {}  # by their first slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Check one image, in a thread.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind not in IMAGES:
            raise RequestError(
                Code.unsupported,
                f"this worker's engine (vLLM) takes images, not {kind}; use a worker with --engine native",
            )
        image = self.decode(raw)
        try:
            return ImageFile(raw, self._vision.tokens_of(image.height, image.width))
        except BadGrid as error:
            raise RequestError(Code.invalid_request, str(error)) from None

    def decode(self, raw: bytes) -> Image.Image:
        """The image as the gateway measured it: it reads the orientation where the size counts, of JPEGs only.

        Raises:
            RequestError: it is broken or too large.
        """
        any_size = self._vision.tiles is not None or self._vision.patches is not None
        return first_frame(raw, ("JPEG",)) if any_size else first_frame(raw)

    def tokens(self, prepared: object) -> int:
        assert isinstance(prepared, ImageFile)
        return prepared.tokens

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Keep each image by its slots."""
        for slots, prepared in batch:
            assert isinstance(prepared, ImageFile)
            for slot in slots:
                self._files.pop(slot, None)
            self._files[slots[0]] = prepared.raw

    def get(self, span: MediaSpan) -> bytes:
        return self._files[span.slots[0]]

    def memory(self) -> Memory:
        raise NotImplementedError("files move to no other worker")

    def close(self) -> None:
        self._files.clear()
