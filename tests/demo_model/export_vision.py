"""Export a checkpoint as a LLaVA vision model: ``python -m tests.demo_model.export_vision WORK OUT``."""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from tests.demo_model.checkpoint import state_of, weights_of
from tests.demo_model.export import TOKENIZER, config_of, write_json
from tests.demo_model.shared_weights import joined
from tests.demo_model.template import END, IMAGE, STOP, TEMPLATE
from tests.demo_model.vision import MEAN, PATCH, SIDE, STD, TOKENS

_T = TypeVar("_T")


def export(work: Path, out: Path) -> None:
    """Write everything that AutoProcessor and LlavaForConditionalGeneration need."""
    out.mkdir(parents=True, exist_ok=True)
    shape = state_of(work)["shape"]
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    stop, end, image = (int(tokenizer.token_to_id(text) or 0) for text in (STOP, END, IMAGE))
    model = LlavaForConditionalGeneration(llava_config(shape, stop, end, image)).to(torch.bfloat16)
    load_weights(model, weights_of(work))
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[stop, end], pad_token_id=end)
    model.save_pretrained(out)
    file = out / "model.safetensors"
    save_file({hub_name(name): weight for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    for name in TOKENIZER:
        shutil.copyfile(work / name, out / name)
    write_processor(out)
    for path in out.iterdir():
        path.chmod(0o644)


def llava_config(shape: dict[str, Any], stop: int, end: int, image: int) -> LlavaConfig:
    """The model's configuration. ``shape``: of the checkpoint; ``stop``, ``end``, ``image``: ids of special tokens."""
    text_config = config_of(shape, stop, end)
    return LlavaConfig(
        text_config=LlamaConfig(**{key: value for key, value in text_config.items() if key != "rope_theta"}),
        vision_config=CLIPVisionConfig(
            hidden_size=shape["vision_hidden"],
            intermediate_size=3 * shape["vision_hidden"],
            num_hidden_layers=shape["vision_layers"],
            num_attention_heads=shape["vision_heads"],
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=shape["hidden"],
            hidden_act="gelu",
        ),
        image_token_index=image,
        image_seq_length=TOKENS,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        pad_token_id=end,
        eos_token_id=stop,
    )


def load_weights(model: LlavaForConditionalGeneration, weights: dict[str, Tensor]) -> None:
    """Load the checkpoint's weights.

    Raises:
        ValueError: the checkpoint lacks a weight of the model, or the model one of the checkpoint's.
    """
    wanted = set(model.state_dict())
    renamed_weights = renamed(weights, wanted)
    for name in wanted - set(renamed_weights):
        # LLaVA does not use the layer norm of the class token's output.
        if "post_layernorm" not in name and name != "lm_head.weight" and "position_ids" not in name:
            raise ValueError(f"the checkpoint has no weights for {name}")
    model.load_state_dict(renamed_weights, strict=False)
    model.tie_weights()


def write_processor(out: Path) -> None:
    """Write the settings of tokenizer, image processor and LlavaProcessor, and the chat template."""
    special = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(out / "tokenizer_config.json", {**special, "image_token": IMAGE, "processor_class": "LlavaProcessor"})
    images = {
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [MEAN] * 3,
        "image_processor_type": "CLIPImageProcessor",
        "image_std": [STD] * 3,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE},
    }
    write_json(out / "preprocessor_config.json", {**images, "processor_class": "LlavaProcessor"})
    processor = {
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,
        "patch_size": PATCH,
        "processor_class": "LlavaProcessor",
        "vision_feature_select_strategy": "default",
    }
    write_json(out / "processor_config.json", processor)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")  # where processors look


def renamed(weights: dict[str, _T], wanted: set[str]) -> dict[str, _T]:
    """The weights under transformers' names, whose prefixes differ between its versions.

    Raises:
        ValueError: a weight matches no name of ``wanted``, or several.
    """
    result: dict[str, _T] = {}
    for name, weight in weights.items():
        ending = name
        if name.startswith("model."):
            ending = name.removeprefix("model")
            holder = "language_model"
        elif name.startswith("projector."):
            ending, holder = name.removeprefix("projector"), "multi_modal_projector"
        else:
            ending, holder = _tower(name.removeprefix("vision.")), "vision_tower"
        matches = [each for each in wanted if each.endswith(ending) and holder in each]
        if len(matches) != 1:
            raise ValueError(f"{name} matches {matches or 'nothing'} in the LLaVA model")
        result[matches[0]] = weight
    return result


def exported_weights(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The weights of an exported model under the checkpoint's names: a Llama's, or a LLaVA model's.

    Args:
        names: those of the checkpoint that are wanted.

    Raises:
        ValueError: the model lacks one of them.
    """
    joined_weights = joined(directory)
    places = {name: name for name in names}
    if any("vision_tower" in name for name in joined_weights):
        wanted = {name for name in joined_weights if "post_layernorm" not in name}
        places = {ours: theirs for theirs, ours in renamed(places, wanted).items()}
    if missing := places.values() - joined_weights.keys():
        raise ValueError(f"{directory} has no weights for {min(missing)}")
    return {ours: joined_weights[theirs] for ours, theirs in places.items()}


def hub_name(name: str) -> str:
    """The name in LLaVA checkpoints on the Hugging Face Hub, which all readers accept; transformers 5 shortens it."""
    long = "vision_tower.vision_model."
    return name if name.startswith(long) else name.replace("vision_tower.", long, 1)


def _tower(name: str) -> str:
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        group = {"q_proj": "self_attn.", "k_proj": "self_attn.", "v_proj": "self_attn.", "out_proj": "self_attn."}
        group |= {"fc1": "mlp.", "fc2": "mlp."}
        return f".encoder.layers.{number}.{group.get(rest.partition('.')[0], '')}{rest}"
    return f".{name}" if name.startswith("pre_layrnorm") else f".embeddings.{name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    export(arguments.work, arguments.out)
