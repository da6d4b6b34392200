"""The sizes of a model that is named on the command line."""

from pathlib import Path

import msgspec

from configs.engine_args.shapes import Shape, UnknownShape, shape_of
from infra.recipes.catalogue import known_shape


def shape_at(model: str) -> Shape:
    """Of a directory with a config.json, or of a model that a recipe is for.

    Raises:
        OSError: no directory with a config.json, and no model that is known by this name.
        UnknownShape: the config.json does not tell.
    """
    known = known_shape(model)
    if known is not None:
        return known
    config = Path(model).expanduser() / "config.json"
    try:
        return shape_of(msgspec.json.decode(config.read_bytes(), type=dict), model=model)
    except msgspec.DecodeError as error:
        raise UnknownShape(f"{config} is not JSON: {error}") from error
