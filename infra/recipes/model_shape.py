"""The sizes of a model that is named on the command line."""

from pathlib import Path

import msgspec

from infra.engine_args.model_shape import Shape, UnknownShape, shape_of
from infra.recipes.catalogue import known_models, known_shape


def shape_at(model: str) -> Shape:
    """Of a directory with a config.json, or of a model that a recipe is for.

    Raises:
        UnknownShape: no directory with a config.json, and no model that is known by this name; or it does not tell.
    """
    known = known_shape(model)
    if known is not None:
        return known
    config = Path(model).expanduser() / "config.json"
    try:
        return shape_of(msgspec.json.decode(config.read_bytes(), type=dict), model=model)
    except OSError as error:
        raise UnknownShape(
            f"{config} cannot be read ({error.strerror}): name a directory with a config.json, or the id of a model "
            f"that is known here: {', '.join(known_models())}"
        ) from error
    except msgspec.DecodeError as error:
        raise UnknownShape(f"{config} is not JSON: {error}") from error
