"""Images through vLLM: LLaVA-NeXT, whose images have different numbers of tokens, and names of their blocks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, root, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.engine_protocol import MediaReservation, RequestError, SequenceRequest
from penstock.workers.engines.native.build import build as native_engine
from tests import standins
from tests.workers.engines.contract import ALL, REAL, Driver, carried_on, fold, prefilled
from tests.workers.engines.native import llava_next
from tests.workers.engines.native.models import run, tokens
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


def shown(request: SequenceRequest, held: MediaReservation, **more: Any) -> SequenceRequest:
    """The request where its pictures are in these slots."""
    media = [span._replace(slots=slots) for span, slots in zip(request.media, held.slots, strict=True)]
    return msgspec.structs.replace(request, media=media, **more)


def test_a_decode_engine_goes_on_behind_pictures_that_a_prefill_engine_computed(model: ModelDir) -> None:
    with made(model) as whole, made(model, role="prefill") as source, made(model, role="decode") as target:
        drivers = (whole, source, target)
        for numbers in PICTURES:
            here, there, then = [encoded(driver.engine.vision, model, numbers) for driver in drivers]
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


def test_what_it_does_not_take_is_refused(model: ModelDir) -> None:
    with made(model) as driver:
        vision = driver.engine.vision
        assert vision is not None
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
