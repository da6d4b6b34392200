"""Which diffusers pipelines are supported, and the parameters that they take."""

import inspect
import re
from typing import Any, Literal

from penstock.infra.model.modeldir import ModelError
from penstock.workers.engines.diffusion.model_index import INDEX

FRAMES = ("num_frames", "video_length", "frames")  # names of the parameter for the number of frames
RATES = ("frame_rate", "fps")
_REQUIRED = ("callback_on_step_end", "generator", "output_type", "num_inference_steps", "width", "height")
# Pipelines that start from an image take it as an optional parameter, but fail without it.
_FROM_IMAGES = re.compile(
    "Img2Img|Inpaint|ImageToVideo|VideoToVideo|Control|Upscale|2Img|2Pix|Edit|Fill|Refine|I2V|V2V|Prior|VideoToWorld"
)

Kind = Literal["image", "video"]


class PipelineSignature:
    """The parameters of a pipeline's ``__call__``.

    Attributes:
        frames, rate: names of the parameters for the number of frames and the frame rate; empty: none.

    Raises:
        ModelError: the pipeline does not make images or videos from a text, step by step.
    """

    def __init__(self, pipeline: type) -> None:
        name = pipeline.__name__
        self.parameters = dict(inspect.signature(pipeline.__call__).parameters)
        self.parameters.pop("self", None)
        bare = {p.name for p in self.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        if bare - {"prompt"} or "prompt" not in self.parameters or _FROM_IMAGES.search(name):
            raise ModelError(f"pipeline {name} does not start from text alone; only such pipelines are supported")
        if lacking := [parameter for parameter in _REQUIRED if parameter not in self.parameters]:
            raise ModelError(
                f"pipeline {name} has no parameter {lacking[0]}, so its requests could not be sized, repeated on "
                "another worker or interrupted; it is not supported"
            )
        self.frames = self._first(FRAMES)
        self.rate = self._first(RATES)
        self.kind: Kind = "video" if self.frames else "image"

    def _first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.parameters), "")

    def default(self, name: str) -> Any:
        """The default of a parameter; None: it has none."""
        parameter = self.parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def pipeline_class(name: str) -> type:
    """The class in the installed diffusers.

    Raises:
        ModelError: diffusers is not installed, or has no such pipeline.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ModelError(f"--role diffusion needs diffusers: pip install 'penstock[diffusion]' ({error})") from None
    class_ = getattr(diffusers, name, None)
    if not isinstance(class_, type) or not issubclass(class_, diffusers.DiffusionPipeline):
        raise ModelError(
            f"{INDEX} names {name!r}, which is not a pipeline of diffusers {diffusers.__version__}; install a version "
            "that has it, or check the directory"
        )
    return class_
