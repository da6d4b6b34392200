"""Qwen2.5-VL: images and videos of any size are seen as transformers sees them, in one engine and in three."""

from array import array
from typing import Any

import pytest
from blake3 import blake3

from penstock.infra.model import modeldir, video
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, media_extra, root, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import MediaReservation, MediaSpan, SequenceRequest
from penstock.workers.engines.native.build import build, build_encoder
from penstock.workers.engines.native.model.options import NativeOptions
from tests.workers.engines.native.models import drain, request, run, tokens
from tests.workers.engines.native.qwen_vl import film, generated, picture, write
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


@pytest.mark.parametrize("batched", [8192, 37], ids=["whole", "in chunks"])
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
