"""Pictures, prompts with places for them, what transformers itself answers, and engines that are given them."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from blake3 import blake3
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from penstock.infra.model.weight_files import key_mapping
from penstock.schemas.block_hashes import media_extra
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import MediaReservation, MediaSpan, SequenceRequest
from tests.demo_model import vision
from tests.workers.engines.native.models import request

DIRECTORY = Path(__file__).parents[4] / "configs" / "models" / "demo-vision"
TOKENS = 64
IMAGE = 1279
COUNT = 12


@cache
def picture(number: int) -> bytes:
    return vision.png(vision.scene(Random(number), held=True))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def prompt(pictures: int, text: str = "Describe the picture.") -> tuple[int, ...]:
    """One user message that begins with so many pictures."""
    message = f"<|im_start|>user\n{'<image>' * TOKENS}\n" + f"{'<image>' * TOKENS}\n" * (pictures - 1)
    message = message if pictures else "<|im_start|>user\n"
    ids = tokenizer().encode(f"{message}{text}<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids.count(IMAGE) == pictures * TOKENS
    return tuple(ids)


@cache
def reference() -> tuple[Any, Any]:
    names = dict(key_mapping(DIRECTORY))
    model = AutoModelForImageTextToText.from_pretrained(DIRECTORY, dtype="float32", key_mapping=names).eval()
    return model, AutoImageProcessor.from_pretrained(DIRECTORY, backend="pil")


@cache
def expected(tokens: tuple[int, ...], numbers: tuple[int, ...], count: int = COUNT) -> list[int]:
    """Greedy tokens by ``generate``."""
    model, processor = reference()
    images = [Image.open(io.BytesIO(picture(number))) for number in numbers]
    pixels = processor(images=images, return_tensors="pt") if images else {}
    out = model.generate(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        **pixels,
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
    )
    return out[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def media(numbers: Sequence[int]) -> list[tuple[bytes, int]]:
    return [(blake3(picture(number)).digest(), TOKENS) for number in numbers]


def encoded(engine: ScheduledEngine | EncodeEngine, numbers: Sequence[int]) -> MediaReservation:
    """Slots that hold these pictures."""
    reservation = engine.vision.reserve(media(numbers))
    assert reservation is not None
    missing = [at for at, have in enumerate(reservation.have) if not have]
    engine.vision.encode(reservation, {at: engine.vision.prepare(picture(numbers[at]), "image/png") for at in missing})
    return reservation


def asking(
    key: object, tokens: Sequence[int], slots: Sequence[Sequence[int]], numbers: Sequence[int], **more: Any
) -> SequenceRequest:
    """A request whose pictures lie in these slots."""
    starts = [at for at in range(len(tokens)) if tokens[at] == IMAGE and (not at or tokens[at - 1] != IMAGE)]
    spans = [
        MediaSpan(start, count, digest, of)
        for start, (digest, count), of in zip(starts, media(numbers), slots, strict=True)
    ]
    size = more.pop("block_size", 32)
    count = more.pop("count", COUNT)
    extra = media_extra((span[:3] for span in spans), size)
    return request(key, tokens, count, media=spans, extra=extra, **more)
