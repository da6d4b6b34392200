"""A small Qwen2-VL or Qwen2.5-VL model with random weights, and what transformers' ``generate`` answers with it."""

import io
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

DEMO = Path(__file__).parents[4] / "configs" / "models" / "demo"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE, WINDOW = 4, 2, 16
SQUARE = (PATCH * MERGE) ** 2
IMAGE_PIXELS = (4 * SQUARE, 60 * SQUARE)
FRAME_PIXELS = (4 * SQUARE, 16 * SQUARE)
FPS, FRAMES = 2.0, (4, 12)
TOKENS_PER_SECOND = 7  # odd, so that places in time are rounded

TEMPLATE = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def write(folder: Path, seed: int = 5, wider: int = 1, kind: str = "qwen2_5_vl") -> Path:
    """Write the model; its directory.

    Args:
        wider: heads have so many times 16 values.
        kind: "qwen2_vl" or "qwen2_5_vl".
    """
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": TEMPLATE}))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    end = tokenizer.token_to_id("<|im_end|>")
    tower: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH}
    tower |= {"spatial_merge_size": MERGE, "temporal_patch_size": 2}
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 32, "hidden_size": 64 * wider, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64 * wider}
        tower |= {"window_size": WINDOW, "fullatt_block_indexes": [1], "tokens_per_second": TOKENS_PER_SECOND}
    config = (Qwen2VLConfig if kind == "qwen2_vl" else Qwen2_5_VLConfig)(
        text_config={
            "vocab_size": vocab + 4,
            "hidden_size": 64 * wider,
            "intermediate_size": 128 * wider,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2 * wider, 3 * wider, 3 * wider],
            },
            "bos_token_id": None,
            "eos_token_id": end,
        },
        vision_config=tower,
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                scale = 1.0 if "embed_tokens" in name else weight[0].numel() ** -0.5 * 1.4
                weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    images = {"image_processor_type": "Qwen2VLImageProcessor", **common, "min_pixels": IMAGE_PIXELS[0]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"max_pixels": IMAGE_PIXELS[1]}))
    size = {"shortest_edge": FRAME_PIXELS[0], "longest_edge": FRAME_PIXELS[1]}
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", **common, "size": size, "fps": FPS}
    videos |= {"min_frames": FRAMES[0], "max_frames": FRAMES[1]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


@cache
def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of smooth colours."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 255, (5, 5, 3), np.uint8))
    data = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(data, "PNG")
    return data.getvalue()


@cache
def film(frames: int, rate: int, width: int, height: int, codec: str = "mpeg4", form: str = "mp4") -> bytes:
    """A video whose every frame is different."""
    data = io.BytesIO()
    with av.open(data, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.asarray(Image.open(io.BytesIO(picture(width, height, number // 3)))).copy()
            pixels[:, number * width // frames :][:, :4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()


@cache
def noisy() -> bytes:
    """A video of more than a mebibyte."""
    data, random = io.BytesIO(), np.random.default_rng(3)
    with av.open(data, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 640, 480, "yuv420p", 40_000_000
        for _ in range(12):
            pixels = random.integers(0, 255, (480, 640, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()


def pixels_of(processor: Qwen2VLImageProcessorPil, media: list[bytes]) -> dict[str, Any]:
    """What transformers' processors make of images and videos, in order, as arguments of ``generate``.

    Its video processor needs torchvision. So its image processor takes each sampled frame, which it doubles, and two
    such frames become one step in time here.
    """
    images, grids, videos, steps, apart = [], [], [], [], []
    for raw in media:
        if raw.startswith(b"\x89PNG"):
            made = processor(images=Image.open(io.BytesIO(raw)), return_tensors="pt")
            images.append(made["pixel_values"])
            grids.append(made["image_grid_thw"])
            continue
        with av.open(io.BytesIO(raw)) as container:
            rate = float(container.streams.video[0].average_rate or 0)
            frames = [frame.to_image() for frame in container.decode(video=0)]
        numbers = sampled(len(frames), rate)
        size = {"shortest_edge": FRAME_PIXELS[0], "longest_edge": FRAME_PIXELS[1]}
        each = processor(images=[frames[number] for number in numbers], size=size, return_tensors="pt")
        _, high, wide = each["image_grid_thw"][0].tolist()
        cut = each["pixel_values"].view(len(numbers) // 2, 2, high * wide, 3, 2, PATCH, PATCH)[:, :, :, :, 0]
        videos.append(cut.permute(0, 2, 3, 1, 4, 5).reshape(len(numbers) // 2 * high * wide, -1))
        steps.append([len(numbers) // 2, high, wide])
        apart.append(2 / (len(numbers) / len(frames) * rate))
    found: dict[str, Any] = {}
    if images:
        found |= {"pixel_values": torch.cat(images), "image_grid_thw": torch.cat(grids)}
    if videos:
        found |= {"pixel_values_videos": torch.cat(videos), "video_grid_thw": torch.tensor(steps)}
        found["second_per_grid_ts"] = torch.tensor(apart)
    return found


def sampled(total: int, rate: float) -> list[int]:
    """As ``sample_frames`` of transformers' Qwen2VLVideoProcessor, which torchvision is needed to import."""
    most = min(FRAMES[1], total) // 2 * 2
    count = int(min(max(total / rate * FPS, FRAMES[0]), most, total)) // 2 * 2
    return torch.arange(0, total, total / count).int().tolist()


@cache
def reference(folder: Path) -> tuple[Any, Qwen2VLImageProcessorPil]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()
    return model, Qwen2VLImageProcessorPil.from_pretrained(folder)


def generated(folder: Path, tokens: list[int], media: list[bytes], count: int) -> list[int]:
    """Greedy tokens by transformers' ``generate``.

    Args:
        tokens: the prompt, with a placeholder for each embedding.
    """
    model, processor = reference(folder)
    words = torch.tensor([tokens])
    given = pixels_of(processor, media)
    if model.config.model_type == "qwen2_vl":
        given.pop("second_per_grid_ts", None)
    kinds = (words == model.config.image_token_id).int() + 2 * (words == model.config.video_token_id).int()
    out = model.generate(
        input_ids=words, attention_mask=torch.ones_like(words), mm_token_type_ids=kinds,
        **given, do_sample=False, max_new_tokens=count, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def published(folder: Path, target: Path) -> Path:
    """The same model with its files as Qwen publishes them: one flat configuration, and none for videos."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("model_type", "layer_types")}
    rope = text.pop("rope_parameters")
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    for key in ("model_type", "rope_parameters"):
        config["vision_config"].pop(key)
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": PATCH}
    (target / "config.json").write_text(json.dumps(text | config | scaling | {"rope_theta": rope["rope_theta"]}))
    for name in ("generation_config.json", "video_preprocessor_config.json"):
        (target / name).unlink()
    return target
