"""What the engine says of pictures is what transformers says, however prompts are cut, cached and preempted."""

import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from penstock.schemas.errors import Code
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import Engine, EngineError, MediaSpan, RequestError, VisionEngine
from penstock.workers.engines.native.build import build, build_encoder
from penstock.workers.engines.native.model import vision as vision_module
from penstock.workers.engines.native.model.model import UnsupportedModel
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model import vision
from tests.workers.engines.native.models import drain, run, tokens
from tests.workers.engines.native.pictures import (
    DIRECTORY,
    TOKENS,
    asking,
    encoded,
    expected,
    media,
    picture,
    prompt,
    reference,
    tokenizer,
)

PICTURES = (1, 2, 3, 4)


def engine(**options: Any) -> ScheduledEngine:
    return build(str(DIRECTORY), NativeOptions(**{"kv_blocks": 64, "device": "cpu", "embed_slots": 8, **options}))


@pytest.fixture(scope="module")
def seeing() -> ScheduledEngine:
    return engine()


def answers(native: ScheduledEngine, numbers: tuple[int, ...], **more: Any) -> dict[object, list[int]]:
    """One question for each picture, all at once."""
    reservation = encoded(native, numbers)
    requests = [
        asking(number, prompt(1), [slots], [number], **more)
        for number, slots in zip(numbers, reservation.slots, strict=True)
    ]
    found = tokens(run(native, requests))
    native.vision.release(reservation)
    return found


def wanted(numbers: tuple[int, ...] = PICTURES) -> dict[object, list[int]]:
    return {number: expected(prompt(1), (number,)) for number in numbers}


def test_pictures_are_answered_as_transformers_answers_them(seeing: ScheduledEngine) -> None:
    said = answers(seeing, PICTURES)
    assert said == wanted()
    assert len(set(map(tuple, said.values()))) == len(PICTURES)  # equal tokens, other pictures, other answers


def test_text_without_pictures_too(seeing: ScheduledEngine) -> None:
    text = prompt(0, "What color is the sky?")
    assert tokens(run(seeing, [asking("text", text, [], [])])) == {"text": expected(text, ())}


def test_two_pictures_in_one_prompt_and_text_beside_it_in_one_batch(seeing: ScheduledEngine) -> None:
    reservation = encoded(seeing, (5, 6))
    both, text = prompt(2), prompt(0, "Hello.")
    said = tokens(run(seeing, [asking("both", both, reservation.slots, (5, 6)), asking("text", text, [], [])]))
    assert said == {"both": expected(both, (5, 6)), "text": expected(text, ())}
    assert expected(both, (5, 6)) != expected(both, (6, 5))
    seeing.vision.release(reservation)


@pytest.mark.parametrize("chunk", [7, 50])
def test_chunks_may_cut_a_picture(chunk: int) -> None:
    assert answers(engine(max_batched_tokens=chunk, prefix_cache=False), PICTURES[:2]) == wanted(PICTURES[:2])


def test_cached_blocks_are_those_of_the_same_picture_only() -> None:
    native = engine(block_size=16)
    for numbers in ((1,), (2,), (1,), (2,)):
        assert answers(native, numbers, block_size=16) == wanted(numbers)
    reservation = encoded(native, (1, 3))
    for number, slots in zip((1, 3), reservation.slots, strict=True):
        native.submit(asking(number, prompt(1), [slots], [number], block_size=16))
    cached = {start.key: start.cached_tokens for result in drain(native) for start in result.started}
    assert cached == {1: (len(prompt(1)) - 1) // 16 * 16, 3: 0}


def test_a_picture_is_encoded_once(seeing: ScheduledEngine) -> None:
    first = encoded(seeing, (7,))
    again = seeing.vision.reserve(media((7, 7)))
    assert again is not None
    assert (again.have, again.slots) == ([True, True], first.slots * 2)
    for reservation in (first, again):
        seeing.vision.release(reservation)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_sequences_see_their_pictures_again(prefix_cache: bool) -> None:
    native = engine(block_size=8, kv_blocks=33, prefix_cache=prefix_cache)
    said = answers(native, PICTURES[:3], block_size=8, count=30)
    assert said == {number: expected(prompt(1), (number,), 30) for number in PICTURES[:3]}
    assert native.stats().preemptions > 0


def test_a_continued_answer_sees_the_picture(seeing: ScheduledEngine) -> None:
    whole = expected(prompt(1), (1,))
    assert answers(seeing, (1,), generated=whole[:5]) == {1: whole[5:]}


def test_embeddings_may_be_given_instead_of_a_picture(seeing: ScheduledEngine) -> None:
    reservation = encoded(seeing, (1,))
    encoder: Any = seeing.vision.encoder
    raw = save({"anything": encoder.pool.data[reservation.slots[0][0]].clone()})
    mine = seeing.vision.reserve([(b"mine" * 8, TOKENS)])
    assert mine is not None
    seeing.vision.encode(mine, {0: seeing.vision.prepare(raw, "embedding")})
    assert tokens(run(seeing, [asking(0, prompt(1), mine.slots, [1])])) == {0: expected(prompt(1), (1,))}
    for each in (reservation, mine):
        seeing.vision.release(each)


def test_embeddings_of_any_length_take_as_many_slots_as_they_need(seeing: ScheduledEngine) -> None:
    rows = torch.randn(TOKENS + 3, 256, generator=torch.Generator().manual_seed(1))
    reservation = seeing.vision.reserve([(b"long" * 8, TOKENS + 3)])
    assert reservation is not None
    seeing.vision.encode(reservation, {0: seeing.vision.prepare(save({"x": rows}), "embedding")})
    encoder: Any = seeing.vision.encoder
    one, two = reservation.slots[0]
    assert torch.equal(torch.cat([encoder.pool.data[one], encoder.pool.data[two, :3]]), rows)
    (start,) = (at for at in range(9) if prompt(1)[at] == 1279 and prompt(1)[at - 1] != 1279)
    longer = (*prompt(1)[:start], *[1279] * 3, *prompt(1)[start:])
    span = MediaSpan(start, TOKENS + 3, b"long" * 8, (one, two))
    request = asking(0, prompt(0), [], [])
    request.prompt, request.media, request.extra = longer, [span], dict.fromkeys(range(3), b"long")
    said = tokens(run(seeing, [request]))[0]
    model, mixed = _embedded(longer)
    mixed[0, start : start + TOKENS + 3] = rows
    with torch.inference_mode():
        first = model(inputs_embeds=mixed).logits[0, -1].argmax()
    assert said[0] == int(first)
    seeing.vision.release(reservation)


def _embedded(words: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    model, _ = reference()
    with torch.no_grad():
        return model, model.get_input_embeddings()(torch.tensor([words])).clone()


def test_encoding_equals_transformers_own(seeing: ScheduledEngine) -> None:
    model, processor = reference()
    numbers = tuple(range(20, 25))
    reservation = encoded(seeing, numbers)
    encoder: Any = seeing.vision.encoder
    for number, (slot,) in zip(numbers, reservation.slots, strict=True):
        pixels = processor(images=Image.open(io.BytesIO(picture(number))), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            (theirs,) = model.get_image_features(pixel_values=pixels).pooler_output
        torch.testing.assert_close(encoder.pool.data[slot], theirs, rtol=1e-4, atol=1e-4)
    seeing.vision.release(reservation)


def test_a_medium_of_another_length_than_its_places_is_refused_and_nothing_is_adopted(seeing: ScheduledEngine) -> None:
    reservation = seeing.vision.reserve([(b"short" * 6, TOKENS - 1)])
    assert reservation is not None
    with pytest.raises(RequestError, match="64 tokens, the prompt has placeholders for 63"):
        seeing.vision.encode(reservation, {0: seeing.vision.prepare(picture(1), "image/png")})
    seeing.vision.release(reservation)
    again = seeing.vision.reserve([(b"short" * 6, TOKENS - 1)])
    assert again is not None
    assert again.have == [False]
    seeing.vision.release(again)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([MediaSpan(5, 64, b"", (0, 1))], "64 tokens came with 2 embedding slots"),
        ([MediaSpan(5, 64, b"", (8,))], "only 8 embedding slots"),
        ([MediaSpan(-1, 64, b"", (0,))], "64 tokens from position -1"),
        ([MediaSpan(60, 64, b"", (0,))], "64 tokens from position 60"),
        ([MediaSpan(5, 0, b"", ())], "0 tokens from position 5"),
        ([MediaSpan(5, 9, b"", (0,)), MediaSpan(13, 9, b"", (1,))], "9 tokens from position 13 on: 14 to"),
        ([MediaSpan(5, 64, b"")], "are not on this worker"),
    ],
)
def test_media_that_do_not_fit_are_refused(seeing: ScheduledEngine, spans: list[MediaSpan], message: str) -> None:
    request = asking(0, prompt(1), [(0,)], [1])
    request.media = spans
    with pytest.raises(RequestError, match=message):
        seeing.submit(request)
    assert not seeing.has_work()


def test_a_pool_that_is_full_says_so_and_one_that_is_too_small_too() -> None:
    native = engine(embed_slots=2)
    held = encoded(native, (1, 2))
    assert native.vision.reserve(media((3,))) is None
    with pytest.raises(RequestError, match="take 3 embedding slots of 64 tokens; this worker has 2") as caught:
        native.vision.reserve(media((1, 2, 3)))
    assert caught.value.code == Code.out_of_blocks
    generations = native.vision.generations(held)
    native.vision.release(held)
    new = native.vision.reserve(media((3,)))
    assert new is not None
    assert native.vision.generations(new)[0] not in generations


def test_the_embedding_pool_takes_a_tenth_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = TOKENS * 256 * 4
    monkeypatch.setattr(vision_module, "free_bytes", lambda device: 30 * slot)
    assert engine(embed_slots=0).memory()["embeds"].blocks == 3
    monkeypatch.setattr(vision_module, "free_bytes", lambda device: 1 << 40)
    assert engine(embed_slots=0).memory()["embeds"].blocks == 256
    monkeypatch.setattr(vision_module, "free_bytes", lambda device: 5 * slot)
    with pytest.raises(EngineError, match="lower embed_slots"):
        engine(embed_slots=6)


def changed(path: Path, name: str, **values: Any) -> str:
    """The model directory with another value in one of its files."""
    (path / "demo").symlink_to(DIRECTORY.parent / "demo")  # the index names its weights
    path /= "changed"
    path.mkdir()
    for file in DIRECTORY.iterdir():
        (path / file.name).symlink_to(file)
    content = json.loads((path / name).read_text())
    for key, value in values.items():
        content[key] = content[key] | value if key == "vision_config" else value
    (path / name).unlink()
    (path / name).write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("make", [build, build_encoder])
@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (
            "config.json",
            {"model_type": "llava_onevision"},
            "images of llava_onevision models are not supported, only those of llava, llava_next",
        ),
        ("config.json", {"vision_config": {"model_type": "pixtral"}}, "a pixtral vision tower is not supported"),
        ("preprocessor_config.json", {"do_center_crop": False, "size": {"shortest_edge": 96}}, "cannot be used.*blank"),
        ("preprocessor_config.json", {"crop_size": {"height": 48, "width": 48}}, "cannot be used.*blank image.*48"),
        ("preprocessor_config.json", {"image_processor_type": "Nothing"}, "cannot be used.*preprocessor_config.json"),
    ],
)
def test_unsupported_vision_models_are_refused(
    tmp_path: Path, make: Any, file: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(changed(tmp_path, file, **values), NativeOptions(device="cpu"))


def test_a_whole_model_and_an_encoder_are_vision_engines(seeing: ScheduledEngine) -> None:
    encoder = build_encoder(str(DIRECTORY), NativeOptions(device="cpu", embed_slots=1))
    engines: list[Engine] = [seeing, encoder]
    visions: list[VisionEngine | None] = [seeing.vision, encoder.vision]
    assert [one.info.name for one in engines] == ["native", "native"]
    assert [one.slot_tokens for one in visions] == [TOKENS, TOKENS]


def test_a_text_model_refuses_images() -> None:
    native = build(str(DIRECTORY.parent / "demo"), NativeOptions(kv_blocks=4, device="cpu"))
    assert native.vision is None
    assert set(native.memory()) == {"kv"}
    with pytest.raises(RequestError, match="takes text only"):
        native.submit(asking(0, prompt(1), [(0,)], [1]))


def test_answers_are_about_the_pictures(seeing: ScheduledEngine) -> None:
    said = answers(seeing, PICTURES)
    colors = [
        all(thing.color in tokenizer().decode(said[number]) for thing in vision.scene(Random(number), True).shapes[:1])
        for number in PICTURES
    ]
    assert sum(colors) >= len(PICTURES) - 1
