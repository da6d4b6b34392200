"""The protocol of diffusion engines: from a text to images or videos. No NATS, no diffusers, no torch.

Everything is synchronous and called from one thread, one request at a time: engines of this kind are not thread-safe.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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
