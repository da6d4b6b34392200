"""The protocol of diffusion engines: from a text to images or videos. No NATS, no diffusers, no torch.

Everything is synchronous and called from one thread, one request at a time: engines of this kind are not thread-safe.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
