"""What a diffusion worker asks of anything that turns a text into pictures. No NATS, no diffusers, no torch.

Everything is synchronous and called from one thread, one request at a time: no engine of this kind is thread-safe.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from schemas.fleet import Diffuser
from schemas.requests import Diffusion

Progress = Callable[[int, int], None]  # denoising steps done, of how many


class Stopped(Exception):
    """Raised by a ``Progress``, and let through by ``generate``: nobody wants the pictures any more."""


class Picture(NamedTuple):
    """One image, or one video."""

    frames: Any  # uint8 array (frames, height, width, 3), RGB; an image has one frame
    frame_rate: float = 0.0


class DiffusionEngine(Protocol):
    """One loaded pipeline.

    Attributes:
        name: "diffusers", "trtllm".
        diffuser: what it makes, and its limits.
        load_seconds: how long loading took.
        stoppable: ``progress`` is called after each step; else a request cannot be ended while it is computed.
    """

    name: str
    diffuser: Diffuser
    load_seconds: float
    stoppable: bool

    def generate(self, ask: Diffusion, progress: Progress) -> list[Picture]:
        """``ask.images`` pictures, a function of ``ask`` alone.

        Raises:
            RequestError: this request cannot be served; the engine goes on.
            Stopped: ``progress`` raised it.
            Exception: anything else means that the engine is broken.
        """

    def close(self) -> None:
        """Free the device."""
