"""LLaVA-NeXT: images of any shape, cut into tiles, are seen as transformers sees them, in one engine and in three."""

import io
from array import array
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from blake3 import blake3
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, media_extra, root, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import MediaReservation, MediaSpan, SequenceRequest
from penstock.workers.engines.native.build import build, build_encoder
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model import vision
from tests.workers.engines.native import llava_next
from tests.workers.engines.native.models import drain, request, run, tokens
from tests.workers.engines.native.test_handoff import copy, handed_off, prefilled

SIZES = ((64, 64), (150, 60), (45, 130), (200, 190))  # width, height: each canvas, and a small one
SIZE, COUNT, ROOT = 32, 10, root("revision")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return modeldir.load(llava_next.write(tmp_path_factory.mktemp("llava-next")))


@cache
def picture(number: int) -> bytes:
    scene = Image.open(io.BytesIO(vision.png(vision.scene(Random(number), held=True))))
    data = io.BytesIO()
    scene.resize(SIZES[number % len(SIZES)]).save(data, "PNG")
    return data.getvalue()


def size_of(model: ModelDir, number: int) -> int:
    """Tokens of a picture as the gateway counts them."""
    assert model.vision is not None
    width, height = SIZES[number % len(SIZES)]
    return model.vision.tokens_of(height, width)


def prompt(model: ModelDir, numbers: tuple[int, ...]) -> tuple[int, ...]:
    pictures = "\n".join("<image>" * size_of(model, number) for number in numbers)
    text = f"<|im_start|>user\n{pictures}\nDescribe the picture.<|im_end|>\n<|im_start|>assistant\n"
    return tuple(model.tokenizer.encode(text).ids)


def generated(model: ModelDir, of: Any, processor: Any, numbers: tuple[int, ...]) -> list[int]:
    """Greedy tokens by transformers' ``generate``."""
    words = prompt(model, numbers)
    pixels = processor(images=[Image.open(io.BytesIO(picture(number))) for number in numbers], return_tensors="pt")
    out = of.generate(
        input_ids=torch.tensor([words]), attention_mask=torch.ones(1, len(words), dtype=torch.int64), **pixels,
        do_sample=False, max_new_tokens=COUNT, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(words) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wanted(model: ModelDir) -> dict[tuple[int, ...], list[int]]:
    theirs = AutoModelForImageTextToText.from_pretrained(model.path, dtype="float32").eval()
    processor = AutoImageProcessor.from_pretrained(model.path, backend="pil")
    return {numbers: generated(model, theirs, processor, numbers) for numbers in ((0,), (1,), (2,), (3,), (1, 2))}


def encoded(vision_engine: Any, model: ModelDir, numbers: tuple[int, ...]) -> MediaReservation:
    digests = [(blake3(picture(number)).digest(), size_of(model, number)) for number in numbers]
    reservation: MediaReservation = vision_engine.reserve(digests)
    medium = {at: vision_engine.prepare(picture(number), "image/png") for at, number in enumerate(numbers)}
    assert [vision_engine.encoder.tokens(each) for each in medium.values()] == [tokens for _, tokens in digests]
    vision_engine.encode(reservation, medium)
    return reservation


def asking(model: ModelDir, numbers: tuple[int, ...], slots: Any, count: int = COUNT, **more: Any) -> SequenceRequest:
    words = prompt(model, numbers)
    assert model.vision is not None
    place = model.vision.image_token_id
    starts = [at for at in range(len(words)) if words[at] == place and words[at - 1] != place]
    spans = [
        MediaSpan(start, size_of(model, number), blake3(picture(number)).digest(), of)
        for start, number, of in zip(starts, numbers, slots, strict=True)
    ]
    extra = media_extra((span[:3] for span in spans), SIZE)
    return request(numbers, words, count, media=spans, extra=extra, **more)


def options(**more: Any) -> NativeOptions:
    return NativeOptions(**{"kv_blocks": 96, "block_size": SIZE, "device": "cpu", "embed_slots": 16, **more})


def test_pictures_of_any_shape_are_answered_as_transformers_answers_them(
    model: ModelDir, wanted: dict[tuple[int, ...], list[int]]
) -> None:
    engine = build(str(model.path), options())
    assert len({size_of(model, number) for number in range(4)}) == 4  # four shapes, four numbers of tokens
    said = {}
    for numbers in wanted:
        reservation = encoded(engine.vision, model, numbers)
        said |= tokens(run(engine, [asking(model, numbers, reservation.slots)]))
        engine.vision.release(reservation)
    assert said == wanted
    assert len(set(map(tuple, said.values()))) > 2
    engine.close()


def test_encode_prefill_and_decode_engines_answer_as_one_does(
    model: ModelDir, wanted: dict[tuple[int, ...], list[int]]
) -> None:
    encoder = build_encoder(str(model.path), options(embed_slots=12))
    source, target = (build(str(model.path), options()) for _ in range(2))
    for numbers in ((1, 2), (3,)):
        made = encoded(encoder.vision, model, numbers)
        digests = [(blake3(picture(number)).digest(), size_of(model, number)) for number in numbers]
        reservation = source.vision.reserve(digests)
        assert reservation is not None
        for mine, theirs in zip(made.slots, reservation.slots, strict=True):
            copy(encoder.memory()["embeds"], source.memory()["embeds"], mine, theirs)
        source.vision.adopt(reservation)
        item = asking(model, numbers, reservation.slots, 1, root=ROOT)
        pinned, first = prefilled(source, item)
        words = prompt(model, numbers)
        names = split(chain(pack_tokens(array("I", words)), SIZE, ROOT, item.extra))
        adopted = handed_off(source, target, pinned, names, len(words) % SIZE > 0)
        more = asking(model, numbers, reservation.slots, root=ROOT, digests=names, generated=[first])
        more.reservation, more.media = adopted.reservation, []
        target.submit(more)
        results = drain(target)
        assert [first, *(output.token for result in results for output in result.outputs)] == wanted[numbers]
        assert sum(result.computed_tokens for result in results) == COUNT - 1  # nothing of the prompt
    for engine in (encoder, source, target):
        engine.close()
