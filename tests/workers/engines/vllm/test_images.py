"""Images through vLLM: LLaVA-NeXT, whose images have different numbers of tokens, and names of their blocks."""

import contextlib
import io
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from PIL import Image
from safetensors.torch import save

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, media_extra, root, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import MediaReservation, MediaSpan, RequestError, SequenceRequest
from penstock.workers.engines.native.build import build as native_engine
from penstock.workers.engines.native.build import build_encoder
from tests import standins
from tests.demo_model.shared_weights import join
from tests.workers.engines.contract import ALL, REAL, Driver, carried_on, fold, prefilled
from tests.workers.engines.native import llava_next, pictures, qwen_vl
from tests.workers.engines.native.models import request as native_request
from tests.workers.engines.native.models import run, tokens
from tests.workers.engines.native.test_handoff import copy
from tests.workers.engines.native.test_llava_next import COUNT, SIZE, asking, encoded, options, picture

(SUBJECT,) = (subject for subject in ALL if subject.name == "vllm")
PICTURES = ((1,), (3, 2), (0, 1))
ROOT = root("images")


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    if standins.real("vllm") and REAL != "vllm":
        pytest.skip("make test-vllm")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with SUBJECT.present():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return modeldir.load(llava_next.write(tmp_path_factory.mktemp("llava-next")))


@contextlib.contextmanager
def made(model: ModelDir, **more: Any) -> Iterator[Driver]:
    settings = SUBJECT.settings(
        **{"max_model_len": 1024, "max_batched_tokens": 1024, "block_size": SIZE, "kv_blocks": 160, "embed_slots": 64}
        | more
    )
    driver = Driver(SUBJECT.make(settings, model.path))
    try:
        yield driver
    finally:
        driver.engine.close()


def test_pictures_are_answered_as_transformers_answers_them_and_their_blocks_have_our_names(model: ModelDir) -> None:
    native = native_engine(str(model.path), options())
    with made(model) as driver:
        vision = driver.engine.vision
        assert vision is not None
        for numbers in PICTURES:
            mine = encoded(native.vision, model, numbers)
            wanted = tokens(run(native, [asking(model, numbers, mine.slots)]))[numbers]
            assert len(wanted) == COUNT
            native.vision.release(mine)
            held = encoded(vision, model, numbers)
            request = msgspec.structs.replace(asking(model, numbers, held.slots), root=ROOT)
            for turn in range(2):
                seen = driver.run(msgspec.structs.replace(request, key=(numbers, turn)))
                assert seen.failures == []
                assert seen.tokens((numbers, turn)) == wanted
            assert seen.cached((numbers, 1)) >= (len(request.prompt) - 1) // SIZE * SIZE
            names = split(chain(pack_tokens(request.prompt), SIZE, ROOT, request.extra))
            driver.until(lambda names=names: set(names) <= set(driver.fold()), "the names of its blocks")
            # What another worker began is continued behind the same images.
            begun = msgspec.structs.replace(request, key="later", generated=tuple(wanted[:4]))
            assert driver.run(begun).tokens("later") == wanted[4:]
            vision.release(held)
        driver.idle()
        assert fold(driver.engine.dump()) == driver.fold()
    native.close()


def sight(driver: Driver) -> Any:
    return driver.engine.vision


def shown(request: SequenceRequest, held: MediaReservation, **more: Any) -> SequenceRequest:
    """The request where its pictures are in these slots."""
    media = [span._replace(slots=slots) for span, slots in zip(request.media, held.slots, strict=True)]
    return msgspec.structs.replace(request, media=media, **more)


def test_a_decode_engine_continues_after_pictures_that_a_prefill_engine_computed(model: ModelDir) -> None:
    with made(model) as whole, made(model, role="prefill") as source, made(model, role="decode") as target:
        drivers = (whole, source, target)
        for numbers in PICTURES:
            here, there, then = [encoded(sight(driver), model, numbers) for driver in drivers]
            request = msgspec.structs.replace(asking(model, numbers, here.slots), root=ROOT)
            wanted = whole.run(request).tokens(numbers)
            assert len(wanted) == COUNT
            for key in ("first", "again"):  # both have its blocks by then
                pinned, first = prefilled(source, shown(request, there, key=key))
                later = shown(request, then, key=key, generated=[first])
                seen = carried_on(SUBJECT, source, target, pinned, later)
                assert seen.failures == []
                assert [first, *seen.tokens(key)] == wanted
                assert seen.cached(key) >= len(request.prompt) - 1  # no picture was computed here
            names = split(chain(pack_tokens(request.prompt), SIZE, ROOT, request.extra))
            target.until(lambda names=names: set(names) <= set(target.fold()), "the names of its blocks")
        pinned, first = prefilled(source, shown(request, there, key="lost", root=root("another tenant")))
        source.engine.close()
        lost = shown(request, then, key="lost", root=root("another tenant"), generated=[first], opaque=pinned.opaque)
        assert [first, *target.run(lost).tokens("lost")] == wanted


def seen(model: ModelDir, raws: Seq[bytes], key: object) -> SequenceRequest:
    """A request about pictures, without slots."""
    vision, ids = model.vision, model.tokenizer.token_to_id
    assert vision is not None
    begin, end = ([each] if each else [] for each in (ids("<|vision_start|>"), ids("<|vision_end|>")))
    words, spans = list(model.tokenizer.encode("<|im_start|>user\n").ids), []
    for raw in raws:
        width, height = Image.open(io.BytesIO(raw)).size
        grid = () if vision.patches is None else tuple(vision.patches.image(height, width))
        words += begin
        spans.append(MediaSpan(len(words), vision.tokens_of(height, width), blake3(raw).digest(), (), grid))
        words += [*[vision.image_token_id] * spans[-1].tokens, *end]
    words += model.tokenizer.encode("Describe it.<|im_end|>\n<|im_start|>assistant\n").ids
    extra = media_extra((span[:3] for span in spans), SIZE)
    return native_request(key, words, COUNT, media=spans, extra=extra, root=ROOT)


def held(vision: Any, request: SequenceRequest, raws: Seq[bytes]) -> MediaReservation:
    reservation: MediaReservation = vision.reserve([(span.digest, span.tokens) for span in request.media])
    missing = {at: vision.prepare(raws[at], "image/png") for at, have in enumerate(reservation.have) if not have}
    vision.encode(reservation, missing)
    return reservation


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_embeddings_of_an_encode_engine_stand_for_pictures(kind: str, tmp_path: Path) -> None:
    if kind == "llava":
        join(pictures.DIRECTORY, tmp_path / "model")
        raws = [pictures.picture(number) for number in range(4)]
    elif not standins.real("vllm"):
        pytest.skip("the stand-in computes LLaVA only")
    else:
        (tmp_path / "model").mkdir()
        qwen_vl.write(tmp_path / "model", wider=4)
        raws = [qwen_vl.picture(*size) for size in ((64, 40), (88, 24), (40, 40), (56, 32))]
    model = modeldir.load(tmp_path / "model")
    encoder: Any = build_encoder(str(model.path), options(embed_slots=64, dtype="float32"))
    native: Any = native_engine(str(model.path), options(dtype="float32"))
    with (
        made(model, dtype="float32") as whole,
        made(model, dtype="float32", role="prefill") as source,
        made(model, dtype="float32", role="decode") as target,
    ):
        complete, vision, last = (sight(driver) for driver in (whole, source, target))
        for chosen in (raws[:1], raws[1:3]):
            request = seen(model, chosen, "asked")
            mine = held(native.vision, request, chosen)
            wanted = tokens(run(native, [shown(request, mine)]))["asked"]
            native.vision.release(mine)
            assert len(wanted) == COUNT
            sent = held(encoder.vision, request, chosen)
            taken = vision.reserve([(span.digest, span.tokens) for span in request.media])
            assert not any(taken.have)
            for theirs, mine in zip(sent.slots, taken.slots, strict=True):
                copy(encoder.memory()["embeds"], source.engine.memory()["embeds"], theirs, mine)
            vision.adopt(taken)
            pinned, first = prefilled(source, shown(request, taken))
            then = held(last, request, chosen)
            after = carried_on(SUBJECT, source, target, pinned, shown(request, then, generated=[first]))
            assert (after.failures, [first, *after.tokens("asked")]) == ([], wanted)
            names = split(chain(pack_tokens(request.prompt), SIZE, ROOT, request.extra))
            source.until(lambda names=names: set(names) <= set(source.fold()), "the names of its blocks")
        # 1 is in the pool as embeddings, 3 is not there: both come as files, since a request has one kind.
        keys = [(blake3(raw).digest(), seen(model, [raw], "").media[0].tokens) for raw in raws]
        assert vision.reserve(keys[1:3]).have == [True, True]
        assert vision.reserve([keys[1], keys[3]]).have == [False, False]
        both = seen(model, [raws[1], raws[3]], "both")
        wanted = whole.run(shown(both, held(complete, both, [raws[1], raws[3]]))).tokens("both")
        answer = source.run(shown(both, held(vision, both, [raws[1], raws[3]]))).tokens("both")
        # vLLM may still have 1 as the encode worker embedded it, and its own tower differs with this Qwen2.5-VL.
        assert answer == wanted if kind == "llava" else len(answer) == COUNT
        mixed = seen(model, raws[1:3], "mixed")
        half = vision.reserve(keys[1:3])
        assert half.have == [False, False]
        with pytest.raises(RequestError, match="takes only one kind"):
            source.engine.submit(shown(mixed, half))
        short = save({"rows": torch.zeros(10, model.vision.hidden if model.vision else 0)})
        with pytest.raises(RequestError, match="has 64 tokens, not 10" if kind == "llava" else "not supported"):
            vision.prepare(short, "embedding")
    encoder.close()
    native.close()


def test_what_it_does_not_take_is_refused(model: ModelDir) -> None:
    with made(model) as driver:
        vision = driver.engine.vision
        assert vision is not None
        assert driver.engine.memory() == {}  # vLLM's engine ends where embeddings of different sizes meet
        with pytest.raises(RequestError, match="takes images, not embedding"):
            vision.prepare(b"", "embedding")
        with pytest.raises(RequestError, match="takes images, not video/mp4"):
            vision.prepare(b"", "video/mp4")
        with pytest.raises(RequestError, match="is not a readable PNG"):
            vision.prepare(picture(1)[:40], "image/png")
        request = asking(model, (1,), [()])
        with pytest.raises(RequestError, match="are not on this worker"):
            driver.engine.submit(request)


@pytest.mark.skipif(standins.real("vllm"), reason="reaches into the stand-in")
def test_an_image_of_other_tokens_than_the_gateway_counted_ends_its_request(
    model: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks would have names of other prompts."""
    with made(model) as driver:
        engine: Any = driver.engine
        embed = engine.runtime.llm.core.model.embed
        monkeypatch.setattr(
            engine.runtime.llm.core.model, "embed", lambda images: [rows[:-1] for rows in embed(images)]
        )
        held = encoded(engine.vision, model, (1,))
        seen = driver.run(asking(model, (1,), held.slots))
        (failure,) = seen.failures
        assert "made other tokens of an image than the gateway counted" in failure.message
        assert seen.outputs == []
