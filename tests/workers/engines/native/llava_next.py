"""A small LLaVA-NeXT model: demo-vision with an embedding for ends of rows, and canvases of several tiles."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.demo_model.shared_weights import joined
from tests.demo_model.vision import SIDE
from tests.workers.engines.native.pictures import DIRECTORY

CANVASES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]  # height, width


def write(folder: Path) -> Path:
    """Write the model; its directory."""
    for path in DIRECTORY.iterdir():
        if path.suffix in (".json", ".jinja") and "safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    weights = {name: weight.float() for name, weight in joined(DIRECTORY).items()}
    hidden = next(weight for name, weight in weights.items() if name.endswith("embed_tokens.weight")).shape[1]
    weights["image_newline"] = torch.randn(hidden, generator=torch.Generator().manual_seed(1)) / 4
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "llava_next",
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": CANVASES,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    images = json.loads((folder / "preprocessor_config.json").read_text())
    images |= {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": CANVASES,
        "size": {"shortest_edge": SIDE},
        "do_pad": True,
    }
    images.pop("processor_class", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder
