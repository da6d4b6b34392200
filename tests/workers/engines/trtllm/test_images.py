"""Pictures in prompts: as pictures, or as embeddings that an encode worker made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.workers.engines.engine_protocol import MediaSpan, RequestError
from penstock.workers.engines.external.sequences import collapse
from penstock.workers.engines.native.build import build as native_engine
from penstock.workers.engines.native.model.options import NativeOptions
from penstock.workers.engines.trtllm import encoder_from_settings, from_settings
from tests.workers.engines.trtllm.conftest import ask, run
from tests.workers.engines.trtllm.test_encoder import VISION, png

MODEL = modeldir.load(VISION)
assert MODEL.vision is not None
PLACE, EACH = MODEL.vision.image_token_id, MODEL.vision.image_tokens


@pytest.fixture
def engine(standin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TENSORRT_LLM_STANDIN_KV", str(tmp_path))
    settings = WorkerSettings(engine="trtllm", model=str(VISION), max_model_len=512, embed_slots=4, dtype="float32")
    built = from_settings(settings, VISION)
    yield built
    built.close()


def prompt(*words: str) -> tuple[list[int], list[int]]:
    """Tokens with a picture between any two texts, and where the pictures begin."""
    tokens: list[int] = []
    places: list[int] = []
    for number, text in enumerate(words):
        if number:
            places.append(len(tokens))
            tokens += [PLACE] * EACH
        tokens += MODEL.tokenizer.encode(text, add_special_tokens=False).ids
    return tokens, places


def seen(engine: Any, colors: list[str], places: list[int]) -> list[MediaSpan]:
    """The pictures in slots of this engine."""
    digests = [color.encode().ljust(32, b"-") for color in colors]
    reservation = engine.vision.reserve([(digest, EACH) for digest in digests])
    missing = {n: engine.vision.prepare(png(c), "image/png") for n, c in enumerate(colors) if not reservation.have[n]}
    if missing:
        engine.vision.encode(reservation, missing)
    return [MediaSpan(at, EACH, d, s) for at, d, s in zip(places, digests, reservation.slots, strict=True)]


def native_answer(tokens: list[int], colors: list[str], places: list[int]) -> list[int]:
    engine = native_engine(
        str(VISION), NativeOptions(device="cpu", dtype="float32", max_model_len=512, kv_blocks=64, embed_slots=4)
    )
    results = run(engine, ask("a", tokens, 8, ignore_eos=True, media=seen(engine, colors, places)))
    engine.close()
    return results.tokens("a")


@pytest.mark.parametrize("colors", [["red"], ["blue", "red"]])
def test_a_prompt_with_pictures_is_answered_as_by_our_own_engine(engine: Any, colors: list[str]) -> None:
    tokens, places = prompt("user: ", *["\nand " for _ in colors[1:]], "\nWhat colour is this?")
    results = run(engine, ask("a", tokens, 8, ignore_eos=True, media=seen(engine, colors, places)))
    assert results.tokens("a") == native_answer(tokens, colors, places)


def test_embeddings_from_an_encode_worker_serve_as_well(engine: Any) -> None:
    tokens, places = prompt("user: ", "\nWhat colour is this?")
    picture = run(engine, ask("a", tokens, 8, ignore_eos=True, media=seen(engine, ["red"], places))).tokens("a")
    settings = WorkerSettings(engine="trtllm", role="encode", model=str(VISION), embed_slots=2, dtype="float32")
    encoder: Any = encoder_from_settings(settings, VISION)
    try:
        theirs = encoder.vision.reserve([(b"x" * 32, EACH)])
        encoder.vision.encode(theirs, {0: encoder.vision.prepare(png("red"), "image/png")})
        assert encoder.memory()["embeds"].layout == engine.memory()["embeds"].layout
        ours = engine.vision.reserve([(b"x" * 32, EACH)])
        engine.vision.encoder.pool.data[ours.slots[0][0]] = encoder.vision.encoder.pool.data[
            theirs.slots[0][0]
        ]  # as a transfer does
        engine.vision.adopt(ours)
    finally:
        encoder.close()
    results = run(
        engine, ask("b", tokens, 8, ignore_eos=True, media=[MediaSpan(places[0], EACH, b"x" * 32, ours.slots[0])])
    )
    assert results.tokens("b") == picture


def test_a_slot_that_gets_embeddings_forgets_the_picture_before(engine: Any) -> None:
    for n in range(4):
        reservation = engine.vision.reserve([(bytes([n]) * 32, EACH)])
        engine.vision.encode(reservation, {0: engine.vision.prepare(png("red"), "image/png")})
        engine.vision.release(reservation)
    reservation = engine.vision.reserve([(b"new" * 10 + b"!!", EACH)])
    engine.vision.adopt(reservation)
    span = MediaSpan(0, EACH, b"", reservation.slots[0])
    assert engine.vision.encoder.images([span]) == ()
    (embedded,) = engine.vision.encoder.embeddings([span])
    assert embedded.shape == (EACH, MODEL.vision.hidden)  # type: ignore[union-attr]


def test_pictures_and_embeddings_in_one_prompt_are_refused(engine: Any) -> None:
    tokens, places = prompt("user: ", "\nand ", "\nWhat?")
    spans = seen(engine, ["red", "blue"], places)
    engine.vision.encoder.mark_embedded(spans[1].slots)
    with pytest.raises(RequestError) as error:
        engine.submit(ask("a", tokens, 8, media=spans))
    assert error.value.code == Code.transfer_failed


def test_a_prompt_that_text_cannot_express_is_refused(engine: Any) -> None:
    tokens, places = prompt("user: ", "\nWhat?")
    letters = [MODEL.tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in " the"]
    assert MODEL.tokenizer.encode(" the", add_special_tokens=False).ids != letters
    with pytest.raises(RequestError) as error:
        engine.submit(ask("a", [*tokens, *letters], 8, media=seen(engine, ["red"], places)))
    assert error.value.code == Code.unsupported


def test_media_outside_their_slots_or_the_prompt_are_refused(engine: Any) -> None:
    tokens, places = prompt("user: ", "\nWhat?")
    (span,) = seen(engine, ["red"], places)
    for wrong in (span._replace(position=len(tokens)), span._replace(slots=[99]), span._replace(slots=())):
        with pytest.raises(RequestError):
            engine.submit(ask("a", tokens, 8, media=[wrong]))


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=5), st.integers(1, 4)), max_size=4),
    st.lists(st.integers(1, 9)),
)
def test_each_medium_is_left_with_one_placeholder(parts: list[tuple[list[int], int]], tail: list[int]) -> None:
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    short: list[int] = []
    for text, size in parts:
        tokens += text
        spans.append(MediaSpan(len(tokens), size, b""))
        tokens += [0] * size
        short += [*text, 0]
    assert collapse([*tokens, *tail], spans, 0) == [*short, *tail]
