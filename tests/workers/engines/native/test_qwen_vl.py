"""Qwen2.5-VL: images and videos of any size are seen as transformers sees them, in one engine and in three."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from penstock.infra.model import modeldir, video
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, media_extra, root, split
from penstock.schemas.errors import Code
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import MediaReservation, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.native.build import build, build_encoder
from penstock.workers.engines.native.model import vision as native_vision
from penstock.workers.engines.native.model.options import NativeOptions
from tests.properties import some
from tests.workers.engines.native.models import drain, request, run, tokens
from tests.workers.engines.native.qwen_vl import SQUARE, film, generated, picture, published, write
from tests.workers.engines.native.test_handoff import copy, handed_off, prefilled

SIZE, COUNT, ROOT = 16, 12, root("revision")
A, B = picture(40, 90, 1), picture(150, 31, 2)
FILM, LONG = film(30, 10, 64, 48), film(80, 5, 40, 70)

CASES: dict[str, tuple[str | bytes, ...]] = {
    "one picture": (A, "Describe the picture."),
    "two pictures and text between": ("First", A, "and then", B, "What differs?"),
    "a video": (FILM, "What happens?"),
    "a video longer than the text": (LONG, "?"),
    "a picture between two videos": ("See", FILM, A, LONG, "and tell."),
    "text": ("What is 347 + 586?",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return modeldir.load(write(tmp_path_factory.mktemp("qwen-vl")))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return modeldir.load(write(tmp_path_factory.mktemp("qwen2-vl"), kind="qwen2_vl"))


def span_of(model: ModelDir, raw: bytes, position: int) -> MediaSpan:
    """As a gateway finds it."""
    vision = model.vision
    assert vision is not None
    assert vision.patches is not None
    digest = blake3(raw).digest()
    if not video.kind_of(raw):
        grid = vision.patches.image(int.from_bytes(raw[20:24]), int.from_bytes(raw[16:20]))
        return MediaSpan(position, grid.tokens, digest, (), grid)
    sample = vision.patches.video(*video.probe(raw, 1000))
    return MediaSpan(position, sample.grid.tokens, digest, (), sample.grid, sample.seconds)


def prompt(model: ModelDir, *parts: str | bytes, before: str = "") -> tuple[list[int], list[MediaSpan]]:
    """One user message."""
    vision = model.vision
    assert vision is not None
    words = model.tokenizer.encode(f"{before}<|im_start|>user\n").ids
    spans: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, str):
            words += model.tokenizer.encode(part).ids
            continue
        start, end = (model.tokenizer.token_to_id(f"<|vision_{edge}|>") for edge in ("start", "end"))
        spans.append(span_of(model, part, len(words) + 1))
        place = vision.video_token_id if video.kind_of(part) else vision.image_token_id
        assert start is not None
        assert end is not None
        words += [start, *[place] * spans[-1].tokens, end]
    return words + model.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n").ids, spans


def media_of(parts: tuple[str | bytes, ...]) -> list[bytes]:
    return [part for part in parts if isinstance(part, bytes)]


def encoded(engine: Any, raws: list[bytes], spans: list[MediaSpan]) -> MediaReservation:
    reservation: MediaReservation = engine.reserve([(span.digest, span.tokens) for span in spans])
    kinds = [video.kind_of(raw) or "image/png" for raw in raws]
    missing = [number for number, have in enumerate(reservation.have) if not have]
    engine.encode(reservation, {number: engine.prepare(raws[number], kinds[number]) for number in missing})
    return reservation


def asking(
    words: list[int], spans: list[MediaSpan], slots: Any, count: int = COUNT, key: object = "q", **more: Any
) -> SequenceRequest:
    media = [span._replace(slots=of) for span, of in zip(spans, slots, strict=True)]
    return request(key, words, count, media=media, extra=media_extra((each[:3] for each in media), SIZE), **more)


def options(**more: Any) -> NativeOptions:
    return NativeOptions(**{"kv_blocks": 96, "block_size": SIZE, "device": "cpu", "embed_slots": 16, **more})


@pytest.mark.parametrize("batched", some([8192, 37], 37), ids=["whole", "in chunks"])
def test_pictures_and_videos_are_answered_as_transformers_answers_them(model: ModelDir, batched: int) -> None:
    engine = build(str(model.path), options(max_batched_tokens=batched))
    said = {}
    for name, parts in CASES.items():
        words, spans = prompt(model, *parts)
        reservation = encoded(engine.vision, media_of(parts), spans)
        (said[name],) = tokens(run(engine, [asking(words, spans, reservation.slots)])).values()
        assert said[name] == generated(model.path, words, media_of(parts), COUNT), name
        engine.vision.release(reservation)  # type: ignore[union-attr]
    assert len({tuple(each) for each in said.values()}) == len(CASES)
    engine.close()


def test_the_model_before_it_is_answered_likewise(older: ModelDir) -> None:
    """Qwen2-VL: steps of a video are 1 apart, whatever time is between them; its tower has no windows."""
    engine, encoder = build(str(older.path), options()), build_encoder(str(older.path), options())
    for parts in CASES.values():
        words, spans = prompt(older, *parts)
        made = [encoded(each, media_of(parts), spans) for each in (engine.vision, encoder.vision)]
        (said,) = tokens(run(engine, [asking(words, spans, made[0].slots)])).values()
        assert said == generated(older.path, words, media_of(parts), COUNT)
        rows = [each.vision.encoder.pool.data for each in (engine, encoder)]  # type: ignore[union-attr]
        for mine, theirs in zip(*(each.slots for each in made), strict=True):
            torch.testing.assert_close(rows[0][mine], rows[1][theirs], atol=1e-5, rtol=1e-5)
        engine.vision.release(made[0])  # type: ignore[union-attr]
        encoder.vision.release(made[1])
    engine.close()
    encoder.close()


def test_several_at_once_are_answered_as_alone(model: ModelDir) -> None:
    engine = build(str(model.path), options(max_batched_tokens=50))
    asked, wanted = [], {}
    for name, parts in CASES.items():
        words, spans = prompt(model, *parts)
        slots = encoded(engine.vision, media_of(parts), spans).slots
        asked.append(asking(words, spans, slots, key=name))
        wanted[name] = generated(model.path, words, media_of(parts), COUNT)
    assert tokens(run(engine, asked)) == wanted
    engine.close()


def test_encode_prefill_and_decode_engines_answer_as_one_does(model: ModelDir) -> None:
    encoder = build_encoder(str(model.path), options())
    source, target = (build(str(model.path), options()) for _ in range(2))
    for parts in CASES.values():
        if not media_of(parts):
            continue
        words, spans = prompt(model, *parts)
        made = encoded(encoder.vision, media_of(parts), spans)
        reservation = source.vision.reserve([(span.digest, span.tokens) for span in spans])  # type: ignore[union-attr]
        assert reservation is not None
        for mine, theirs in zip(made.slots, reservation.slots, strict=True):
            copy(encoder.memory()["embeds"], source.memory()["embeds"], mine, theirs)
        source.vision.adopt(reservation)  # type: ignore[union-attr]
        item = asking(words, spans, reservation.slots, 1, root=ROOT)
        pinned, first = prefilled(source, item)
        names = split(chain(pack_tokens(array("I", words)), SIZE, ROOT, item.extra))
        adopted = handed_off(source, target, pinned, names, len(words) % SIZE > 0)
        more = asking(words, spans, [()] * len(spans), root=ROOT, digests=names, generated=[first])
        more.reservation = adopted.reservation
        target.submit(more)
        said = [first, *(output.token for result in drain(target) for output in result.outputs)]
        assert said == generated(model.path, words, media_of(parts), COUNT)
        encoder.vision.release(made)
        source.vision.release(reservation)  # type: ignore[union-attr]
    for engine in (encoder, source, target):
        engine.close()


def test_an_answer_continues_on_another_engine(model: ModelDir) -> None:
    words, spans = prompt(model, "See", LONG, "and", A, "?")
    whole = generated(model.path, words, [LONG, A], COUNT)
    engine = build(str(model.path), options())
    slots = encoded(engine.vision, [LONG, A], spans).slots
    (said,) = tokens(run(engine, [asking(words, spans, slots, generated=whole[:5])])).values()
    assert said == whole[5:]
    engine.close()


def test_a_later_prompt_finds_the_blocks_of_a_video_and_of_the_answer(model: ModelDir) -> None:
    """Answers count on behind the prompt, as the same tokens do in a later prompt, whatever the video's length."""
    engine = build(str(model.path), options())
    words, spans = prompt(model, LONG, "?")
    count = 2 * SIZE
    slots = encoded(engine.vision, [LONG], spans).slots
    (said,) = tokens(run(engine, [asking(words, spans, slots, count)])).values()
    assert said == generated(model.path, words, [LONG], count)
    more, later = prompt(model, "Sure?", B)
    before = len(words) + count
    spans = [*spans, *(span._replace(position=span.position + before) for span in later)]
    second, raws = [*words, *said, *more], [LONG, B]
    engine.submit(asking(second, spans, encoded(engine.vision, raws, spans).slots, key="second"))
    results = drain(engine)
    assert results[0].started[0].cached_tokens >= (before - 1) // SIZE * SIZE
    got = [output.token for result in results for output in result.outputs]
    assert got == generated(model.path, second, raws, COUNT)
    engine.close()


def test_a_long_video_goes_through_the_tower_in_parts(model: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = []
    for most in (native_vision.PATCHES, 64):
        monkeypatch.setattr(native_vision, "PATCHES", most)
        encoder = build_encoder(str(model.path), options())
        passes = []
        inner: Any = encoder.vision.encoder
        features = inner._features
        monkeypatch.setattr(inner, "_features", lambda images, f=features, p=passes: p.append(len(images)) or f(images))
        _, spans = prompt(model, LONG, A)
        slots = encoded(encoder.vision, [LONG, A], spans).slots
        rows = [inner.pool.read(of, span.tokens) for of, span in zip(slots, spans, strict=True)]
        embedded.append(torch.cat(rows).clone())
        assert (len(passes) > 1) == (most == 64)
        encoder.close()
    torch.testing.assert_close(embedded[0], embedded[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (FILM[: len(FILM) // 2], "video/mp4", "a video cannot be decoded"),
        (b"nothing", "video/webm", "a video is not an MP4"),
        (A[:200], "image/png", "an image is not a readable PNG"),
        (A, "embedding", "media of kind 'embedding' are not supported"),
        (A, "audio/wav", "media of kind 'audio/wav' are not supported"),
    ],
)
def test_media_that_cannot_be_used_are_refused(model: ModelDir, raw: bytes, kind: str, message: str) -> None:
    encoder = build_encoder(str(model.path), options())
    with pytest.raises(RequestError, match=message) as caught:
        encoder.vision.prepare(raw, kind)
    assert caught.value.code == Code.invalid_request
    encoder.close()


@pytest.mark.parametrize("grid", [(), (1, 2), (1, 4, 99), (0, 4, 4)])
def test_a_medium_without_its_grid_is_refused(model: ModelDir, grid: tuple[int, ...]) -> None:
    engine = build(str(model.path), options())
    words, spans = prompt(model, A)
    slots = encoded(engine.vision, [A], spans).slots
    with pytest.raises(RequestError, match="needs time, height and width"):
        engine.submit(asking(words, [spans[0]._replace(grid=grid)], slots))
    engine.close()


def test_a_folder_as_it_is_published_is_served(model: ModelDir, tmp_path: Path) -> None:
    found = modeldir.load(published(model.path, tmp_path / "it"))
    assert found.vision is not None, found.no_vision
    assert found.vision.patches is not None
    assert (found.max_model_len, found.eos_token_ids) == (model.max_model_len, model.eos_token_ids)
    assert found.vision.patches.frame_pixels == (128 * SQUARE, 768 * SQUARE), "as Qwen's own tools"
    engine = build(str(found.path), options(embed_slots=40, kv_blocks=200))
    words, spans = prompt(found, A, "Describe the picture.")
    slots = encoded(engine.vision, [A], spans).slots
    (said,) = tokens(run(engine, [asking(words, spans, slots)])).values()
    assert said == generated(model.path, words, [A], COUNT)
    words, spans = prompt(found, FILM, "?")
    assert spans[0].tokens >= 3 * 128
    assert run(engine, [asking(words, spans, encoded(engine.vision, [FILM], spans).slots)])
    engine.close()
