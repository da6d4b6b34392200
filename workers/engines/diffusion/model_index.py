"""The pipeline of a model directory, from its ``model_index.json`` alone."""

import json
from pathlib import Path

from penstock.infra.model.modeldir import ModelError

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
