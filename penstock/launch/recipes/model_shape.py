"""The shape of a model given on the command line."""

from pathlib import Path

import msgspec

from penstock.infra.engine_args.model_shape import Shape, UnknownShape, shape_of
from penstock.launch.recipes.catalogue import known_models, known_shape


def shape_at(model: str) -> Shape:
    """The shape of a directory with a config.json, or of the model of a recipe.

    Raises:
        UnknownShape: neither a directory with a config.json nor a known model; or a size is missing.
    """
    published = known_shape(model)
    if published is not None:
        return published
    config = Path(model).expanduser() / "config.json"
    try:
        read = msgspec.json.decode(config.read_bytes(), type=dict)
        # ModelOpt's checkpoints say there, and older ones only there, how weights and KV are quantized.
        quantized = config.with_name("hf_quant_config.json")
        if quantized.is_file():
            found = msgspec.json.decode(quantized.read_bytes(), type=dict).get("quantization") or {}
            read["quantization_config"] = found | (read.get("quantization_config") or {})
        return shape_of(read, model=model)
    except OSError as error:
        raise UnknownShape(
            f"{config} cannot be read ({error.strerror}): give a directory with a config.json, or the id of a "
            f"known model: {', '.join(known_models())}"
        ) from error
    except msgspec.DecodeError as error:
        raise UnknownShape(f"{config} is not JSON: {error}") from error
